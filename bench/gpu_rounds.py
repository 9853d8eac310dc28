"""Rounds as they run, captured and replayed: what gpu_settle.py and gpu_looks.py share.

An engine of made-up weights or of a real model is brought to where all its sequences decode, and told that they are as
long as asked.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from gpu import sizes
from gpu_common import SHAPES, Bench, greedy, random_prompts, synchronize

from paceline import LLM
from paceline.engine.replaying import Key, ReplayingRunner
from paceline.kernels.triton import matmul, tiles
from paceline.models.frame import FrameInput, Size

SECONDS, TURNS = 0.06, 4  # of replays that tell a round's time, and how often; the least counts
BEGUN = 8  # tokens of a prompt that is read
ROOM = 256  # tokens that answers may have


class Decoding:
    """An engine in the midst of answers, a round of which can be replayed as often as one likes.

    Sequences are short, and then the device is told that they are longer: of what lies in their pages nobody but a
    round's time wants to know. What they say is nonsense from then on.
    """

    def __init__(self, llm: LLM, count: int, length: int, temperature: float = 0.0) -> None:
        assert isinstance(llm.engine.runner, ReplayingRunner)
        self.llm, self.runner, self.table = llm, llm.engine.runner, llm.engine.table
        params = greedy(ROOM, temperature=temperature, seed=0)
        for one in llm._ask(random_prompts(count, BEGUN, llm.config.vocab_size), params, {}):
            llm._queue(one.samples)
        for _ in range(ROOM // 2):
            llm._take_turn()
            flying = llm.engine._in_flight
            plan = flying[-1].plan if flying else None
            if plan and plan.decodes and plan.num_sampling == count and (plan.num_drafting or not self.nodes):
                break
        else:
            raise SystemExit(f"{count} sequences have not all begun to decode after {ROOM // 2} rounds")
        synchronize()
        self.plan = plan
        self.usual: Key = next(key for key in plan.found.values() if key is not None)
        self.lengthen(length)

    @torch.inference_mode()
    def lengthen(self, length: int) -> None:
        table, slots = self.table, torch.tensor(self.plan.slots, device=self.table.device)
        pages, size = table.pages.tensor, self.llm.engine.cache.pool.block_size
        width = min(-(-(length + ROOM) // size), pages.shape[1])
        assert len(slots) * width <= self.llm.engine.cache.pool.num_pages, "every sequence has pages of its own"
        own = 1 + torch.arange(len(slots) * width, device=table.device).view(len(slots), width)
        pages[slots, :width] = own
        table.lengths[slots], table.limits[slots] = length, table.max_length
        for part in (part for layer in self.llm.engine.cache.layers for part in layer):
            part.normal_()
        self.lengths = table.lengths.clone()

    @property
    def nodes(self) -> int:
        drafter = self.llm.engine.drafter
        return 0 if drafter is None else drafter.max_nodes

    def key(self, count: int) -> Key:
        return self.usual._replace(size=Size(count * (1 + self.nodes), count, 0, self.nodes))

    def compute(self, count: int) -> Callable[[], object]:
        """Such a round of nobody: it can be compiled for."""
        return functools.partial(self.runner.compute, *self.runner._lay_out(self.key(count)))

    @torch.inference_mode()
    def products(self, counts: list[int]) -> list[tiles.Key]:
        """All that rounds of so many sequences are made of, by what their tiles are looked up by."""
        found: dict[tiles.Key, None] = {}
        look_up = matmul.find_tile

        def noting(rows: int, shape: tiles.Shape, dtype: torch.dtype) -> tiles.Tile:
            found[tiles.bucket(rows), shape, dtype] = None
            return look_up(rows, shape, dtype)

        with mock.patch.object(matmul, "find_tile", noting):
            for count in counts:
                self.compute(count)()
        return list(found)

    @torch.inference_mode()
    def prepare(self, counts: list[int], candidates: dict[tiles.Key, list[tiles.Tile]]) -> None:
        """Compile rounds with every candidate."""

        def rounds() -> Iterator[Callable[[], object]]:
            for key, tried in candidates.items():
                for tile in tried:
                    with mock.patch.dict(tiles.measured, {key: tile}):
                        yield from map(self.compute, counts)

        self.llm.engine.target.model.ops.prepare(rounds())

    @torch.inference_mode()
    def spend(self, count: int) -> float:
        """Seconds of a round of the first `count`, captured anew; endless where a tile has no room in it."""
        try:
            made, plan = self.runner._remember(self.key(count)), self.plan
        except triton.runtime.errors.TritonError:
            return math.inf
        given = FrameInput(plan.slots[:count], plan.starts[:count], plan.nodes[:count], [False] * count)
        made.frame.fill(plan.shape[:count], count, given, self.table)
        once = self._replay(made.replay, 1)
        times = max(2, int(SECONDS / once))
        return min(self._replay(made.replay, times) for _ in range(TURNS))

    def _replay(self, replay: Callable[[], None], times: int) -> float:
        """Each from the same lengths: to be told them takes a device little, and is part of the time."""
        synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            self.table.lengths.copy_(self.lengths)
            replay()
        synchronize()
        return (time.perf_counter() - begin) / times


def asking(doc: str | None) -> argparse.ArgumentParser:
    """Of whose rounds."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--small", help="instead of a shape: a model with real weights")
    parser.add_argument("--head", help="an EAGLE head of that model")
    parser.add_argument("--grown", type=sizes, help="the head's trees grow so; a chain of 3 unless given")
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser


def read(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if (options.shape is None) == (options.small is None):
        parser.error("give --shape or --small")
    options.device, options.dtype, options.kernels, options.quick = "cuda", "bfloat16", None, False
    options.grown = [options.grown] if options.grown else []
    return options


def run(options: argparse.Namespace, measure: Callable[[argparse.Namespace], None]) -> int:
    """A script's exit code."""
    if torch.cuda.is_available():
        measure(options)
    else:
        print("no GPU here: nothing was measured")
    return 0


@contextlib.contextmanager
def decoding(options: argparse.Namespace, count: int, length: int, longest: int) -> Iterator[Decoding]:
    """So many sequences of that length, which may become as long as `longest`."""
    room = longest + ROOM
    fixed = {"budget": "fixed", "max_num_seqs": count, "max_model_len": room, "num_pages": count * (room // 16 + 2)}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        drafter = list(bench.heads(3).values())[-1 if options.grown else 0] if options.head else None
        make = (
            functools.partial(bench.dummy, options.shape)
            if options.shape
            else functools.partial(bench.llm, options.small)
        )
        with make(drafter, **fixed) as llm:
            yield Decoding(llm, count, length, options.temperature)
