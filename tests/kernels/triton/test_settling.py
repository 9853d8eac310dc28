"""bench/gpu_settle.py: a round in the midst of answers is replayed with other tiles, and keeps the fastest.

No time is judged: what a round takes is made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline import Eagle
from paceline.testing import tiny_llm
from tests.bench.scripts import ROOT, load
from tests.drafters.tiny_eagle import tiny_eagle
from tests.kernels.triton.conftest import THERE

pytestmark = [
    pytest.mark.skipif(THERE, reason="a tiny model's rounds, as a CPU goes through them"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    found = load("bench/gpu_settle.py")
    for name, value in (("SECONDS", 0.0), ("TURNS", 1), ("ROOM", 24), ("BEGUN", 3)):
        monkeypatch.setattr(sys.modules["gpu_rounds"], name, value)
    return found


def decoding_of(script: ModuleType, drafter: Any = None, length: int = 20) -> Any:
    alike = {"max_num_seqs": 2, "max_model_len": 64, "num_pages": 40, "budget": "fixed"}
    return script.Decoding(tiny_llm(drafter, behind=1, captured=True, kernels="triton", **alike), 2, length)


@pytest.mark.parametrize("nodes", [0, 1])
def test_a_round_is_replayed_from_the_same_lengths_every_time(script: ModuleType, tables: Any, nodes: int) -> None:
    drafter = Eagle(tiny_eagle("third"), nodes) if nodes else None
    decoding = decoding_of(script, drafter)
    slots, lengths = decoding.plan.slots, decoding.table.lengths
    assert decoding.plan.decodes and decoding.nodes == nodes
    assert lengths[slots].tolist() == [20, 20], "longer than they are"
    pages = decoding.table.pages.tensor[slots][:, : 44 // decoding.llm.engine.cache.pool.block_size]
    assert pages.unique().numel() == pages.numel() and pages.min() > 0, "each has its own"
    for count in (2, 1):
        lengths[slots] = 20
        assert decoding.spend(count) > 0
        more = (lengths[slots] - 20).tolist()
        assert all(1 <= one <= 1 + nodes for one in more[:count]) and not any(more[count:]), "one round's"


def test_sequences_that_do_not_all_begin_are_said_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["gpu_rounds"], "ROOM", 2)
    with pytest.raises(SystemExit, match="2 sequences have not all begun to decode after 1 rounds"):
        decoding_of(script)
    with pytest.raises(argparse.ArgumentTypeError, match="each must be one of 1, 2, 4, 8"):
        script.group("1,12")
    assert script.group("1,16") == [1, 16]


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
    usual = tables.Tile(16, 32, 32, stages=2, ahead=4)
    slow, fast = (dataclasses.replace(usual, warps=warps) for warps in (2, 8))
    best, had = dataclasses.replace(fast, ahead=0), dict(tables.measured)
    costs = {best: 1.0, fast: 2.0, usual: 3.0, slow: 4.0}
    tables.measured[keys[0]], compiled = usual, set[Any]()
    for key in keys[1:]:
        monkeypatch.setitem(tables.measured, key, usual)

    def tune(shapes: Any, rows: Any, device: torch.device, dtype: torch.dtype) -> None:
        key = rows[0], shapes[0], dtype
        monkeypatch.setitem(tuning.timed, key, {slow: 1.0, fast: 2.0})  # alone
        tables.measured[key] = slow

    def spend(count: int) -> float:
        return count * sum(costs[tables.measured[key]] for key in keys)

    def prepare(rounds: Iterable[Any]) -> None:
        for made in rounds:
            assert callable(made)
            compiled.update(tables.measured.values())

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(decoding, "spend", spend)
    monkeypatch.setattr(decoding.llm.engine.target.model.ops, "prepare", prepare)
    before, after = script.settle(decoding, [1, 2], torch.device("cpu"))
    assert not had and [tables.measured[key] for key in keys] == [best] * len(keys)
    assert before == [3.0 * len(keys), 6.0 * len(keys)], "with what there was, not with what is best alone"
    assert after == [1.0 * len(keys), 2.0 * len(keys)] and compiled == set(costs)
    assert capsys.readouterr().out.count("16 rows, ") == len(keys)


def test_a_tile_that_has_no_room_in_a_round_takes_for_ever(
    script: ModuleType, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.errors import OutOfResources

    def fail(*given: Any) -> None:
        raise OutOfResources(300, 227, "shared memory")

    decoding = decoding_of(script)
    monkeypatch.setattr(decoding.runner, "_remember", fail)
    assert decoding.spend(1) == float("inf")


def test_rounds_of_every_length_are_replayed_with_every_setting_of_attention(
    script: ModuleType, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import attention

    looks = load("bench/gpu_looks.py")
    assert all(isinstance(getattr(attention, name), int) for name in looks.NAMES)
    decoding, usual, seen = decoding_of(script), attention.SINGLE, list[tuple[int, int]]()

    def spend(count: int) -> float:
        seen.append((int(decoding.lengths[decoding.plan.slots[0]]), attention.SINGLE))
        return count / 100

    monkeypatch.setattr(decoding, "spend", spend)
    rows = list(looks.spend(decoding, 2, [20, 30], [{}, {"SINGLE": 7}]))
    assert [(length, given.get("SINGLE", usual)) for length, given, _ in rows] == seen
    assert seen == [(20, usual), (20, 7), (30, usual), (30, 7)] and {seconds for *_, seconds in rows} == {0.02}
    assert looks.setting("SINGLE=7,WARPS=132") == {"SINGLE": 7, "WARPS": 132} and usual == attention.SINGLE
    for wrong in ("CHUNK=64", "SINGLE", "SINGLE=-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{wrong}' is none; allowed: NAME=NUMBER, of WARPS"):
            looks.setting(wrong)
