"""Tiny random DeepSeek models, and how they are loaded in either form."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from paceline.models import loader
from tests.models.running import CPU

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "num_mtp_layers": 0,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {"first_k_dense_replace": 1},
    "experts_alike": {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "experts_yarn": {"first_k_dense_replace": 1, "n_shared_experts": 2, "rope_parameters": YARN},
    "no_query_rank": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "biased_tied": {"attention_bias": True, "tie_word_embeddings": True},
    "half_split": {"rope_interleave": False},
    "odd_widths": {"qk_nope_head_dim": 5, "v_head_dim": 3, "kv_lora_rank": 5},
}
# Widths that blocks of 32 divide, so that everything can be packed; the rank is one the kernels have loops for.
PACKABLE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


def tiny_deepseek(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**SHAPE, **CONFIGS[name], **more})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for key, tensor in model.state_dict().items():  # norms start at one and biases at zero, which hides a missing one
        if tensor.dim() == 1:
            torch.nn.init.normal_(tensor, 0.0 if "correction" in key else 0.5, 0.2)
    return model


def build(model: Any, kernels: str = "torch", absorbed: bool = True, quantization: str | None = None) -> loader.Loaded:
    found = loader.find(model)
    if not absorbed:
        found = dataclasses.replace(found, config=found.config.naive())
    return loader.build(found, torch.float32, CPU, kernels, 256, quantization)
