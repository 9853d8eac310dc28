"""Tiles of products chosen anew by what rounds take with them: of a shape with made-up weights, or of a model and head.

    python bench/gpu_settle.py --shape llama-8b [--batches 1,4,16 64 256] [--tiles FILE]
    python bench/gpu_settle.py --small MODEL --head FOLDER [--grown 31,8,2] --temperature 0.8

Sequences are read in, and then rounds of decoding are captured and replayed, each time from the same lengths: products
stand between what they stand between in a real one, and rows see as much as there. First every tile worth it is timed
alone; then one product after another takes whichever of the fastest makes rounds of all batches of a group (those with
commas between them) shortest, twice around; and then so many lines of its weights asked for ahead. The table is written
after each group.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from gpu import sizes
from gpu_common import SHAPES, Bench, greedy, random_prompts, synchronize

from paceline import LLM
from paceline.engine.replaying import Key, ReplayingRunner
from paceline.kernels.triton import ops, tiles, tuning
from paceline.models.frame import FrameInput, Size

SECONDS, TURNS = 0.06, 4  # of replays that tell a round's time, and how often; the least counts
ROOM = 64  # tokens that answers may grow by while rounds are replayed


class Decoding:
    """An engine in the midst of answers, a round of which can be replayed as often as one likes."""

    def __init__(self, llm: LLM, prompts: list[list[int]], temperature: float = 0.0) -> None:
        assert isinstance(llm.engine.runner, ReplayingRunner)
        self.llm, self.runner, self.table = llm, llm.engine.runner, llm.engine.table
        params = greedy(ROOM, temperature=temperature, seed=0)
        for one in llm._ask(prompts, params, {}):
            llm._queue(one.samples)
        for _ in range(100 * len(prompts)):
            llm._take_turn()
            plan = llm.engine._in_flight[-1].plan
            if plan.decodes and plan.num_sampling == len(prompts) and (plan.num_drafting or not self.nodes):
                break
        else:
            raise SystemExit("not all sequences have begun to decode: give a shorter prompt")
        synchronize()
        self.plan, self.lengths = plan, self.table.lengths.clone()
        self.usual: Key = next(key for key in plan.found.values() if key is not None)

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
    def products(self, counts: list[int]) -> list[tuning.Key]:
        """All that rounds of so many sequences are made of, by what their tiles are looked up by."""
        found: dict[tuning.Key, None] = {}
        look_up = tiles._measured

        def noting(rows: int, shape: tiles.Shape, dtype: torch.dtype) -> tiles.Tile | None:
            found[rows, shape, dtype] = None
            return look_up(rows, shape, dtype)

        with mock.patch.object(tiles, "_measured", noting):
            for count in counts:
                self.compute(count)()
        return list(found)

    @torch.inference_mode()
    def prepare(self, counts: list[int], candidates: dict[tuning.Key, list[tiles.Tile]]) -> None:
        """Compile rounds with every candidate."""

        def rounds() -> Iterator[Callable[[], object]]:
            for key, tried in candidates.items():
                for tile in tried:
                    with mock.patch.dict(tiles.measured, {key: tile}):
                        yield from map(self.compute, counts)

        self.llm.engine.target.model.ops.prepare(rounds())

    @torch.inference_mode()
    def spend(self, count: int) -> float:
        """Seconds of a round of the first `count`, captured anew."""
        made, plan = self.runner._remember(self.key(count)), self.plan
        given = FrameInput(plan.slots[:count], plan.starts[:count], plan.nodes[:count], [False] * count)
        made.frame.fill(plan.shape[:count], count, given, self.table)
        once = self._replay(made.replay, 1)
        times = max(2, int(SECONDS / once))
        return min(self._replay(made.replay, times) for _ in range(TURNS))

    def _replay(self, replay: Callable[[], None], times: int) -> float:
        self.table.lengths.copy_(self.lengths)
        synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            replay()
        synchronize()
        return (time.perf_counter() - begin) / times


def settle(decoding: Decoding, counts: list[int], device: torch.device) -> tuple[list[float], list[float]]:
    """Choose tiles for all products of rounds of so many sequences; seconds of each before and after."""
    keys = decoding.products(counts)
    had = {key: tiles.find_tile(*key) for key in keys}
    for rows, shape, dtype in keys:
        tuning.tune([shape], [rows], device, dtype)
    tiles.measured.update(had)
    before = [decoding.spend(count) for count in counts]
    for find in (tuning.candidates_for, tuning.ahead_for):
        candidates = find(keys)
        decoding.prepare(counts, candidates)
        tuning.settle(candidates, lambda: sum(decoding.spend(count) / old for count, old in zip(counts, before)))
    for key in keys:
        changed = "" if tiles.measured[key] == had[key] else f", not {had[key]}"
        print(f"  {key[0]} rows, {tuple(key[1])}: {tiles.measured[key]}{changed}", flush=True)
    return before, [decoding.spend(count) for count in counts]


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--small", help="instead of a shape: a model with real weights")
    parser.add_argument("--head", help="an EAGLE head of that model")
    parser.add_argument("--grown", type=sizes, help="the head's trees grow so; a chain of 3 unless given")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of a prompt")
    batch = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--batches", type=batch, nargs="+", default=[[1, 4, 16], [64], [256]])
    parser.add_argument("--tiles", type=Path, default=ops.MEASURED / "h200.json")
    options = parser.parse_args()
    if (options.shape is None) == (options.small is None):
        parser.error("give --shape or --small")
    options.device, options.dtype, options.kernels, options.quick = "cuda", "bfloat16", None, False
    options.grown = [options.grown] if options.grown else []
    return options


def main() -> int:
    options = read_options()
    if not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return 0
    device, most = torch.device("cuda"), max(count for group in options.batches for count in group)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        fixed = {"max_num_seqs": most, "budget": "fixed", "num_pages": most * ((options.prompt + 2 * ROOM) // 16 + 1)}
        length = options.prompt + 4 * ROOM
        drafter = list(bench.heads(3).values())[-1 if options.grown else 0] if options.head else None
        if options.shape:
            llm = bench.dummy(options.shape, drafter, max_model_len=length, **fixed)
        else:
            llm = bench.llm(options.small, drafter, max_model_len=length, **fixed)
        tuning.load(options.tiles, device)
        with llm:
            prompts = random_prompts(most, options.prompt, llm.config.vocab_size)
            decoding = Decoding(llm, prompts, options.temperature)
            for group in options.batches:
                before, after = settle(decoding, group, device)
                tuning.save(options.tiles, device)
                told = zip(group, before, after)
                said = ", ".join(f"{count}: {1e3 * old:.3f} → {1e3 * new:.3f} ms" for count, old, new in told)
                print(f"after {time.perf_counter() - begin:.0f} s: rounds of {said}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
