"""The server in full: fuzzed, under load, and against the engine alone.

    python -m tests.server.soak                      10,000 fuzzed requests, five minutes of 64 streams, throughput
    python -m tests.server.soak --minutes 1 --requests 1000 --model FOLDER

The clients are plain sockets: what a client library spends would be taken from the server's share of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from paceline.bench import results
from tests.server.fuzzing import fuzzed, is_right

WORDS = (
    "the rider in front",
    "breaks the wind",
    "and the riders behind",
    "rest in the draft",
    "then",
    "the next",
    "turn",
)
BAD: tuple[dict[str, Any], ...] = ({"temperature": -1}, {"n": 0}, {"nobody": 1}, {"prompt": ""}, {"max_tokens": 0})
PATIENCE = 300.0
POOL = ("--max-model-len", "1024", "--num-pages", "1024")  # soon touched whole: what grows later is a leak


@dataclass
class Program:
    process: subprocess.Popen[str]
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def figures(self) -> dict[str, float]:
        lines = httpx.get(f"{self.address}/metrics", timeout=PATIENCE).text.splitlines()
        named = [line.rpartition(" ") for line in lines if not line.startswith("#") and "{" not in line]
        return {name: float(value) for name, _, value in named}

    def memory(self) -> dict[str, int]:
        """Resident KiB of the server and of its engine."""
        return {name: _resident(pid) for name, pid in self._pids().items()}

    def seconds(self) -> dict[str, float]:
        """Of processor time: on a machine that others use too, this is steadier than what a clock says."""
        return {name: _spent(pid) for name, pid in self._pids().items()}

    def _pids(self) -> dict[str, int]:
        pids = {"server": self.process.pid}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
                pids["engine"] = int(child)
        return pids


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def _spent(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def program(model: str, *flags: str) -> Iterator[Program]:
    command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", "0", "--device", "cpu", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = ""
        while "serving" not in said:
            line = process.stderr.readline()
            assert line, f"the server ended: {said}"
            said += line
        yield Program(process, int(said.rpartition("http://127.0.0.1:")[2].split("/")[0]))
    finally:
        process.terminate()
        process.wait(PATIENCE)
        process.stderr.close()


@dataclass
class Reply:
    """An answer as it comes: its status, then its body's lines."""

    status: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def lines(self) -> AsyncIterator[bytes]:
        while line := await asyncio.wait_for(self.reader.readline(), PATIENCE):
            yield line

    async def whole(self) -> bytes:
        return b"".join([line async for line in self.lines()])


