"""What experts cost on the native kernels beside a dense feed-forward of the same active size, in turn.

    python bench/cpu_experts.py [--threads N] [--turns 9] [--kind Q4_K]

The shape is Qwen3-30B-A3B's: 128 experts of 768, 8 chosen, hidden size 2048; the dense side is 8 · 768 wide. Sixteen
dense layers hold as many bytes as one layer of experts, and rows choose at random, so both sides stream weights that no
cache holds. "ideal" is what the chosen experts' bytes alone would let expect: experts that several rows share are read
once. Prints medians of milliseconds a layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from paceline.kernels.blocks import BLOCKS, Blocks
from paceline.kernels.cpu.native import NativeOps
from paceline.kernels.ops import Experts, Forward, Inputs, Routing

HIDDEN, WIDE, EXPERTS, CHOSEN, LAYERS = 2048, 768, 128, 8, 16
ROWS = (1, 2, 6, 32, 256)
CPU = torch.device("cpu")


def blocks(kind: str, rows: int, columns: int) -> Blocks:
    """Bytes of no meaning; small scales, so that nothing overflows."""
    elements, size = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(0, 64, (rows * columns // elements, size), dtype=np.uint8)
    raw[:, 0:4] = np.frombuffer(np.array([1e-4, 1e-4], np.float16).tobytes(), np.uint8)
    return Blocks(kind, (rows, columns), raw.reshape(rows, -1))


class Mixed:
    """One layer of experts, gone through again and again, each time with other choices."""

    def __init__(self, ops: NativeOps, kind: str) -> None:
        wide, narrow = blocks(kind, WIDE, HIDDEN), blocks(kind, HIDDEN, WIDE)
        stacks = [
            ops.pack([part] * count, torch.float32, CPU) for part, count in ((wide, 2 * EXPERTS), (narrow, EXPERTS))
        ]
        self.experts = Experts(*stacks, "silu", Routing(CHOSEN, "softmax", True))

    def describe(self, f: Forward) -> Any:
        x = f.input("x", HIDDEN)
        for number in range(LAYERS):
            x = f.experts(x, f.input(f"scores {number}", EXPERTS), self.experts)
        return x


class Dense:
    """As many feed-forwards of the active size, each with weights of its own."""

    def __init__(self, ops: NativeOps, kind: str) -> None:
        wide, narrow = blocks(kind, CHOSEN * WIDE, HIDDEN), blocks(kind, HIDDEN, CHOSEN * WIDE)
        self.layers = [
            (ops.pack([wide, wide], torch.float32, CPU), ops.pack([narrow], torch.float32, CPU)) for _ in range(LAYERS)
        ]

    def describe(self, f: Forward) -> Any:
        x = f.input("x", HIDDEN)
        for wide, narrow in self.layers:
            x = f.linear(f.gated(f.linear(x, wide, None), "silu"), narrow, None)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as there are")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--kind", default="Q4_K", help="of the blocks")
    given = parser.parse_args()
    ops = NativeOps()
    if given.threads:
        ops.library.paceline_threads(given.threads)
    sides = {"experts": Mixed(ops, given.kind), "dense": Dense(ops, given.kind)}
    print(f"{given.kind}, {ops.library.paceline_num_threads()} threads, {ops.library.paceline_path().decode()}")
    print("rows  experts ms  dense ms  ratio  ideal")
    for rows in ROWS:
        scores = {
            f"scores {n}": torch.rand(rows, EXPERTS, generator=torch.Generator().manual_seed(n)) for n in range(LAYERS)
        }
        inputs = Inputs(None, None, {"x": torch.randn(rows, HIDDEN), **scores})
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.turns + 1):
            for name, side in sides.items():
                begun = time.perf_counter()
                ops.run(side, inputs, (), (), None)
                taken[name].append((time.perf_counter() - begun) * 1000 / LAYERS)
        mixed, dense = (statistics.median(times[1:]) for times in taken.values())
        read = [len(score.topk(CHOSEN).indices.unique()) for score in scores.values()]
        print(f"{rows:4}  {mixed:10.3f}  {dense:8.3f}  {mixed / dense:5.2f}  {statistics.mean(read) / CHOSEN:5.2f}")


if __name__ == "__main__":
    main()
