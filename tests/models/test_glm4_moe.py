"""GLM-4.5 against transformers: the same logits whole, in chunks and token by token, on every set of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.errors import CheckpointError
from paceline.kernels import KERNELS
from paceline.models import loader
from tests.models.running import CPU, SINGLY, run

LENGTH = 40
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "head_dim": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed heads": {"use_qk_norm": True, "attention_bias": True},
    "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "no sum": {"norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 2},
    "all experts": {"first_k_dense_replace": 0, "partial_rotary_factor": 0.25, "tie_word_embeddings": True},
}


@functools.cache
def make(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**SHAPE, **CONFIGS[name])).eval().float()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("norm.weight", ".bias")):
            torch.nn.init.normal_(tensor, 1.0 if "norm" in key else 0.5, 0.2)
        if key.endswith(("e_score_correction_bias", "gate.weight")):
            torch.nn.init.normal_(tensor, 0.0, 0.3)
    return model


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name not in ("auto", "triton")])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(
    name: str, kernels: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = make(name)
    ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    model.save_pretrained(tmp_path)
    worst = 0.0
    for given in (model, tmp_path):
        loaded = loader.build(loader.find(given), torch.float32, CPU, kernels, 256)
        assert loaded.unused == []
        for chunks in ([LENGTH], [13, 20, 7], SINGLY):
            worst = max(worst, float((run(loaded, ids, chunks)[0] - wanted).abs().max()))
    record_property("shown", f"GLM-4.5, {name}, {kernels}: logits differ from transformers' by {worst:.1e} at most")
    assert worst <= 1e-4 and wanted.std() > 0.05


@pytest.mark.parametrize("name", ["first_k_dense_replace", "n_shared_experts", "n_routed_experts", "n_group"])
def test_a_count_that_makes_no_model_is_refused(name: str) -> None:
    config = transformers.Glm4MoeConfig(**SHAPE)
    setattr(config, name, -1)
    with pytest.raises(CheckpointError, match="=-1; allowed: a whole number"):
        loader.from_transformers(config)
