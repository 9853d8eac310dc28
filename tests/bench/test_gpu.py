"""bench/gpu.py, run small on a CPU: every part writes its file, the pages can show it, and no token differs.

No time is judged.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.bench import machine
from paceline.bench.results import write
from paceline.engine.options import EngineOptions
from paceline.models.loader import find
from paceline.prompts import Prompt
from tests.bench.scripts import ROOT, load
from tests.drafters.tiny_eagle import tiny_eagle
from tests.fakes import tiny_model

SMALL = ["--device", "cpu", "--dtype", "float32", "--kernels", "native", "--quick", "--turns", "1", "--batches", "1"]
SMALL += ["--shapes", "llama-8b", "--large", "none", "--prompts", "6", "--alone", "1"]


@pytest.fixture(scope="module")
def script() -> Any:
    sys.path.insert(0, str(ROOT / "bench"))  # where it finds its neighbours
    yield load("bench/gpu.py")
    sys.path.remove(str(ROOT / "bench"))


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return load("docs/figures.py")


def run(script: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """Every part's file."""
    tiny_model().save_pretrained(folder / "tiny")
    words = (*words, *SMALL, "--small", str(folder / "tiny"), "--output", str(folder / "results"))
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    assert script.main() == 0
    found = {path.stem: path.read_text() for path in (folder / "results").iterdir()}
    assert not any(str(folder) in text for text in found.values()), "a place on this machine was written down"
    return {name.removeprefix("gpu_"): json.loads(text) for name, text in found.items()}


def test_without_a_gpu_it_says_so_in_a_line(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "steps"])
    assert script.main() == 0
    assert capsys.readouterr().out == "no GPU here: nothing was measured\n"


