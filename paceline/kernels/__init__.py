"""One name per operation. `select` answers with the set of implementations a model runs on.

    reference   rows one at a time in a fixed order: slow, row-invariant, what everything else is tested against
    torch       PyTorch's own kernels: any device; on a CPU a row's last bits depend on its neighbours
    triton      our own GPU kernels: row-invariant, and captured in graphs
    triton-fast the same, but its products of many rows may be PyTorch's, which are not row-invariant: what
                exact_kernels=False asks for, and no name of its own
    native      our own CPU library: packed, 16-bit and float32 weights, row-invariant, fast; float32 arithmetic

Kernels see tensors and a `Layout`. They know nothing of sequences, drafting or sampling.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from paceline.errors import OptionError
from paceline.kernels.ops import Ops
from paceline.kernels.quantise import INT8, check_quantization

FAST = "triton-fast"
KERNELS = ("auto", "native", "triton", "torch", "reference")


def _compute_alone() -> None:
    """A forked child has none of the threads that PyTorch computes with, and would wait for them for ever.

    The native library starts threads of its own in the child.
    """
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_compute_alone)


def select(
    name: str, device: torch.device, dtype: torch.dtype, quantization: str | None = None, drafts: bool = False
) -> Ops:
    """The operations called `name`; auto: on a CPU native where it is built, on a GPU triton; else torch.

    dtype: what weights are kept in, and the arithmetic's too; the native kernels always compute in float32.
    quantization: pack float weights at load; the native kernels can, and Triton's, to int8, for a drafter (drafts).
    """
    blocks = check_quantization(quantization)
    if name not in (*KERNELS, FAST):
        raise OptionError(f"kernels={name!r} is not known; allowed: {', '.join(KERNELS)}")
    if name == "auto" and device.type == "cpu":
        from paceline.kernels.cpu.library import library, say_missing

        name = "native" if blocks is not None or library() is not None else "torch"
        if name == "torch":
            say_missing()
    elif name == "auto" and device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        name = "triton"
    if name == "native":
        from paceline.kernels.cpu.native import NativeOps

        return NativeOps(blocks, dtype)
    packs = drafts and blocks == INT8 and name in ("triton", FAST)
    if blocks is not None and not packs:
        raise OptionError(f"quantization={quantization!r} needs the native kernels on a CPU, not {name!r} on {device}")
    if name in ("triton", FAST):
        return _triton(device, name == FAST, packs)
    if name == "reference":
        from paceline.kernels.reference import ReferenceOps

        return ReferenceOps()
    from paceline.kernels.eager import EagerOps

    return EagerOps()


def _triton(device: torch.device, fast: bool, packs: bool) -> Ops:
    asked = "fast kernels (exact_kernels=False) need" if fast else "kernels='triton' needs"
    try:
        from paceline.kernels.triton.device import INTERPRETED
        from paceline.kernels.triton.ops import FastOps, TritonOps
    except ImportError as error:
        raise OptionError(f"{asked} the package triton: {error}") from None
    if device.type == "cpu" and not INTERPRETED:
        instead = "leave that out" if fast else "use auto or native"
        raise OptionError(f"{asked} a GPU, not {device}; on a CPU {instead}")
    return FastOps(device, packs) if fast else TritonOps(device, packs)


__all__ = ["FAST", "KERNELS", "Ops", "select"]
