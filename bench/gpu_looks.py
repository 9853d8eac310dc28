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
from collections.abc import Iterator
from unittest import mock

from gpu_rounds import Decoding, asking, decoding, read, run

from paceline.engine.ladder import FEW
from paceline.kernels.triton import attention

Setting = dict[str, int]
NAMES = ("WARPS", "PAIRS", "ROOM_OWN", "ALIKE", "SINGLE", "SINGLE_OWN", "AHEAD", "MOST_AHEAD", "DEEP", "BRIEF")


def spend(
    rounds: Decoding, count: int, lengths: list[int], settings: list[Setting]
) -> Iterator[tuple[int, Setting, float]]:
    """Seconds of a round of so many sequences, by how long they are and what was given."""
    ops = rounds.llm.engine.target.model.ops
    for length in lengths:
        rounds.lengthen(length)
        for given in settings:
            with contextlib.ExitStack() as stack:
                for name, value in given.items():
                    stack.enter_context(mock.patch.object(attention, name, value))
                ops.prepare([rounds.compute(count)])
                yield length, given, rounds.spend(count)


def setting(text: str) -> Setting:
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in NAMES or not value.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is none; allowed: NAME=NUMBER, of {', '.join(NAMES)}")
        found[name] = int(value)
    return found


def read_options() -> argparse.Namespace:
    parser = asking(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 400, 600, 1000], help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, choices=FEW, metavar="SEQUENCES")
    parser.add_argument("--settings", type=setting, nargs="+", default=[{"SINGLE": 512, "SINGLE_OWN": 512}])
    return read(parser)


def measure(options: argparse.Namespace) -> None:
    count = options.batch
    with decoding(options, count, min(options.lengths), max(options.lengths)) as rounds:
        for length, given, seconds in spend(rounds, count, options.lengths, [{}, *options.settings]):
            named = ", ".join(f"{name}={value}" for name, value in given.items()) or "as they are"
            print(f"{count} x {length}: {1e3 * seconds:.4f} ms  {named}", flush=True)


if __name__ == "__main__":
    raise SystemExit(run(read_options(), measure))
