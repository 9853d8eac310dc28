"""bench/gpu.py, run small on a CPU: every part writes its file, the pages can show it, and no token differs.

No time is judged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench import machine
from paceline.bench.results import write
from paceline.engine.options import EngineOptions
from paceline.prompts import Prompt
from tests.bench.gpu_script import SMALL, run
from tests.drafters.tiny_eagle import tiny_eagle


def test_without_a_gpu_it_says_so_in_a_line(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "steps"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "no GPU here: nothing was measured\n"


def test_made_up_weights_are_timed_and_shown_beside_what_is_to_be_reached(
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = run(gpu, monkeypatch, tmp_path, "steps", "verify", "profile", "long", "serving")
    (row,) = found["steps"]["rows"]
    assert isinstance(row["ms"], float) and row["rounds"] == 16, "24 new tokens less 8"
    assert (row["reach_ms"], row["peer_ms"]) == (4.4, 4.88)
    assert row["start"].keys() == {"seconds"}, "a CPU has no captured rounds"
    rounds = {row["round"]: row["rounds"] for row in found["verify"]["rows"]}
    assert rounds["8 rows, none accepted"] == 16 and rounds["8 rows, all accepted"] == 2
    profiled = {row["round"]: row["kernels"] for row in found["profile"]["rows"]}
    assert all(kernels == [] for kernels in profiled.values()), "a CPU has none"
    assert profiled.keys() == {"plain", "EAGLE-shaped, 5 drafts"}
    assert [row["who"] for row in found["serving"]["rows"]] == ["paceline"]
    assert found["serving"]["rows"][0]["rounds_with_prompts"] > 0
    text = figures.render("gpu_steps", tmp_path / "results")
    assert "| to be reached | 4.4 |" in text and "| vLLM 0.25.0 on an H200 | 4.88 |" in text
    started = {**row, "start": {"seconds": 9.04, "compiling": 3.0, "capturing": 4.06, "rounds": 57}}
    write(tmp_path / "started.json", {"part": "steps", **machine.record(), "rows": [started]})
    said = "llama-8b started in 9.0 s: kernels were compiled in 3.0 s, 57 rounds captured in 4.1 s."
    assert said in figures.render("started", tmp_path) and "started in" not in text
    for part in ("verify", "long", "serving"):
        assert "| --- |" in figures.render(f"gpu_{part}", tmp_path / "results")


def test_what_exactness_costs_is_found_of_two_engines_in_turns(
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = sys.modules["gpu_common"]
    assert common.FASTEST == {"exact_kernels": False} and EngineOptions(**common.FASTEST)
    monkeypatch.setitem(common.FASTEST, "exact_kernels", True)  # no CPU has others
    rows = run(gpu, monkeypatch, tmp_path, "fast")["fast"]["rows"]
    assert [(row["what"], row["batch"]) for row in rows] == [("first token of 32", 1), ("a step", 1)]
    assert all(row["cost"] == row["exact_ms"] / row["fast_ms"] - 1 for row in rows)
    told = {**rows[0], "exact_ms": 1.2, "fast_ms": 1.0, "cost": 0.2, "reach": 0.05}
    write(tmp_path / "dear.json", {"part": "fast", **machine.record(), "rows": [told, {**told, "cost": 0.04}]})
    text = figures.render("dear", tmp_path)
    assert "| 1.20 | 1.00 | **20.0%** | 5% |" in text and "| 1.20 | 1.00 | 4.0% | 5% |" in text


def test_drafters_that_are_right_now_and_then_change_no_text(
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = run(
        gpu,
        monkeypatch,
        tmp_path,
        "exact",
        "head",
        "profile",
        "--head",
        tiny_eagle("third"),
        "--grown",
        "15,4,2",
        "9,3,1",
    )
    exact = data["exact"]
    same, texts = (sum(row[name] for row in exact["rows"]) for name in ("identical", "texts"))
    assert same == texts > 0 and "unfinished" not in exact
    rows = {(row["setting"], row["drafter"]): row for row in exact["rows"]}
    tree = rows["seeded", "replay, trees"]
    assert all(tree["branches"]) and len(tree["branches"]) == 3, "every branch was taken"
    assert {"0", "2", "4"} <= tree["accepted_lengths"].keys()
    assert tree["prefix_hits"] > 0 and tree["preemptions"] > 0
    assert ("greedy", "EAGLE head, grown trees of 9: 3 children, 2 levels") in rows
    profiled = [row for row in data["profile"]["rows"] if row["sampling"]]
    assert {row["round"] for row in profiled} == {"plain", *(row["drafter"] for row in data["head"]["rows"])}
    assert [row["temperature"] for row in data["head"]["rows"]] == [0.0] * 4 + [0.8] * 4
    assert len({row["drafter"] for row in data["head"]["rows"]} & {drafter for _, drafter in rows}) == 4
    assert f"{texts} of {texts} texts are plain decoding's" in figures.render("gpu_exact", tmp_path / "results")
    assert "| 2 |" not in figures.render("gpu_head", tmp_path / "results"), "wanted is ≥ 2"


def test_lookups_and_transformers_are_timed_beside_plain(
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = run(gpu, monkeypatch, tmp_path, "lookup", "transformers")
    rows = data["lookup"]["rows"]
    assert [(row["prompts_of"], row["drafter"]) for row in rows[:3]] == [
        *(("summarisation", name) for name in ("ngram", "suffix")),
        ("retrieval", "ngram"),
    ]
    assert all(row["identical"] == row["prompts"] for row in rows) and len(rows) == 6
    who = [row["who"] for row in data["transformers"]["rows"]]
    theirs = ["transformers", "transformers, prompt lookup", "transformers, assisted"]
    assert who == ["paceline, plain", "paceline, ngram", *theirs]
    assert data["transformers"]["rows"][0]["ratio"] == 1.0
    for part in ("lookup", "transformers"):
        assert "| --- |" in figures.render(f"gpu_{part}", tmp_path / "results")


def test_prompts_are_different_fit_and_come_from_all_over_the_file(gpu: Any) -> None:
    common = sys.modules["gpu_common"]
    llm = SimpleNamespace(tokenizer=object(), max_model_len=20, read_chat=lambda size: Prompt(None, [7] * size))
    texts = [3, 3, 99, 3, 16, 15, 4, 5]  # by their tokens, of which 15 leave room for 4 more
    assert [len(ids) for ids in common.different(llm, texts, 3, 4)] == [3, 15, 4]
    assert [len(ids) for ids in common.different(llm, texts, 2, 4)] == [3, 4]
    assert [len(ids) for ids in common.different(llm, texts, 9, 4)] == [3, 15, 4, 5]
    assert [len(ids) for ids in common.asking(llm, texts, 6, 4)] == [3, 15, 4, 5, 3, 15]
    with pytest.raises(SystemExit, match="no prompt fits into 15 tokens"):
        common.different(llm, [99], 1, 4)
    llm.max_model_len = 99
    kinds = [len(ids) // 10 for ids in common.different(llm, range(80), 24, 4)]
    assert [kinds.count(kind) for kind in range(8)] == [3] * 8


def test_a_kernel_adds_what_it_runs_on_after_all_before_it(gpu: Any) -> None:
    def ran(name: str, start: float, end: float) -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": end - start, "args": {"grid": [2, 3]}}

    events = [ran("b", 1.0, 5.0), ran("a", 0.0, 4.0), ran("c", 6.0, 7.0), ran("within b", 2.0, 4.5)]
    found = [(name.removesuffix(", 6 programs"), added) for name, added in sys.modules["gpu_profile"].added(events)]
    assert [one for one in found if one[1]] == [
        ("a", 4.0),
        ("within b", 0.5),
        ("b", 0.5),
        (sys.modules["gpu_profile"].IDLE, 1.0),
        ("c", 1.0),
    ]


def test_profiles_and_peers_become_tables(figures: ModuleType, tmp_path: Path) -> None:
    kernels = [{"kernel": "matmul", "ms": 0.5}, {"kernel": "attention", "ms": 0.25}]
    row = {"shape": "smollm2", "batch": 64, "round": "plain", "step_ms": 1.0, "kernels_ms": 0.75}
    row |= {"kernels": kernels, "idle_ms": 0.125}
    sampled = {**row, "sampling": {"temperature": 0.8}}
    write(tmp_path / "profile.json", {"part": "profile", **machine.record(), "rows": [row, sampled]})
    lines = figures.render("profile", tmp_path).splitlines()
    assert lines[0] == "| kernel (smollm2, 64 sequences, plain: 1.00 ms a round) | ms it adds |"
    assert any("64 sequences, plain at temperature 0.8: 1.00 ms a round" in line for line in lines)
    assert lines[2:5] == ["| `matmul` | 0.500 |", "| `attention` | 0.250 |", "| all kernels | 0.750 |"]
    assert lines[5] == "| nothing runs | 0.125 |"
    absent = {"transformers": "it is not installed"}
    rows = [
        {"model": "m", "who": who, "tokens_per_second": speed, "ratio": 90 / speed, "absent": absent}
        for who, speed in (("ours", 90.0), ("t", 30.0))
    ]
    write(tmp_path / "peers.json", {"part": "transformers", **machine.record(), "rows": rows})
    text = figures.render("peers", tmp_path)
    assert "| t | 30.0 | 3.00× |" in text and "transformers: it is not installed." in text


def test_what_was_found_before_a_part_was_cut_off_or_fell_is_there(
    gpu: Any,
    figures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"shape": "smollm2", "context": 9, "reach": 1.5, "ratio": 1.0, "bytes_per_second": 1e12}
    row |= {
        "step_ms": 2.0,
        "short_step_ms": 0.8,
        "longer_ms": 1.2,
        "longer_ratio": 1.25,
        "attention_ms": 1.0,
        "cache_read_ms": 1.0,
    }
    closed = list[str]()

    def falls(bench: Any) -> Any:
        try:
            yield row
            yield {**row, "context": 99}
            raise ValueError("something else")
        finally:
            closed.append("falls")

    def run_part(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["gpu.py", "long", *words, *SMALL, "--output", str(tmp_path)])
        assert gpu.main() == 1
        found: dict[str, Any] = json.loads((tmp_path / "gpu_long.json").read_text())
        assert found["unfinished"] and "Cut off before its end" in figures.render("gpu_long", tmp_path)
        return found

    monkeypatch.setitem(gpu.PARTS, "long", falls)
    assert [found["context"] for found in run_part()["rows"]] == [9, 99]
    assert "long failed: something else" in capsys.readouterr().out
    clock = iter([0.0, 1.0, 61.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    assert [found["context"] for found in run_part("--minutes", "1")["rows"]] == [9]
    assert "wrote gpu_long.json, unfinished" in capsys.readouterr().out
    assert closed == ["falls"] * 2, "engines are closed"


def test_a_part_that_is_not_there_is_told(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "speed"])
    with pytest.raises(SystemExit):
        gpu.main()


@pytest.mark.parametrize(
    "words, told",
    [
        (["steps", "head", "--data", "folder"], "head needs --head"),
        (["all"], "exact needs --data"),
        (["vllm"], "vllm needs --peer-python"),
        (
            ["head", "--head", "folder", "--quick", "--output", "folder", "--grown", "31,8"],
            "invalid sizes value: '31,8'",
        ),
    ],
)
def test_what_a_part_cannot_do_without_is_told_before_anything_is_measured(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(SystemExit):
        gpu.main()
    assert told in capsys.readouterr().err
