"""What rounds launch on a GPU, compiled for one that is not here: does it compile, does it spill, how many launches?

    python bench/gpu_compile.py [--shapes smollm2 llama-8b] [--rounds plain chain grown] [--sequences 16]
                                [--rows 8192] [--output FILE]

Rounds are gone through on PyTorch's `meta` device, which has shapes and no data, as an engine goes through them at its
start on an H200: with the tiles that were measured there, and kernels for sm_90. Nothing is run and no time of a round
is told. For every kernel it says registers, bytes spilled by a thread and shared memory; for every kind of round how
many launches it takes. Ends with 1 if a kernel cannot be compiled or wants more memory than a processor has.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from gpu_common import SHAPES, Bench
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from paceline import Eagle, NGram
from paceline.bench import machine, results
from paceline.engine.device import Outcome
from paceline.engine.replaying import Key, ReplayingRunner
from paceline.kernels.triton import int8, ops, tiles, tuning
from paceline.testing import set_apart

TARGET, PROCESSORS = GPUTarget("cuda", 90, 32), 132  # an H200
SHARED = 227 << 10  # bytes of a processor's memory that one program can have
SIZES = re.compile(r"REG:(\d+) STACK:(\d+)")


class Absent:
    """Triton's driver of a device that is not here: it can be compiled for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        """Nothing is launched."""

    class utils:
        """What a kernel is loaded by."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": SHARED}

        @staticmethod
        def load_binary(*ignored: Any) -> tuple[int, ...]:
            """Module, function, registers, spills, threads at most."""
            return (0, 0, 0, 0, 1024)


@dataclass
class Launches:
    """In place of launching: every kernel that would be, and what could not be compiled."""

    kernels: dict[int, Any] = field(default_factory=dict)
    constants: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    latest: list[str] = field(default_factory=list)  # of the round that is gone through
    rounds: dict[Key, list[str]] = field(default_factory=dict)

    def note(self, kernel: Any, given: dict[str, Any]) -> None:
        self.kernels[id(kernel)] = kernel
        self.constants[id(kernel)] = {name: value for name, value in given.items() if name.isupper()}

    def run(self, compile_only: Callable[..., Any]) -> Callable[..., None]:
        def run(function: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
            try:
                kernel = compile_only(function, *args, grid=grid, warmup=True, **given)
            except Exception as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                self.failed[function.fn.__name__] = next((line for line in lines if "error" in line), lines[0])
                return
            if kernel is not None and not hasattr(kernel, "result"):  # else it is still being compiled
                self.note(kernel, given)
                self.latest.append(function.fn.__name__)

        return run

    def capture(self, compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        self.latest = []
        return compute(), lambda: None


def go_through(bench: Bench, shape: str, drafter: Any, sequences: int) -> tuple[Launches, float]:
    """All rounds of a start; and the seconds in which their kernels were compiled."""
    found = Launches()
    more = {"budget": "fixed", "num_pages": 256, "max_batched_tokens": bench.options.rows}
    llm = set_apart(bench.dummy(shape, max_num_seqs=sequences, **more), 1, found.capture)
    llm.set_drafter(drafter)
    remember = ReplayingRunner._remember

    def remembering(runner: Any, key: Key, *given: Any) -> Any:
        made = remember(runner, key, *given)
        found.rounds[key] = found.latest
        return made

    with (
        torch.inference_mode(),
        mock.patch.object(jit.JITFunction, "run", found.run(jit.JITFunction.run)),
        mock.patch.object(ReplayingRunner, "_remember", remembering),
    ):
        begin, steps = time.perf_counter(), llm.engine.warm_up()
        next(steps, None)
        spent = time.perf_counter() - begin
        for _ in steps:
            pass
    llm.close()
    return found, spent


def describe(launches: Launches) -> list[dict[str, Any]]:
    """Every kernel, the greediest first."""
    rows = []
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for number, kernel in launches.kernels.items():
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        sizes = SIZES.search(told)
        assert sizes is not None, told
        registers, spilled = map(int, sizes.groups())
        row = {"kernel": kernel.metadata.name, "registers": registers, "spilled": spilled}
        row |= {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
        constants = {name: str(value) for name, value in launches.constants[number].items()} if spilled else None
        rows.append({**row, "constants": constants})
    return sorted(rows, key=lambda row: (-row["spilled"], -row["registers"], row["kernel"]))


def tell_rounds(launches: Launches) -> list[dict[str, Any]]:
    """Of rounds of decoding alone, by size; those of greedy requests and of sampled ones. Of one sequence by kernel."""
    rows = []
    for key, names in launches.rounds.items():
        size, kinds = key.size, collections.Counter(names)
        if size.chunks == 0 and key.kind is not None:
            row = {"sequences": size.sampling, "nodes": size.nodes, "greedy": key.kind.greedy, "launches": len(names)}
            rows.append({**row, "kernels": dict(kinds.most_common())} if size.sampling == 1 else row)
    return sorted(rows, key=lambda row: (row["sequences"], row["nodes"], not row["greedy"]))


def load_tiles() -> None:
    """Those measured on the device that is pretended."""
    for path in sorted(ops.MEASURED.glob("*.json")):
        for rows, shape, dtype, tile in json.loads(path.read_text())["tiles"]:
            key = rows, tiles.Shape(*shape), getattr(torch, dtype.removeprefix("torch."))
            tiles.measured[key] = tiles.Tile(**tile)


def pretend() -> None:
    """That there is an H200. Weights of 8 bits are told from those that cannot be by their values, and have none."""
    driver.set_active(Absent())
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.kernels.triton"):
            told = {"HOPPER": True, "PDL": True, "BOXES": True, "processors": lambda device: PROCESSORS}
            vars(module).update({name: value for name, value in told.items() if name in vars(module)})
    tuning.load = lambda path, device: None  # type: ignore[assignment,return-value]
    ops.round_rows = lambda matrix: int8.Int8(  # type: ignore[attr-defined]
        torch.empty_like(matrix, dtype=torch.int8), matrix.new_empty(len(matrix), dtype=torch.float32), matrix.dtype
    )
    load_tiles()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=shapes)
    parser.add_argument("--rounds", nargs="+", default=["plain", "chain", "grown"], choices=list(DRAFTERS))
    parser.add_argument("--sequences", type=int, default=16, help="at most so many at a time")
    parser.add_argument("--rows", type=int, help="at most so many in a round, prompts' included")
    parser.add_argument("--output", type=Path, help="a file for what was found")
    return parser.parse_args()


DRAFTERS: dict[str, Callable[[str], Any]] = {
    "plain": lambda head: None,
    "ngram": lambda head: NGram(),
    "chain": lambda head: Eagle(head, 5),
    "fixed": lambda head: Eagle(head, tree="wide"),
    "grown": lambda head: Eagle(head, 31, tree="dynamic", top_k=8, depth=2),
}


def main() -> int:
    options = read_options()
    options.device, options.dtype, options.kernels, options.quick = torch.device("meta"), "bfloat16", "triton", False
    pretend()
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for shape in options.shapes:
            for name in options.rounds:
                launches, spent = go_through(bench, shape, DRAFTERS[name](bench.head(shape)), options.sequences)
                kernels, rounds = describe(launches), tell_rounds(launches)
                too_large = [row for row in kernels if row["shared"] > SHARED]
                wrong += len(launches.failed) + len(too_large)
                rows.append({"shape": shape, "rounds_of": name, "failed": launches.failed})
                rows[-1] |= {"kernels": kernels, "rounds": rounds}
                print(f"{shape}, {name}: {len(kernels)} kernels; new ones compiled in {spent:.1f} s", flush=True)
                for row in (row for row in kernels if row["spilled"]):
                    said = f"{row['registers']} registers, {row['spilled']} bytes spilled, {row['shared']} shared"
                    print(f"  {row['kernel']}: {said}; {row['constants']}")
                for row in too_large:
                    print(f"  {row['kernel']} wants {row['shared']} bytes of shared memory; there are {SHARED}")
                for kernel, error in launches.failed.items():
                    print(f"  {kernel} cannot be compiled: {error}")
                for row in rounds:
                    how = "greedy" if row["greedy"] else "sampled"
                    print(f"  {row['sequences']} sequences, {row['nodes']} nodes, {how}: {row['launches']} launches")
    if options.output is not None:
        told = {
            "part": "compile",
            **machine.record(),
            "command": "python bench/gpu_compile.py",
            "triton": triton.__version__,
        }
        results.write(options.output, {**told, "rows": rows})
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
