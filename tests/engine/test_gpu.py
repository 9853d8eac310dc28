"""The whole engine where the tables are apart for real. `make test-gpu` runs these; without a GPU they are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, NGram, SamplingParams
from paceline.engine.replaying import ReplayingRunner
from paceline.sampling import noise
from paceline.testing import SETTINGS, Wavering, prompts
from tests.drafters.contract import DRAFTERS
from tests.fakes import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
DEVICE = "cuda"
RECORDED = {(5, 6): [5, 6, 7, 8, 9, 10]}  # what knowing heads are made to know; here any will do


def tiny(drafter: Any = None, **options: Any) -> LLM:
    fixed = {"device": DEVICE, "dtype": "bfloat16", "max_model_len": 192, "max_num_seqs": 8, "num_pages": 128}
    return LLM(tiny_model(), drafter, **{**fixed, "skip_tokenizer_init": True, **options})


def texts(llm: LLM, setting: str) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(8), SETTINGS[setting])]


@pytest.mark.parametrize("setting", ["greedy", "seeded", "everything"])
def test_every_drafter_says_what_plain_decoding_says_in_bfloat16(setting: str) -> None:
    with tiny() as llm:
        plain = texts(llm, setting)
        alone = [llm.generate([ids], SETTINGS[setting])[0].outputs[0].token_ids for ids in prompts(8)]
        assert alone == plain
        for name in ("ngram", "suffix", "eagle3", "eagle_dynamic", "draft_model"):
            llm.set_drafter(DRAFTERS[name](RECORDED))
            assert texts(llm, setting) == plain, name
    with tiny(enforce_eager=True) as llm:
        assert texts(llm, setting) == plain, "launched one by one"


def test_usual_rounds_are_replayed_and_allocate_nothing() -> None:
    with tiny(NGram(4, min_match=1), budget="fixed") as llm:
        runner = llm.engine.runner
        assert isinstance(runner, ReplayingRunner)
        first = texts(llm, "greedy")
        torch.cuda.synchronize()
        before, captured = torch.cuda.memory_stats(), len(runner.captured)
        assert texts(llm, "greedy") == first
        after = torch.cuda.memory_stats()
        assert len(runner.captured) == captured
        for name in ("num_device_alloc", "num_ooms", "reserved_bytes.all.current"):
            assert after[name] == before[name], name


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


def forbid(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Never the likeliest behind an even number of tokens."""
    if len(output) % 2 == 0:
        logits[logits.argmax()] = float("-inf")
    return logits


WISHES: dict[str, Any] = {
    "words": {"bad_words": [[7], [3, 4], [11, 12, 13]]},
    "least": {"min_tokens": 12, "stop_token_ids": [*range(3, 60)]},
    "functions": {"logits_processors": [forbid]},
    "nothing": {},
}


@pytest.mark.parametrize("name", ["none", "suffix", "first_of", "eagle_static", "eagle_dynamic", "medusa_tree"])
def test_whatever_is_asked_for_replayed_rounds_say_what_launched_ones_do(name: str) -> None:
    """Each wish alone beside requests without one, then all side by side; drafts are tried and left by turns."""
    base = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    params = {wish: SamplingParams(**base, **more) for wish, more in WISHES.items()}
    prompts, found = [[5, 6, 7] * 5, [9, 8] * 6, [30, 31, 32, 33] * 3, [40, 41] * 4], []
    for eager in (True, False):
        drafter = None if name == "none" else DRAFTERS[name](RECORDED)
        options = {"device": DEVICE, "max_model_len": 128, "max_num_seqs": 4, "num_pages": 64, "enforce_eager": eager}
        llm = LLM(tiny_model(), drafter=drafter, **options)
        if drafter is not None:
            llm.engine.budget = Wavering(llm.engine.drafter.max_nodes)
        for mixed in (*([one, *[params["nothing"]] * 3] for one in params.values()), [*params.values()]):
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, mixed)])
        llm.close()
    assert found[:5] == found[5:] and len({str(texts) for texts in found}) >= 4
