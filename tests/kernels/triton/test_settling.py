"""bench/gpu_settle.py: a round in the midst of answers is replayed with other tiles, and keeps the fastest.

No time is judged: what a round takes is made up.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.testing import tiny_llm
from tests.bench.scripts import ROOT, load
from tests.kernels.triton.conftest import THERE

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
pytestmark = [
    pytest.mark.skipif(THERE, reason="a tiny model's rounds, as a CPU goes through them"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("triton")
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        return load("bench/gpu_settle.py")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def decoding_of(script: ModuleType) -> Any:
    llm = tiny_llm(behind=1, captured=True, kernels="triton", max_num_seqs=2, max_model_len=128)
    return script.Decoding(llm, PROMPTS)


def test_a_round_is_replayed_from_the_same_lengths_every_time(
    script: ModuleType, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "SECONDS", 0.0)
    monkeypatch.setattr(script, "TURNS", 1)
    decoding = decoding_of(script)
    slots, lengths = decoding.plan.slots, decoding.table.lengths
    begun = decoding.lengths[slots]
    assert decoding.plan.decodes and (begun > torch.tensor([3, 4])).all(), "both have their first tokens"
    for count in (2, 1, 2):
        assert decoding.spend(count) > 0
        assert (lengths[slots] - begun).tolist() == [2] * count + [0] * (2 - count), "two replays of the first ones"


def test_all_products_of_a_round_are_found_and_keep_the_tiles_it_is_fastest_with(
    script: ModuleType, tables: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.kernels.triton import tuning

    decoding = decoding_of(script)
    keys = decoding.products([1, 2])
    assert {rows for rows, _, _ in keys} == {16} and {dtype for _, _, dtype in keys} == {torch.float32}
    sides = decoding.llm.config
    shapes = [(shape.n, shape.k, shape.gate, shape.normed) for _, shape, _ in keys]
    assert (sides.intermediate_size, sides.hidden_size, True, True) in shapes
    assert (sides.vocab_size, sides.hidden_size, False, True) in shapes
    usual = tables.Tile(16, 32, 32, stages=2)
    slow, fast = (dataclasses.replace(usual, warps=warps) for warps in (2, 8))
    tables.measured[keys[0]] = slow  # of which alone the best is another

    def tune(shapes: Any, rows: Any, device: torch.device, dtype: torch.dtype) -> None:
        key = rows[0], shapes[0], dtype
        monkeypatch.setitem(tuning.timed, key, {slow: 1.0, fast: 2.0})
        tables.measured[key] = slow

    def spend(count: int) -> float:
        return count * sum(1.0 if tables.measured[key] == fast else 3.0 for key in keys)

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(decoding, "spend", spend)
    before, after = script.settle(decoding, [1, 2], torch.device("cpu"))
    assert [tables.measured[key] for key in keys] == [fast] * len(keys)
    assert before == [3.0 * len(keys), 6.0 * len(keys)] and after == [1.0 * len(keys), 2.0 * len(keys)]
    assert capsys.readouterr().out.count("16 rows, ") == len(keys)
