"""What a program does around the library: other default dtypes, forks. Texts stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, Eagle, NGram, SamplingParams
from paceline.drafters.first_of import FirstOf
from paceline.engine.engine import FEW
from paceline.engine.runner import Runner
from tests.drafters.tiny_eagle import tiny_eagle
from tests.fakes import tiny_model
from tests.kernels.tiny import tokens

ROOT = Path(__file__).parents[2]
REQUESTS = (  # every stage of the pipeline that makes tensors of its own
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {
        "temperature": 0.9,
        "seed": 6,
        "logit_bias": {5: 2.0, 7: -100.0},
        "allowed_token_ids": list(range(80)),
        "min_tokens": 4,
    },
)


@pytest.fixture
def default_dtype() -> Iterator[Any]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def said(llm: LLM) -> list[Any]:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **request) for request in REQUESTS]
    prompts = [(tokens(6, n) * 4)[:20] for n in range(len(params))]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def engine(kernels: str, acceptance: str, drafter: Any = None) -> LLM:
    drafter = drafter or FirstOf(NGram(4, 1, 3), DraftModel(tiny_model(layers=1, seed=1)))
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "prefix_caching": False}
    return LLM(tiny_model(), drafter, kernels=kernels, acceptance=acceptance, **options)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
@pytest.mark.parametrize("kernels", ["native", "reference", "torch"])
def test_another_default_dtype_changes_no_token(kernels: str, acceptance: str, default_dtype: Any) -> None:
    """Of an engine that was there before, nor of one loaded under it."""
    loaded = engine(kernels, acceptance)
    wanted = said(loaded)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        default_dtype(dtype)
        assert said(loaded) == wanted
        loaded = engine(kernels, acceptance)
    assert said(loaded) == wanted


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_another_default_dtype_is_nothing_to_a_drafter_that_knows_some_of_the_tokens(
    kernels: str, default_dtype: Any
) -> None:
    head = Eagle(tiny_eagle("third"), 3)  # its logits are widened to the target's vocabulary
    loaded = engine(kernels, "exact", head)
    wanted = said(loaded)
    default_dtype(torch.float64)
    assert said(loaded) == wanted
    assert said(engine(kernels, "exact", head)) == wanted


FORK = """
import os, sys, time
import torch
from paceline import LLM
from tests.fakes import tiny_model
from tests.kernels.tiny import tokens

torch.set_num_threads(2)
wide = torch.randn(600, 600, dtype=torch.float32)  # enough for PyTorch to use its threads, which a child does not have

def said(llm):
    wide.softmax(-1), wide @ wide
    answers = llm.generate([tokens(20, 1), tokens(9, 2)], temperature=0.7, seed=3, max_tokens=8, ignore_eos=True)
    return [answer.outputs[0].token_ids for answer in answers]

for kernels in ("torch", "reference", "native"):  # native last: nothing of it is there before
    llm = LLM(tiny_model(), "ngram", kernels=kernels, device="cpu", max_model_len=64)
    wanted = said(llm)
    child = os.fork()
    if child == 0:
        os._exit(0 if said(llm) == wanted and torch.get_num_threads() == 1 else 3)
    end = time.monotonic() + 100
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        status = "the child hangs"
    print(kernels, status, said(llm) == wanted and torch.get_num_threads())
"""


def test_a_child_forked_after_work_goes_on_and_its_parent_too_on_every_set_of_kernels(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORK)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=400, env=environment, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["torch 0 2", "reference 0 2", "native 0 2"], done.stdout + done.stderr[-2000:]


def test_a_step_leaves_pytorchs_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few sequences beside the native kernels: one thread during a step, and the caller's number afterwards."""
    seen: list[int] = []
    run = Runner.run

    def watch(self: Runner, *given: Any, **named: Any) -> Any:
        seen.append(torch.get_num_threads())
        return run(self, *given, **named)

    monkeypatch.setattr(Runner, "run", watch)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for kernels, during in (("native", 1), ("torch", 3)):
            seen.clear()
            LLM(tiny_model(), kernels=kernels).generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
            assert set(seen) == {during} and torch.get_num_threads() == 3
        seen.clear()
        many = [[1, 2, number] for number in range(FEW + 1)]
        LLM(tiny_model(), kernels="native").generate(many, SamplingParams(max_tokens=3, ignore_eos=True))
        assert 3 in seen and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
