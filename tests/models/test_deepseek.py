"""DeepSeek V3 against transformers, in both forms, and what its cache costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from paceline.kernels import KERNELS
from paceline.models import loader
from tests.models.running import CPU, run

LENGTH = 40
TOLERANCE = 1e-4
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
}
FORMS = {"absorbed": True, "naive": False}


def make(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**SHAPE, **CONFIGS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for name, tensor in model.state_dict().items():  # norms start at one and biases at zero, which hides a missing one
        if tensor.dim() == 1:
            torch.nn.init.normal_(tensor, 0.0 if "correction" in name else 0.5, 0.2)
    return model


def found(model: Any, absorbed: bool = True) -> loader.Found:
    located = loader.find(model)
    assert located.config.latent is not None
    latent = dataclasses.replace(located.config.latent, absorbed=absorbed)
    return dataclasses.replace(located, config=dataclasses.replace(located.config, latent=latent))


def build(model: Any, kernels: str = "torch", absorbed: bool = True, quantization: str | None = None) -> loader.Loaded:
    return loader.build(found(model, absorbed), torch.float32, CPU, kernels, 256, quantization)


def ids() -> list[int]:
    return torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name != "auto"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, form: str, kernels: str, record_property: Callable[[str, object], None]
) -> None:
    model = make(name)
    with torch.no_grad():
        wanted = model(torch.tensor([ids()])).logits[0]
    loaded = build(model, kernels, FORMS[form])
    assert loaded.unused == []
    for chunks in ([LENGTH], [13, 20, 7], [1] * LENGTH):
        logits, _ = run(loaded, ids(), chunks)
        most = float((logits - wanted).abs().max())
        record_property("shown", f"{name}, {form}, {kernels}, {len(chunks)} passes: {most:.1e}")
        assert most <= TOLERANCE
    assert wanted.std() > 0.05, "logits that hardly differ would prove nothing"


def test_the_two_forms_agree_and_neither_is_the_other(record_property: Callable[[str, object], None]) -> None:
    model = make("yarn")
    logits = [run(build(model, "torch", form), ids(), [LENGTH])[0] for form in FORMS.values()]
    most = float((logits[0] - logits[1]).abs().max())
    record_property("shown", f"absorbed and naive differ by at most {most:.1e}")
    assert 0 < most <= TOLERANCE
