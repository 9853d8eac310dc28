"""What the comparisons with other programs share: a process for each side, the sizes of what is asked, turns, rows.

Every side is a process of its own that is kept open and asked in JSON lines, so that runs alternate (A B A B) on one
machine state. Must not know what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROSE = HERE / "data" / "prose.txt"
clock = time.perf_counter
Answer = dict[str, Any]  # first: seconds to the first token; rest: seconds after it; tokens


class PeerError(Exception):
    """A side that is missing or that failed; the sentence says which and why."""


class Peer:
    """A side's process."""

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [python, str(HERE / "cpu_sides.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.versions = self._read()
        except PeerError:
            self.close()
            raise

    def __call__(self, do: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **given}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"{self.kind}'s process has ended") from None
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told = json.loads(line) if line else {"error": f"its process ended with code {self._process.wait()}"}
        if "missing" in told:
            raise PeerError("not installed")
        if "error" in told:
            raise PeerError(f"{self.kind}: {told['error']}")
        return told["result"]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


@dataclass(frozen=True)
class Sizes:
    """Tokens and prompts of the figures."""

    prompt: int = 64
    new: int = 64
    new_large: int = 32
    prefill: int = 512
    context: int = 256
    far: int = 768  # where the speculative figures' prompts lie
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    total: int = 2048
    answer: int = 128
    length: int = 4096
    num_prompts: int = 5  # a category
    num_prompts_large: int = 3
    num_prompts_slow: int = 2  # of these, for transformers


QUICK = Sizes(8, 6, 4, 16, 16, 24, (1, 2, 4), 64, 8, 128, 1, 1, 1)


@dataclass
class Row:
    """One line of the table. `ratio` is always ours over the other's."""

    figure: str
    unit: str
    ours: float | None
    against: str
    peer: float | None = None
    note: str = ""
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = self.ours / self.peer if self.ours is not None and self.peer else None


@dataclass
class Bench:
    """What the figures share: options, and the processes they ask."""

    options: argparse.Namespace
    sizes: Sizes
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what each side said when it loaded
    peers: dict[str, Peer] = field(default_factory=dict)  # kept open from figure to figure

    def python(self, kind: str) -> str:
        return self.options.peer_python if kind == "llama.cpp" and self.options.peer_python else sys.executable

    def start(self, kind: str) -> Peer:
        peer = Peer(kind, self.python(kind))
        self.versions |= peer.versions
        return peer

    @contextlib.contextmanager
    def fresh(self, kind: str) -> Iterator[Peer]:
        """A process for one measurement."""
        peer = self.start(kind)
        try:
            yield peer
        finally:
            peer.close()

    def load(self, model: str, length: int, *kinds: str) -> dict[str, Peer | str]:
        """The sides asked for, loaded, or why not; ours first, because it knows where the file is."""
        path, sides = model, {}
        for kind in ("paceline", *kinds):
            extra = self.options.llama_options if kind == "llama.cpp" else {}
            try:
                if kind in self.peers and self.peers[kind].ended:
                    self.peers.pop(kind).close()
                if kind not in self.peers:
                    self.peers[kind] = self.start(kind)
                about = self.peers[kind]("load", model=path, length=length, threads=self.options.threads, **extra)
            except PeerError as error:
                if kind == "paceline":
                    raise
                sides[kind] = str(error)
                continue
            self.settings[f"{kind} {model}"] = about
            sides[kind], path = self.peers[kind], about.get("path", path)
        return sides

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def prose(self, ours: Peer, count: int) -> list[int]:
        """`count` tokens of the fixed text, from its start again where it is too short."""
        ids = ours("tokenize", text=PROSE.read_text())
        return (ids * -(-count // len(ids)))[:count]

    def end_ids(self, model: str) -> list[int]:
        return self.settings[f"paceline {model}"]["end_ids"]


def in_turn(repeat: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """A B A B …, after one run of each that is not counted."""
    taken: dict[str, list[Any]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            result = run()
            if turn:
                taken[name].append(result)
    return taken


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def present(sides: dict[str, Peer | str]) -> dict[str, Peer]:
    return {kind: side for kind, side in sides.items() if isinstance(side, Peer)}