@contextlib.asynccontextmanager
async def send(port: int, method: str, path: str, body: bytes, kind: str = "application/json") -> AsyncIterator[Reply]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        head = f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: {kind}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        first = await asyncio.wait_for(reader.readline(), PATIENCE)
        while (await asyncio.wait_for(reader.readline(), PATIENCE)).strip():
            pass
        yield Reply(int(first.split()[1]), reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# Fuzz


async def fuzz(port: int, count: int, at_once: int = 16) -> Counter[int]:
    left, statuses = iter(range(count)), Counter[int]()

    async def one() -> None:
        for number in left:
            asked = fuzzed(number)
            async with send(port, asked.method, asked.path, asked.body, asked.type) as reply:
                told = await reply.whole()
                assert is_right(reply.status), (number, asked, reply.status, told[:300])
                statuses[reply.status] += 1

    await asyncio.gather(*(one() for _ in range(at_once)))
    return statuses


# Load


@dataclass
class Load:
    good: int = 0
    cancelled: int = 0
    bad: int = 0
    later: int = 0  # told to come again
    tokens: int = 0
    failed: list[str] = field(default_factory=list)


async def load(port: int, seconds: float, streams: int, longest: int) -> Load:
    told, end = Load(), time.monotonic() + seconds

    async def client(number: int) -> None:
        luck = random.Random(number)
        while time.monotonic() < end:
            body: dict[str, Any] = {
                "prompt": " ".join(luck.choices(WORDS, k=luck.randint(1, 60))),
                "max_tokens": luck.randint(1, longest),
                "temperature": luck.choice((0.0, 0.8)),
                "ignore_eos": luck.random() < 0.5,
                "stream": luck.random() < 0.85,
            }
            wrong = luck.random() < 0.1
            leave = luck.randint(1, 20) if body["stream"] and luck.random() < 0.2 else None
            await ask(port, {**body, **luck.choice(BAD)} if wrong else body, wrong, leave, told)

    await asyncio.gather(*map(client, range(streams)))
    return told


async def ask(port: int, body: dict[str, Any], wrong: bool, leave: int | None, told: Load) -> None:
    async with send(port, "POST", "/v1/completions", json.dumps(body).encode()) as reply:
        if wrong:
            told.bad += 1
            if reply.status != 400:
                told.failed.append(f"a bad request was answered with {reply.status}")
            return
        if reply.status in (429, 503):
            told.later += 1
            await asyncio.sleep(0.2)
            return
        got, events = b"", 0
        async for line in reply.lines():
            got += line
            events += line.startswith(b"data: {")
            if leave is not None and events >= leave:
                told.cancelled += 1
                return
        ended = b'"finish_reason":"length"' in got or b'"finish_reason":"stop"' in got
        if reply.status != 200 or not ended or (body["stream"] and b"data: [DONE]" not in got):
            told.failed.append(f"{reply.status}: {got[-300:]!r}")
            return
        told.good += 1
        told.tokens += events if body["stream"] else 0


# Throughput


def work(count: int, tokens: int) -> list[dict[str, Any]]:
    luck = random.Random(1)
    shared = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return [{"prompt": " ".join(luck.choices(WORDS, k=40)), **shared} for _ in range(count)]


OFFLINE = """
import json, sys, time
from paceline import LLM, SamplingParams
model, drafter, asked = sys.argv[1], sys.argv[2] or None, json.loads(sys.stdin.readline())
llm = LLM(model, drafter, device="cpu", prefix_caching=False)
prompts = [one["prompt"] for one in asked]
params = [SamplingParams(**{key: value for key, value in one.items() if key != "prompt"}) for one in asked]
print("ready", flush=True)
for line in sys.stdin:
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params)
    print(sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begun), flush=True)
"""


async def serve_all(port: int, asked: list[dict[str, Any]], stream: bool) -> float:
    async def one(body: dict[str, Any]) -> int:
        sent = json.dumps({**body, "stream": stream}).encode()
        async with send(port, "POST", "/v1/completions", sent) as reply:
            await reply.whole()
            assert reply.status == 200
        return int(body["max_tokens"])

    begun = time.perf_counter()
    return sum(await asyncio.gather(*map(one, asked))) / (time.perf_counter() - begun)


def compare(port: int, model: str, drafter: str, asked: list[dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """Tokens a second by turns: the engine alone, the server whole, the server streaming."""
    command = [sys.executable, "-c", OFFLINE, model, drafter]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone:
        assert alone.stdin is not None and alone.stdout is not None
        alone.stdin.write(json.dumps(asked) + "\n")
        alone.stdin.flush()
        assert alone.stdout.readline() == "ready\n"
        rates: dict[str, list[float]] = {"offline": [], "whole": [], "streamed": []}
        for _ in range(rounds):
            alone.stdin.write("again\n")
            alone.stdin.flush()
            rates["offline"].append(float(alone.stdout.readline()))
            for name in ("whole", "streamed"):
                rates[name].append(asyncio.run(serve_all(port, asked, name == "streamed")))
        alone.stdin.close()
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--longest", type=int, default=120, help="the most tokens of an answer under load")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison with the engine alone")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer there")
    parser.add_argument("--output", type=Path, help="write all figures to this file, as JSON")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    if given.requests:
        figures["fuzz"] = run_fuzz(given.requests)
    flags = ["--max-num-seqs", "64", *(["--drafter", given.drafter] if given.drafter else [])]
    if given.minutes:
        with program(given.model, *flags, *POOL) as served:
            figures["load"] = run_load(served, given)
    if given.rounds:
        with program(given.model, *flags, "--no-prefix-caching") as served:
            figures["throughput"] = run_throughput(served, given)
    if given.output is not None:
        command = shlex.join(["python", "-m", "tests.server.soak", *sys.argv[1:]])
        results.write(given.output, {**results.head("soak", command, vars(given), False), **figures})


def run_fuzz(requests: int) -> dict[str, Any]:
    from tests.cli.checkpoints import write_checkpoint

    with TemporaryDirectory() as folder, program(str(write_checkpoint(Path(folder) / "tiny"))) as tiny:
        begun = time.monotonic()
        statuses = dict(sorted(asyncio.run(fuzz(tiny.port, requests)).items()))
        check_idle(tiny)
        seconds = time.monotonic() - begun
    print(f"fuzz: {requests} requests in {seconds:.0f} s, {statuses}")
    return {"requests": requests, "seconds": seconds, "statuses": statuses}


def run_load(served: Program, given: argparse.Namespace) -> dict[str, Any]:
    seconds = given.minutes * 60
    warm = asyncio.run(load(served.port, seconds * 2 / 5, given.streams, given.longest))
    before = served.memory()
    told = asyncio.run(load(served.port, seconds * 3 / 5, given.streams, given.longest))
    after = served.memory()
    check_idle(served)
    counts = {name: getattr(warm, name) + getattr(told, name) for name in ("good", "cancelled", "bad", "later")}
    grown = {name: f"{before[name] // 1024} → {after[name] // 1024} MiB" for name in after}
    print(f"load: {given.streams} clients, {seconds:.0f} s: {counts}; memory {grown}")
    failed = warm.failed + told.failed
    assert not failed, f"{len(failed)} failed: {failed[:3]}"
    for name in after:
        assert after[name] < before[name] * 1.1 + 20 * 1024, f"the {name}'s memory grew: {grown}"
    return {"clients": given.streams, "seconds": seconds, **counts, "failed": 0, "kib_before": before, "kib": after}


def run_throughput(served: Program, given: argparse.Namespace) -> dict[str, Any]:
    before = served.seconds()
    rates = compare(served.port, given.model, given.drafter, work(64, given.tokens), given.rounds)
    spent = {name: round(value - before[name], 1) for name, value in served.seconds().items()}
    print("throughput, tokens/s:", {name: [round(rate, 1) for rate in listed] for name, listed in rates.items()})
    best, medians = shares(rates, max), shares(rates, statistics.median)
    print("of the engine alone, best of each:", best, "medians:", medians, "processor seconds:", spent)
    return {"tokens_per_second": rates, "of_best": best, "of_medians": medians, "processor_seconds": spent}


def shares(rates: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, float]:
    """What the server did of what the engine alone does."""
    return {name: round(of(rates[name]) / of(rates["offline"]), 3) for name in ("whole", "streamed")}


def check_idle(served: Program) -> None:
    """No page, slot or answer is left behind."""
    end = time.monotonic() + 30
    names = (
        "paceline_pages_used",
        "paceline_requests_running",
        "paceline_requests_waiting",
        "paceline_answers_under_way",
    )
    while any(served.figures().get(name, 0) for name in names):
        assert time.monotonic() < end, {name: served.figures().get(name) for name in names}
        time.sleep(0.1)
    health = httpx.get(f"{served.address}/health", timeout=PATIENCE).json()
    assert health == {"status": "ok", "restarts": 0}, health


if __name__ == "__main__":
    main()
