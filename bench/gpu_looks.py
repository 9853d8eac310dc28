"""What rounds take with other settings of attention (`kernels/triton/attention.py`), by how long the texts are.

    python bench/gpu_looks.py --shape llama-8b [--lengths 256 512 1024] [--batch 1] [--settings SINGLE=512 WARPS=528]
    python bench/gpu_looks.py --small MODEL --head FOLDER [--grown 31,8,2] --temperature 0.8
                              --settings SINGLE_OWN=128 SINGLE_OWN=512,ALIKE=264

Rounds of decoding are captured and replayed, as `gpu_settle.py` does: `gpu_attention.py --sweep` has one attention
behind another, each of which hides how the one before it ends. The first line of each length is of the settings as they
are. None of those that change a row's bits (CHUNK, EDGE, FAR_CHUNK, BLOCK, BLOCKS) is allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from gpu import sizes
from gpu_common import SHAPES, Bench
from gpu_settle import ROOM, Decoding

from paceline.engine.ladder import FEW
from paceline.kernels.triton import attention

Setting = dict[str, int]
NAMES = ("WARPS", "PAIRS", "ROOM_OWN", "ALIKE", "SINGLE", "SINGLE_OWN", "AHEAD", "MOST_AHEAD", "DEEP", "BRIEF")


def spend(
    decoding: Decoding, count: int, lengths: list[int], settings: list[Setting]
) -> Iterator[tuple[int, Setting, float]]:
    """Seconds of a round of so many sequences, by how long they are and what was given."""
    ops = decoding.llm.engine.target.model.ops
    for length in lengths:
        decoding.lengthen(length)
        for given in settings:
            with contextlib.ExitStack() as stack:
                for name, value in given.items():
                    stack.enter_context(mock.patch.object(attention, name, value))
                ops.prepare([decoding.compute(count)])
                yield length, given, decoding.spend(count)


def setting(text: str) -> Setting:
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in NAMES or not value.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is none; allowed: NAME=NUMBER, of {', '.join(NAMES)}")
        found[name] = int(value)
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--small", help="instead of a shape: a model with real weights")
    parser.add_argument("--head", help="an EAGLE head of that model")
    parser.add_argument("--grown", type=sizes, help="the head's trees grow so; a chain of 3 unless given")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 400, 600, 1000], help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, choices=FEW, metavar="SEQUENCES")
    parser.add_argument("--settings", type=setting, nargs="+", default=[{"SINGLE": 512, "SINGLE_OWN": 512}])
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
    count, length = options.batch, max(options.lengths) + ROOM
    fixed = {"budget": "fixed", "max_num_seqs": count, "max_model_len": length, "num_pages": count * (length // 16 + 2)}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        drafter = list(bench.heads(3).values())[-1 if options.grown else 0] if options.head else None
        made = (
            bench.dummy(options.shape, drafter, **fixed)
            if options.shape
            else bench.llm(options.small, drafter, **fixed)
        )
        with made as llm:
            decoding = Decoding(llm, count, min(options.lengths), options.temperature)
            for length, given, seconds in spend(decoding, count, options.lengths, [{}, *options.settings]):
                named = ", ".join(f"{name}={value}" for name, value in given.items()) or "as they are"
                print(f"{count} x {length}: {1e3 * seconds:.4f} ms  {named}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
