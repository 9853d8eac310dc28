"""Whether a compiler takes what the interpreter runs: it runs Python, and does not see what has no one type.

Run as a program it reads launches from its input and answers each with what Triton's front end says of it, for a GPU
that is not here. That end is where types are found; what comes behind it (minutes of it) `bench/gpu_compile.py` does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# Constants that are others where kernels are compiled.
THERE = {"WIDEN": False, "STEPS": 0, "PDL": True}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")

Launch = tuple[str, str, tuple[tuple[str, Any], ...]]  # module, kernel, what it was given


def launch_of(kernel: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Launch:
    """What a compiler sees of it: constants, types, and of numbers the kinds it tells apart."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    constants = {name for name in names if "constexpr" in str(kernel.__annotations__.get(name, ""))}
    told = {**dict(zip(names, args)), **given}
    kinds = {name: value if name in (*constants, *OPTIONS) else _kind(value) for name, value in told.items()}
    return kernel.__module__, kernel.__name__, tuple(sorted({**kinds, **_others(kinds)}.items()))


def _others(kinds: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in THERE.items() if name in kinds}


def _kind(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return ("number", 2**40 if abs(value) >= 2**31 else value if value == 1 else 16 if value % 16 == 0 else 3)
    if isinstance(value, float):
        return ("number", 0.5)
    if hasattr(value, "block_shape"):
        return ("boxes", str(value.base.dtype), tuple(value.base.shape), tuple(value.block_shape))
    return ("tensor", str(value.dtype), value.data_ptr() % 16)


class Reader:
    """The program, started when first it is asked; each launch is read once."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[bytes] | None = None
        self._known: dict[Launch, str] = {}

    def mistakes(self, launches: set[Launch]) -> list[str]:
        """What is wrong with some of them."""
        for launch in launches - self._known.keys():
            self._known[launch] = self._read(launch)
        return sorted({f"{launch[1]}: {self._known[launch]}" for launch in launches if self._known[launch]})

    def _read(self, launch: Launch) -> str:
        if self._program is None:
            words = [sys.executable, "-m", "tests.kernels.triton.reading"]
            env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1", "CUDA_VISIBLE_DEVICES": ""}
            self._program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env)
        assert self._program.stdin is not None and self._program.stdout is not None
        pickle.dump(launch, self._program.stdin)
        self._program.stdin.flush()
        return str(pickle.load(self._program.stdout))

    def close(self) -> None:
        if self._program is not None:
            self._program.communicate()


class Read(Exception):
    """The front end is done."""


def read(launch: Launch) -> str:
    """What is wrong with it, or nothing."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    def make(kind: Any) -> Any:
        if not isinstance(kind, tuple) or kind[0] not in ("number", "tensor", "boxes"):
            return kind
        if kind[0] == "number":
            return kind[1]
        dtype = getattr(torch, kind[1].removeprefix("torch."))
        if kind[0] == "tensor":
            return torch.empty(64, dtype=dtype, device="meta")
        return TensorDescriptor.from_tensor(torch.empty(kind[2], dtype=dtype, device="meta"), list(kind[3]))

    module, name, given = launch
    kernel = getattr(importlib.import_module(module), name)
    try:
        kernel.warmup(grid=(1,), **{**{name: make(kind) for name, kind in given}, "launch_pdl": True})
    except Read:
        return ""
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__
    return "was not read"


def main() -> None:
    from triton.backends.nvidia.compiler import CUDABackend

    def stop(*given: Any) -> None:
        raise Read

    sys.path.insert(0, str(ROOT / "bench"))
    importlib.import_module("gpu_compile").pretend()
    CUDABackend.make_ttir = staticmethod(stop)
    said = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    while True:
        try:
            launch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(read(launch), said)
        said.flush()


if __name__ == "__main__":
    main()
