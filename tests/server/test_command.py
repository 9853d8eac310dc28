"""`paceline serve`: the flags that vLLM's users type, and the program from its start to its end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from paceline.cli import app, serve
from paceline.server import program as server_program
from tests.server.serving import PATIENCE, until

RUNNER = CliRunner()


def chosen(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[dict[str, Any], str]:
    """What the command makes of its flags, and what it says of them; nothing is served."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(serve, "run", found.update)
    result = RUNNER.invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    return found, result.stderr


NGRAM = ["ngram:num_draft_tokens=4,max_match=3,min_match=1"]
FLAGS: list[tuple[str, str, Any]] = [
    ("--host 0.0.0.0", "host", "0.0.0.0"),
    ("--port 9000", "port", 9000),
    ("--model there", "model", "there"),
    ("there", "model", "there"),
    ("there --model there", "model", "there"),
    ("--drafter none there", "model", "there"),
    ("--served-model-name a", "served_model_name", ["a"]),
    ("--dtype float32", "dtype", "float32"),
    ("--seed 3", "seed", 3),
    ("-tp 1", "tensor_parallel_size", 1),
    ("--tensor-parallel-size 1", "tensor_parallel_size", 1),
    ("--device cpu", "device", "cpu"),
    ("--block-size 32", "block_size", 32),
    ("--max-model-len 100", "max_model_len", 100),
    ("--max-num-seqs 4", "max_num_seqs", 4),
    ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
    ("--api-key secret", "api_key", "secret"),
    ("--trust-remote-code", "trust_remote_code", True),
    ("--load-format dummy", "load_format", "dummy"),
    ("--speculative-model small --num-speculative-tokens 4", "drafter", ["draft:model=small,num_draft_tokens=4"]),
    ("--speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 3", "drafter", NGRAM),
    ('--speculative-config {"method":"ngram","prompt_lookup_max":3}', "drafter", ["ngram:max_match=3"]),
    ("--drafter suffix", "drafter", ["suffix"]),
    ("--chat-template file.jinja", "chat_template", "file.jinja"),
    ("--no-enable-prefix-caching", "prefix_caching", False),
    ("--enable-prefix-caching", "prefix_caching", True),
]


@pytest.mark.parametrize("underscores", [False, True], ids=["hyphens", "underscores"])
@pytest.mark.parametrize(("typed", "name", "value"), FLAGS, ids=lambda value: str(value)[:50])
def test_the_flags_that_vllm_has_are_understood_in_both_spellings(
    monkeypatch: pytest.MonkeyPatch, typed: str, name: str, value: Any, underscores: bool
) -> None:
    words = [
        "--" + word[2:].replace("-", "_") if underscores and word.startswith("--") else word for word in typed.split()
    ]
    found, said = chosen(monkeypatch, *words)
    assert found[name] == value and said == ""


def test_two_models_are_one_too_many() -> None:
    result = RUNNER.invoke(app, ["serve", "here", "--model", "there"])
    assert result.exit_code == 2
    assert "'here' and --model there were both given; name one model" in " ".join(result.output.split())


