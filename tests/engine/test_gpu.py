"""The whole engine where the tables are apart for real. `make test-gpu` runs these; without a GPU they are skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import LLM, NGram, SamplingParams
from paceline.sampling import noise
from tests.fakes import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def test_weights_are_made_on_the_device_and_the_cache_takes_its_share(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_model().config.to_dict()))
    options = {"load_format": "dummy", "device": "cuda", "dtype": "bfloat16", "max_model_len": 128}
    llm = LLM(str(tmp_path), max_num_seqs=4, gpu_memory_utilization=0.5, **options)
    assert llm.engine.target.model.embedding.data.device.type == "cuda"
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7] * 5, [9, 8] * 6]
    plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert [len(text) for text in plain] == [24, 24]
    llm.set_drafter(NGram(min_match=1))
    drafted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert [len(text) for text in drafted] == [24, 24]


def test_the_noise_has_the_same_bits_as_on_a_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        keys = noise.Keys(*torch.tensor([[3, -7, 2**62], [0, 1, 2]], device=device))
        positions = torch.tensor([5, 6, 7], device=device)
        found.append(noise.gumbel(keys, positions, noise.SAMPLE, 49152).cpu())
    assert torch.equal(*found)
