"""Tiny random models of families that are not ours, to be run by the fallback."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GATED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
OLD = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.4}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.4}

FAMILIES: dict[str, Any] = {
    "phi3": lambda: transformers.Phi3Config(**GATED),
    "phi3_window": lambda: transformers.Phi3Config(**GATED, sliding_window=8),
    "falcon": lambda: transformers.FalconConfig(**SHAPE, multi_query=True),
    "falcon_alibi": lambda: transformers.FalconConfig(**SHAPE, alibi=True, multi_query=False),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SHAPE, intermediate_size=48),
    "bloom": lambda: transformers.BloomConfig(**BLOOM),
    "stablelm": lambda: transformers.StableLmConfig(**GATED),
    "cohere": lambda: transformers.CohereConfig(**GATED, logit_scale=0.25),
    "cohere2": lambda: transformers.Cohere2Config(**GATED, sliding_window=8),
    "olmo": lambda: transformers.OlmoConfig(**GATED),
    "olmo2": lambda: transformers.Olmo2Config(**GATED),
    "gemma": lambda: transformers.GemmaConfig(**GATED, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**GATED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "starcoder2": lambda: transformers.Starcoder2Config(**GATED, sliding_window=8),
    "gptj": lambda: transformers.GPTJConfig(**OLD, rotary_dim=4),
    "codegen": lambda: transformers.CodeGenConfig(**OLD, rotary_dim=4),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=2, max_seq_len=256, initializer_range=0.4
    ),
    "glm": lambda: transformers.GlmConfig(**GATED, head_dim=8),
    "glm4": lambda: transformers.Glm4Config(**GATED, head_dim=8),
    "granite": lambda: transformers.GraniteConfig(**GATED, logits_scaling=2.0),
    "phi": lambda: transformers.PhiConfig(**GATED),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**OLD),
    "gpt_neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=256,
        initializer_range=0.4,
    ),
    "nemotron": lambda: transformers.NemotronConfig(**GATED),
    "persimmon": lambda: transformers.PersimmonConfig(**SHAPE, intermediate_size=48),
    "exaone4": lambda: transformers.Exaone4Config(**GATED, sliding_window=8),
    "smollm3": lambda: transformers.SmolLM3Config(**GATED),
    "gemma3": lambda: transformers.Gemma3Config(  # a model that reads pictures too, given text
        text_config=dict(GATED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        image_token_index=96,
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **GATED,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "llama_yarn": lambda: transformers.LlamaConfig(
        **GATED, rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(  # keys are narrower than values
        **{**GATED, "num_key_value_heads": 4},
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
}

# Those that are held to the contract too; the last two have ALiBi.
ROTARY = (
    "phi3",
    "phi3_window",
    "falcon",
    "gpt_neox",
    "stablelm",
    "cohere",
    "olmo",
    "gemma2",
    "starcoder2",
    "gptj",
    "glm",
)
SHOWN = (*ROTARY, "bloom", "mpt")


@functools.cache
def make(name: str) -> Any:
    """Its biases and norms far from where they start, so that none can be left out unnoticed."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval().float()
    for part, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in part or "ln" in part else 0.3, 0.2)
    return model