@pytest.mark.parametrize("flag", ["--use-v2-block-manager", "--disable-log-requests"])
def test_a_flag_without_effect_is_taken_and_says_so(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    for written in (flag, "--" + flag[2:].replace("-", "_")):
        _, said = chosen(monkeypatch, written)
        assert said == f"note: {written} has no effect here\n"


def test_the_default_address_is_the_loopbacks_port_8000(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = chosen(monkeypatch)
    assert (found["host"], found["port"]) == ("127.0.0.1", 8000)


# A listener's buffers are those of who it accepts; else they grow to megabytes, and with them what an answer may have
# before anybody waits for its reader.
NARROW = (
    "import socket; listen = socket.socket.listen; socket.socket.listen = lambda self, *given: "
    "(self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096), listen(self, *given))[1]"
)


@contextlib.contextmanager
def program(
    *words: str, module: str = "paceline", grace: float | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The program and what it says, line by line, as it comes. grace: seconds that it gives answers when it ends; its
    system then keeps little of what a client has not read."""
    given = [] if module == "paceline.server" else ["serve"]
    changed = f"{NARROW}; from paceline.server import program; program.GRACE = {grace}; "
    changed += "from paceline.cli import main; main()"
    start = ["-m", module] if grace is None else ["-c", changed]
    command = [sys.executable, *start, *given, "--port", "0", "--device", "cpu", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    lines: list[str] = []

    def gather() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)

    reader = threading.Thread(target=gather, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def address_in(process: subprocess.Popen[str], lines: list[str]) -> str:
    until(lambda: process.poll() is not None or any("serving" in line for line in lines), "an address")
    found = re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))
    assert found, lines
    return found[0]


def test_answers_under_way_may_end_when_the_server_is_told_to_stop(checkpoint: Path) -> None:
    with program("--model", str(checkpoint), module="paceline.server") as (process, lines):
        address = address_in(process, lines)
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
            stream = client.completions.create(
                model="default", prompt="the rider", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            chunks = iter(stream)
            reasons = [next(chunks).choices[0].finish_reason]
            process.send_signal(signal.SIGTERM)
            reasons += [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] == "length"
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    assert not any("Traceback" in line for line in lines)


def test_a_client_that_does_not_read_is_left_when_the_grace_is_over(checkpoint: Path) -> None:
    with program("--model", str(checkpoint), grace=0.5) as (process, lines), socket.socket() as client:
        host, _, port = address_in(process, lines).removeprefix("http://").partition(":")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((host, int(port)))
        asked = {"prompt": "a", "max_tokens": 400, "n": 8, "logprobs": 5, "ignore_eos": True, "stream": True}
        body = json.dumps(asked).encode()
        lines_sent = ("POST /v1/completions HTTP/1.1", "Host: here", "Content-Type: application/json")
        client.sendall("\r\n".join([*lines_sent, f"Content-Length: {len(body)}", "", ""]).encode() + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM)
    assert any("closed after 0.5 seconds" in line for line in lines)
    assert not any("Traceback" in line or "ERROR" in line for line in lines)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_still_loading_ends_at_once(checkpoint: Path, stop: signal.Signals) -> None:
    with program("--model", str(checkpoint)) as (process, lines):
        until(lambda: children(process.pid) or process.poll() is not None, "the engine's process")
        process.send_signal(stop)
        process.wait(PATIENCE)
        assert process.returncode in (130, -stop) and not any("Traceback" in line for line in lines)


def children(pid: int) -> bool:
    return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def sentence_of(*words: str) -> str:
    """What the program says where it cannot begin; it ends by itself."""
    with program(*words) as (process, lines):
        assert process.wait(PATIENCE) == 2
    said = [line for line in lines if line.strip()]
    assert len(said) == 1, said
    return said[0]


def test_an_engine_that_cannot_start_ends_the_command_with_one_sentence(checkpoint: Path) -> None:
    assert "max_model_len" in sentence_of("--model", str(checkpoint), "--max-model-len", "100000").replace("-", "_")


def test_a_port_that_is_taken_is_known_before_the_model_is_loaded(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = RUNNER.invoke(app, ["serve", "--model", str(checkpoint), "--port", port])
    assert result.exit_code == 2 and f"--port {port} cannot be listened at" in result.stderr


def test_other_machines_are_let_in_with_a_warning_where_there_is_no_key(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    monkeypatch.setattr(server_program, "answer", lambda *given: None)
    open_to_all = ["serve", "--model", str(checkpoint), "--port", "0", "--host", "0.0.0.0"]
    assert "without --api-key" in RUNNER.invoke(app, open_to_all).stderr
    assert RUNNER.invoke(app, [*open_to_all, "--api-key", "k"]).stderr == ""