def test_made_up_weights_are_timed_and_shown_beside_what_is_to_be_reached(
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = run(script, monkeypatch, tmp_path, "steps", "verify", "profile", "long", "serving")
    (row,) = found["steps"]["rows"]
    assert isinstance(row["ms"], float) and row["rounds"] == 16, "24 new tokens less 8"
    assert (row["reach_ms"], row["peer_ms"]) == (4.4, 4.88)
    rounds = {row["round"]: row["rounds"] for row in found["verify"]["rows"]}
    assert rounds["8 rows, none accepted"] == 16 and rounds["8 rows, all accepted"] == 2
    profiled = {row["round"]: row["kernels"] for row in found["profile"]["rows"]}
    assert all(kernels == [] for kernels in profiled.values()), "a CPU has none"
    assert profiled.keys() == {"plain", *rounds} - {"8 rows, all accepted"}
    assert [row["who"] for row in found["serving"]["rows"]] == ["paceline"]
    assert found["serving"]["rows"][0]["rounds_with_prompts"] > 0
    text = figures.render("gpu_steps", tmp_path / "results")
    assert "| to be reached | 4.4 |" in text and "| vLLM 0.25.0 on an H200 | 4.88 |" in text
    for part in ("verify", "long", "serving"):
        assert "| --- |" in figures.render(f"gpu_{part}", tmp_path / "results")


def test_what_exactness_costs_is_found_of_two_engines_in_turns(
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = sys.modules["gpu_common"]
    assert common.FASTEST == {"exact_kernels": False} and EngineOptions(**common.FASTEST)
    monkeypatch.setitem(common.FASTEST, "exact_kernels", True)  # no CPU has others
    rows = run(script, monkeypatch, tmp_path, "fast")["fast"]["rows"]
    assert [(row["what"], row["batch"]) for row in rows] == [("first token of 32", 1), ("a step", 1)]
    assert all(row["cost"] == row["exact_ms"] / row["fast_ms"] - 1 and row["exact_ms"] > 0 for row in rows)
    told = {**rows[0], "exact_ms": 1.2, "fast_ms": 1.0, "cost": 0.2, "reach": 0.05}
    write(tmp_path / "dear.json", {"part": "fast", **machine.record(), "rows": [told, {**told, "cost": 0.04}]})
    text = figures.render("dear", tmp_path)
    assert "| 1.20 | 1.00 | **20.0%** | 5% |" in text and "| 1.20 | 1.00 | 4.0% | 5% |" in text


def test_drafters_that_are_right_now_and_then_change_no_text(
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = run(
        script,
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
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data = run(script, monkeypatch, tmp_path, "lookup", "transformers")
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


def test_prompts_are_different_fit_and_come_from_all_over_the_file(script: Any) -> None:
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


def test_a_kernel_adds_what_it_runs_on_after_all_before_it(script: Any) -> None:
    def ran(name: str, start: float, end: float) -> dict[str, Any]:
        return {"name": name, "ts": start, "dur": end - start, "args": {"grid": [2, 3]}}

    events = [ran("b", 1.0, 5.0), ran("a", 0.0, 4.0), ran("c", 6.0, 7.0), ran("within b", 2.0, 4.5)]
    found = [(name.removesuffix(", 6 programs"), added) for name, added in script.added(events)]
    assert [one for one in found if one[1]] == [
        ("a", 4.0),
        ("within b", 0.5),
        ("b", 0.5),
        (script.IDLE, 1.0),
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


VLLM = """
from types import SimpleNamespace as Made
class SamplingParams:
    def __init__(self, max_tokens, **more):
        self.max_tokens = max_tokens
        assert more["ignore_eos"] and not more["detokenize"]
class AsyncEngineArgs:
    def __init__(self, model, **options):
        import json, pathlib
        assert json.loads((pathlib.Path(model) / "config.json").read_text())["model_type"] == "llama"
        assert options["skip_tokenizer_init"] and not options["enable_prefix_caching"]
class LLM(AsyncEngineArgs):
    def __init__(self, **options):
        super().__init__(**options)
        self.llm_engine = Rounds()
        print("a line of its own")
    def generate(self, prompts, params, use_tqdm):
        assert all(0 <= token < 256 for prompt in prompts for token in prompt["prompt_token_ids"])
        return [Made(outputs=[Made(token_ids=[0] * one.max_tokens)]) for one in params]
class Rounds:  # of one sequence: the first brings nothing, each after it two tokens
    def add_request(self, request_id, prompt, params):
        assert isinstance(params, SamplingParams) and prompt["prompt_token_ids"]
        self.counts = [0, *[2] * (params.max_tokens // 2)]
    def has_unfinished_requests(self):
        return bool(self.counts)
    def step(self):
        return [Made(outputs=[Made(token_ids=[0] * self.counts.pop(0))])]
class AsyncLLMEngine:
    seen = set()
    @classmethod
    def from_engine_args(made, args, usage_context):
        assert usage_context == "a server's"
        return made()
    async def generate(self, prompt, params, request_id):
        assert request_id not in self.seen and 0 <= min(prompt["prompt_token_ids"])
        self.seen.add(request_id)
        for count in (1, 0, params.max_tokens - 1):
            yield Made(outputs=[Made(token_ids=[0] * count)])
    def shutdown(self):
        import pathlib
        pathlib.Path(__file__).with_name("shut-down").touch()
"""
KINDS = """
class RequestOutputKind:
    DELTA = 1
"""
USAGE = """
class UsageContext:
    OPENAI_API_SERVER = "a server's"
"""


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """Words for one that answers at once."""
    place = tmp_path / "path" / "vllm"
    (place / "usage").mkdir(parents=True)
    (place / "__init__.py").write_text(VLLM)
    (place / "sampling_params.py").write_text(KINDS)
    (place / "usage" / "__init__.py").write_text("")
    (place / "usage" / "usage_lib.py").write_text(USAGE)
    monkeypatch.setenv("PYTHONPATH", str(place.parent))
    return "--peer-python", sys.executable


def test_vllm_is_asked_the_same_in_a_process_of_its_own(
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules["gpu_common"].FASTEST, "exact_kernels", True)  # no CPU has others
    rows = run(script, monkeypatch, tmp_path, "vllm", *peer, "--head", tiny_eagle("third"))["vllm"]["rows"]
    what = {row["what"]: row for row in rows}
    assert list(what)[:4] == [
        "llama-8b: first token of 32",
        "llama-8b: first token of 32, fast kernels",
        "llama-8b: a step",
        "small: plain, temperature 0",
    ]
    assert "small: EAGLE head, grown trees of 31: 8 children, 3 levels against 3 drafts, temperature 0.8" in what
    assert [row["reach"] for row in rows[:3]] == [1 / 1.2, 1.0, 1.0]
    assert all(row["ours_ms"] != row["peer_ms"] for row in rows)
    assert [row["peer_rounds"] for row in rows if "peer_rounds" in row] == [6] * 8, "a head's, of 12 tokens"
    assert all(1 <= row["ours_rounds"] <= 12 for row in rows if "peer_rounds" in row)
    text = figures.render("gpu_vllm", tmp_path / "results")
    assert re.search(r"\| llama-8b: a step \| 1 \|.*\| – \| – \|", text)
    assert re.search(r"\| small: EAGLE head, 3 drafts, temperature 0 \| 1 \|.*\| \d+\.\d\d \| 2\.00 \|", text)


def test_vllm_is_served_the_same_requests_at_the_same_times(
    script: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: tuple[str, ...]
) -> None:
    rows = run(script, monkeypatch, tmp_path, "serving", *peer)["serving"]["rows"]
    assert [row["who"] for row in rows] == ["paceline", "vLLM"]
    assert [row["requests"] for row in rows] == [6, 6] and "rounds" not in rows[1]
    text = figures.render("gpu_serving", tmp_path / "results")
    assert text.index("| 20 | paceline |") < text.index("| 20 | vLLM |")
    assert (tmp_path / "path" / "vllm" / "shut-down").exists()


@pytest.mark.parametrize(
    ("code", "printed", "told"),
    [
        (0, "talk\nanswer: {}", None),
        (None, "answer: {}\ntalk", None),  # it hung behind its answer
        (None, "talk", "had not ended after 420 seconds:\ntalk"),
        (3, "answer: {}", "ended with code 3:"),
    ],
)
def test_what_the_peer_answered_counts_however_it_ended(
    code: int | None, printed: str, told: str | None, script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def finish(call: list[str], files: list[Path]) -> int | None:
        for file, text in zip(files, (printed, "an error's lines")):
            file.write_text(text)
        return code

    module = sys.modules["gpu_peer"]
    monkeypatch.setattr(module, "_finish", finish)
    bench = SimpleNamespace(options=SimpleNamespace(dtype="bfloat16", peer_python="python"), folder=tmp_path)
    if told is None:
        assert module.ask_vllm(bench, {}, []) == {}
        return
    with pytest.raises(SystemExit, match=told) as refused:
        module.ask_vllm(bench, {}, [])
    assert "an error's lines" in str(refused.value)


CHILD = """
import fcntl, pathlib, sys, time
place = open(sys.argv[1], "w")
fcntl.flock(place, fcntl.LOCK_EX)
pathlib.Path(sys.argv[2]).touch()
time.sleep(100)
place.write("it ended by itself")
"""


def test_a_peer_that_hangs_ends_with_its_children(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, locked, began = sys.modules["gpu_peer"], tmp_path / "locked", tmp_path / "began"

    class Late(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None:  # until the child is there, however long that takes here
                if began.exists():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.01)
            return super().wait()

    monkeypatch.setattr(module.subprocess, "Popen", Late)
    program = "import subprocess, sys; print('so far', flush=True); subprocess.run(sys.argv[1:])"
    call = [sys.executable, "-c", program, sys.executable, "-c", CHILD, str(locked), str(began)]
    assert module._finish(call, [tmp_path / "out", tmp_path / "err"]) is None
    assert (tmp_path / "out").read_text() == "so far\n"
    with locked.open() as place:
        fcntl.flock(place, fcntl.LOCK_EX)  # waits for the child's end
        assert place.read() == ""


def test_requests_come_when_they_are_due_and_their_tokens_are_told(script: Any) -> None:
    arrivals, ask = sys.modules["gpu_arrivals"].arrivals, sys.modules["gpu_arrivals"].ask

    due = arrivals(400, 50.0)
    assert due == sorted(due) and due == arrivals(400, 50.0) != arrivals(400, 50.0, 1)
    assert 6 < due[-1] < 10, "400 of 50 a second"
    sent = list[int]()

    async def stream(prompt: list[int]) -> Any:
        sent.append(prompt[0])
        for count in (0, 2, 0, 3):  # one that brings nothing is no update
            yield count

    found = asyncio.run(ask(stream, [[2], [1]], [0.02, 0.0]))
    assert sent == [1, 2] and found["tokens"] == 10
    assert found["seconds"] >= 0.02 and (len(found["first"]), len(found["between"])) == (2, 2)


def test_an_exported_model_is_the_same_in_bfloat16(script: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    sys.modules["gpu_peer"].export(str(tmp_path / "tiny"), tmp_path / "exported")
    given, made = (find(str(tmp_path / name)) for name in ("tiny", "exported"))
    assert set(made.source.names()) == set(given.source.names())
    assert replace(made.config, torch_dtype=None) == replace(given.config, torch_dtype=None)
    for name in given.source.names():
        one, other = given.source.read(name), made.source.read(name)
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        assert torch.equal(one.to(torch.bfloat16), other)


def test_what_was_found_before_a_part_was_cut_off_or_fell_is_there(
    script: Any,
    figures: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"shape": "smollm2", "context": 9, "reach": 1.5, "ratio": 1.0, "bytes_per_second": 1e12}
    row |= {"step_ms": 1.0, "attention_ms": 1.0, "cache_read_ms": 1.0}
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
        assert script.main() == 1
        found: dict[str, Any] = json.loads((tmp_path / "gpu_long.json").read_text())
        assert found["unfinished"] and "Cut off before its end" in figures.render("gpu_long", tmp_path)
        return found

    monkeypatch.setitem(script.PARTS, "long", falls)
    assert [found["context"] for found in run_part()["rows"]] == [9, 99]
    assert "long failed: something else" in capsys.readouterr().out
    clock = iter([0.0, 1.0, 61.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    assert [found["context"] for found in run_part("--minutes", "1")["rows"]] == [9]
    assert "wrote gpu_long.json, unfinished" in capsys.readouterr().out
    assert closed == ["falls"] * 2, "engines are closed"


def test_a_part_that_is_not_there_is_told(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "speed"])
    with pytest.raises(SystemExit):
        script.main()


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
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    with pytest.raises(SystemExit):
        script.main()
    assert told in capsys.readouterr().err
