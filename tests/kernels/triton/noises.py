"""A kernel that makes noise both ways, the exact one and the rough one."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.noise import gumbel, rough_gumbel


@triton.jit
def both_kinds(bits, out, inverse, logarithm, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    given = tl.load(bits + place)
    tl.store(out + place, gumbel(given, place < SIZE, inverse, logarithm))
    tl.store(out + SIZE + place, rough_gumbel(given))
