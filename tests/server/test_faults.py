"""An engine that falls, clients that leave, stop reading or never finish asking: nobody else is harmed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.server import engine, guards
from tests.server.faulty import POISON, build_fragile, build_once, build_slow
from tests.server.serving import NAME, PATIENCE, Served, serving, until

LONG: dict[str, Any] = {
    "model": NAME,
    "prompt": "the rider",
    "max_tokens": 480,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
SHORT: dict[str, Any] = {"model": NAME, "prompt": "the rider", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def fragile(checkpoint: Path) -> Iterator[Served]:
    with serving(checkpoint, make=build_fragile, max_num_seqs=4) as server:
        yield server


@pytest.fixture(scope="module")
def slow(checkpoint: Path) -> Iterator[Served]:
    with serving(checkpoint, settings={"body_seconds": 0.5}, make=build_slow, max_num_seqs=2) as server:
        yield server


def healthy(server: Served) -> bool:
    return server.get("/health").status_code == 200


def pages_used(server: Served) -> float:
    return server.metric("paceline_pages_used")


def break_down(server: Served, how: str) -> None:
    if how == "killed":
        os.kill(server.server.engine._process.pid, signal.SIGKILL)
    else:
        with contextlib.suppress(openai.APIError), server.openai() as client:
            client.completions.create(model=NAME, prompt=[POISON], max_tokens=2)


@pytest.mark.parametrize("how", ["killed", "an exception in a step"])
def test_an_engine_that_falls_is_told_to_everyone_and_started_again(
    fragile: Served, how: str, record_property: Callable[[str, object], None]
) -> None:
    until(lambda: healthy(fragile), "health")
    with fragile.openai() as client:
        expected = client.completions.create(**SHORT).choices[0].text
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        waiting: list[Any] = []

        def ask() -> None:
            try:
                client.completions.create(**LONG)
            except openai.APIError as error:
                waiting.append(error)

        other = threading.Thread(target=ask)
        other.start()
        until(lambda: fragile.server.engine.num_samples == 2, "two under way")
        restarts = fragile.server.engine.num_restarts
        break_down(fragile, how)
        fell = time.monotonic()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        other.join(PATIENCE)
        spent = time.monotonic() - fell
        assert "the engine failed" in str(caught.value) and "started again" in str(caught.value)
        assert waiting and waiting[0].status_code == 500 and waiting[0].type == "engine_error"
        assert ("planted fault" in str(caught.value)) == (how != "killed")
        record_property("shown", f"an engine {how}: both requests under way heard of it within {spent:.2f} s")
        if not healthy(fragile):  # it may be there again already, on a fast machine
            with pytest.raises(openai.InternalServerError) as refused:
                client.completions.create(**SHORT)
            assert refused.value.status_code in (500, 503)
        until(lambda: healthy(fragile), "a new engine")
        assert fragile.server.engine.num_restarts == restarts + 1
        assert fragile.get("/health").json()["restarts"] == restarts + 1
        assert client.completions.create(**SHORT).choices[0].text == expected
        assert fragile.metric("paceline_engine_restarts_total") == restarts + 1


def test_health_is_red_while_there_is_no_engine(fragile: Served) -> None:
    until(lambda: healthy(fragile), "health")
    process = fragile.server.engine
    ready, process.ready = process.ready, None
    try:
        answer = fragile.get("/health")
        assert answer.status_code == 503 and "starting" in answer.json()["error"]["message"]
        with fragile.openai() as client, pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**SHORT)
        assert refused.value.status_code == 503 and refused.value.code == "engine_unavailable"
        assert refused.value.response.headers["retry-after"] == "1"
        assert fragile.metric("paceline_up") == 0
    finally:
        process.ready = ready
    assert fragile.metric("paceline_up") == 1


def test_an_engine_that_cannot_be_started_again_says_so_for_good(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOST_FALLS", 1)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "once"))
    with serving(folder, make=build_once) as server:
        os.kill(server.server.engine._process.pid, signal.SIGKILL)
        until(lambda: server.server.engine.failed, "the end of trying")
        answer = server.get("/health")
        assert answer.status_code == 503 and "no second time" in answer.json()["error"]["message"]
        assert server.get("/version").status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_cuts_the_connection_is_aborted_at_once(slow: Served, stream: bool) -> None:
    until(lambda: pages_used(slow) == 0, "an idle engine")
    aborted = slow.metric("paceline_requests_total", 'reason="abort"')
    with slow.connect() as connection:
        ask(connection, {"prompt": "the rider", "max_tokens": 500, "ignore_eos": True, "stream": stream})
        until(lambda: pages_used(slow) > 0, "pages in use")
    until(lambda: slow.metric("paceline_requests_total", 'reason="abort"') == aborted + 1, "an abort")
    until(lambda: pages_used(slow) == 0 and slow.metric("paceline_requests_running") == 0, "its pages come back")
    assert slow.server.engine.num_samples == 0


def test_a_client_that_leaves_while_it_waits_takes_no_turn(slow: Served) -> None:
    with slow.openai() as client:
        streams = [client.completions.create(**LONG, stream=True) for _ in range(2)]
        with slow.connect() as connection:
            ask(connection, {"prompt": "the rider", "max_tokens": 5})
            until(lambda: slow.metric("paceline_requests_waiting") == 1, "one that waits")
        until(lambda: slow.metric("paceline_requests_waiting") == 0, "nobody waits")
        for stream in streams:
            stream.close()
    until(lambda: pages_used(slow) == 0, "all pages back")


def test_a_client_that_stops_reading_harms_nobody(slow: Served) -> None:
    """Its answer is larger than what the kernel keeps for it."""
    with slow.connect() as connection, slow.openai() as client:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = {"prompt": ["the rider"] * 2, "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 200}
        ask(connection, body)
        until(lambda: slow.server.engine.num_samples == 2, "two under way")
        expected = client.completions.create(**SHORT).choices[0].text
        assert len(expected) > 0
        until(lambda: slow.server.engine.num_samples == 0, "they were computed whether read or not")
        assert client.completions.create(**SHORT).choices[0].text == expected
    until(lambda: pages_used(slow) == 0, "all pages back")


def test_requests_that_do_not_fit_the_cache_together_all_end_well(checkpoint: Path) -> None:
    """The cache holds one of them at its longest: the others give their pages back and are computed again."""
    with serving(checkpoint, max_num_seqs=4, num_pages=36, prefix_caching=False) as server, server.openai() as client:
        expected = client.completions.create(**LONG).choices[0].text
        texts: list[str] = []
        threads = [
            threading.Thread(target=lambda: texts.append(client.completions.create(**LONG).choices[0].text))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert texts == [expected] * 4
        assert server.metric("paceline_preemptions_total") > 0
        until(lambda: pages_used(server) == 0, "all pages back")


def test_a_body_that_never_comes_is_a_timeout(slow: Served) -> None:
    with slow.connect() as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"
        )
        connection.sendall(head + b'{"prompt": ')
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.5 seconds" in answer


def test_headers_that_never_end_close_the_connection(slow: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "HEADER_SECONDS", 0.3)
    with slow.connect() as silent:
        assert read_all(silent) == b""
    with slow.connect() as first:
        first.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ")
        assert read_all(first) == b""
    with slow.connect() as second:  # a good request before it changes nothing
        second.sendall(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        got = b""
        while b"version" not in got:
            got += second.recv(4096)
        second.sendall(b"GET /health HTTP/1.1\r\nx-slow: ")
        assert read_all(second) == b""


def test_what_is_no_http_is_refused(slow: Served) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000):
        with slow.connect() as connection:
            connection.sendall(sent + b"\r\n\r\n")
            assert read_all(connection).startswith((b"HTTP/1.1 400", b""))
    assert healthy(slow)


def ask(connection: socket.socket, body: dict[str, Any]) -> None:
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + sent)


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
