"""bench/gpu.py beside vLLM: a module in its place answers at once, in the process that vLLM would have.

No time is judged.
"""

from __future__ import annotations

import asyncio
import fcntl
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

from paceline.models.loader import find
from tests.bench.gpu_script import run
from tests.drafters.tiny_eagle import tiny_eagle
from tests.fakes import tiny_model

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
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules["gpu_common"].FASTEST, "exact_kernels", True)  # no CPU has others
    rows = run(gpu, monkeypatch, tmp_path, "vllm", *peer, "--head", tiny_eagle("third"))["vllm"]["rows"]
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
    gpu: Any, figures: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer: tuple[str, ...]
) -> None:
    rows = run(gpu, monkeypatch, tmp_path, "serving", *peer)["serving"]["rows"]
    assert [row["who"] for row in rows] == ["paceline", "vLLM"]
    assert [row["requests"] for row in rows] == [6, 6] and "rounds" not in rows[1]
    text = figures.render("gpu_serving", tmp_path / "results")
    assert text.index("| 80 | 6 | paceline |") < text.index("| 80 | 6 | vLLM |")
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
def test_what_the_peer_answered_counts_unless_it_failed(
    code: int | None, printed: str, told: str | None, gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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


def test_a_peer_that_hangs_ends_with_its_children(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_requests_come_when_they_are_due_and_their_tokens_are_told(gpu: Any) -> None:
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


def test_an_exported_model_is_the_same_in_bfloat16(gpu: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    sys.modules["gpu_peer"].export(str(tmp_path / "tiny"), tmp_path / "exported")
    given, made = (find(str(tmp_path / name)) for name in ("tiny", "exported"))
    assert set(made.source.names()) == set(given.source.names())
    assert replace(made.config, torch_dtype=None) == replace(given.config, torch_dtype=None)
    for name in given.source.names():
        one, other = given.source.read(name), made.source.read(name)
        assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        assert torch.equal(one.to(torch.bfloat16), other)
