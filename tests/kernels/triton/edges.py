"""Where own keys begin, of a row of places at once."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.looking import own_edge


@triton.jit
def edges(out, block, BLOCK: tl.constexpr, FEW_OWN: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, own_edge(block * BLOCK + place, block, BLOCK, FEW_OWN))
