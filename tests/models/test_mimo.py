"""MiMo: Qwen2's model in a folder whose type transformers does not know, with modules that are not the model's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from paceline.kernels import KERNELS
from paceline.models import loader
from tests.drafters.tiny_mtp import mimo_model, write_mimo
from tests.models.running import CPU, run


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name not in ("auto", "triton")])
def test_logits_are_those_of_transformers_qwen2(kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = mimo_model()(torch.tensor([ids])).logits[0]
    with caplog.at_level(logging.WARNING, "paceline"):
        loaded = loader.build(loader.find(write_mimo(tmp_path, 2)), torch.float32, CPU, kernels, 256)
    assert loaded.config.architecture == "mimo"
    assert loaded.unused == [] and "does not use" not in caplog.text, "modules are no tensors too many"
    for chunks in ([40], [13, 20, 7], [1] * 40):
        assert (run(loaded, ids, chunks)[0] - wanted).abs().max() <= 1e-4
