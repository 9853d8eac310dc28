"""Tiles of products chosen anew by what rounds take with them: of a shape with made-up weights, or of a model and head.

    python bench/gpu_settle.py --shape llama-8b [--batches 1,4,16 64 256] [--tiles FILE]
    python bench/gpu_settle.py --small MODEL --head FOLDER [--grown 31,8,2] --temperature 0.8 --batches 1 16

Rounds of decoding are captured and replayed, of sequences that are made to be as long as asked: products stand between
what they stand between in a real one, and rows see as much as there. First every tile worth it is timed alone; then one
product after another takes whichever of the fastest makes rounds of all batches of a group (those with commas between
them) shortest, twice around; and then so many lines of its weights asked for ahead. The table is written after each
group. Before it: `gpu_kernels.py matmul --tune`, which times alone and undoes what was settled.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from gpu_rounds import Decoding, asking, decoding, read, run

from paceline.engine.ladder import FEW
from paceline.kernels.triton import ops, tiles, tuning


def settle(rounds: Decoding, counts: list[int], device: torch.device) -> tuple[list[float], list[float]]:
    """Choose tiles for all products of rounds of so many sequences; seconds of each before and after."""
    keys = rounds.products(counts)
    had = {key: tiles.find_tile(*key) for key in keys}
    for rows, shape, dtype in keys:
        tuning.tune([shape], [rows], device, dtype)
    tiles.measured.update(had)
    before = [rounds.spend(count) for count in counts]
    for find in (tuning.candidates_for, tuning.ahead_for):
        candidates = find(keys)
        rounds.prepare(counts, candidates)
        tuning.settle(candidates, lambda: sum(rounds.spend(count) / old for count, old in zip(counts, before)))
    for key in keys:
        changed = "" if tiles.measured[key] == had[key] else f", not {had[key]}"
        print(f"  {key[0]} rows, {tuple(key[1])}: {tiles.measured[key]}{changed}", flush=True)
    return before, [rounds.spend(count) for count in counts]


def group(text: str) -> list[int]:
    """Sequences of rounds that an engine captures."""
    found = [int(part) for part in text.split(",")]
    if not set(found) <= set(FEW):
        raise argparse.ArgumentTypeError(f"of {text!r} each must be one of {', '.join(map(str, FEW))}")
    return found


def read_options() -> argparse.Namespace:
    parser = asking(__doc__)
    parser.add_argument("--length", type=int, default=600, help="tokens of a sequence")
    parser.add_argument("--batches", type=group, nargs="+", default=[[1, 4, 16], [64], [256]])
    parser.add_argument("--tiles", type=Path, default=ops.MEASURED / "h200.json")
    return read(parser)


def measure(options: argparse.Namespace) -> None:
    device, most = torch.device("cuda"), max(map(max, options.batches))
    if options.tiles.exists() and not tuning.load(options.tiles, device):
        raise SystemExit(f"{options.tiles} was measured on another device, or with other kernels: give --tiles FILE")
    begin = time.perf_counter()
    with decoding(options, most, options.length, options.length) as rounds:
        for counts in options.batches:
            before, after = settle(rounds, counts, device)
            tuning.save(options.tiles, device)
            told = zip(counts, before, after)
            said = ", ".join(f"{count}: {1e3 * old:.3f} → {1e3 * new:.3f} ms" for count, old, new in told)
            print(f"after {time.perf_counter() - begin:.0f} s: rounds of {said}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(read_options(), measure))
