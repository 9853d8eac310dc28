"""Kernels that do what `Dependence` is to find."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.device import begin


@triton.jit
def write(x, EARLY: tl.constexpr):
    """No mistake."""
    begin(True, EARLY)
    tl.store(x + tl.program_id(0), 1.0)


@triton.jit
def read_at_once(x, y, SHARED: tl.constexpr):
    values = tl.load(x + tl.program_id(0), cache_modifier=".cg" if SHARED else "")
    begin(True)
    tl.store(y + tl.program_id(0), values)


@triton.jit
def write_at_once(x):
    tl.store(x + tl.program_id(0), 1.0)
    begin(True)


@triton.jit
def leave(x, FIRST: tl.constexpr):
    """No mistake, if the first program stays."""
    if (tl.program_id(0) == 0) & FIRST:
        begin(True)
