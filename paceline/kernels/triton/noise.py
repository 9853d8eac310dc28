"""Keyed noise: exact, to the bit what `sampling/noise.py` makes in tensor operations, and rough.

Exact noise is hashed in 32-bit integers and made in float64 additions and multiplications that nothing may fuse. That
takes tables and many operations, so it is made for those tokens alone that may be picked: rough noise tells which, and
is off by less than they are given room for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.device import INTERPRETED, prefetch

# Rough noise is off by 5e-5 at most, what it is added to by 5e-7 of itself. Of two that is twice as much; ten times it.
_ROOM, _SHARE = tl.constexpr(1e-3), tl.constexpr(1e-5)
_APPROXIMATE = tl.constexpr(not INTERPRETED)
_LINES, _ENTRIES = tl.constexpr(256), tl.constexpr(16)  # of a table's 4,096 numbers
_ASKED = tl.constexpr(32)  # lines that a program asks for


@triton.jit
def _mix(x):
    """A 32-bit finaliser; x is uint32, which wraps."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def words_of(parts):
    """A row's two words, the same parts of its key mixed from two starting points."""
    first, second = parts[0].to(tl.uint32) ^ 0x9E3779B9, parts[0].to(tl.uint32) ^ 0x3C6EF372
    for number in tl.static_range(len(parts)):
        if number > 0:
            first, second = first ^ parts[number].to(tl.uint32), second ^ parts[number].to(tl.uint32)
        first = _mix(first + (((number + 1) * 0x85EBCA6B) & 0xFFFFFFFF))
        second = _mix(second + (((number + 1) * 0x85EBCA6B) & 0xFFFFFFFF))
    return first, second


@triton.jit
def _log(x, wanted, inverse, logarithm):
    """Of positive normal float64, by table and cubic."""
    raw = x.to(tl.int64, bitcast=True)
    exponent = ((raw >> 52) - 1023).to(tl.float64)
    index = (raw >> 40) & 4095
    mantissa = ((raw & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    rest = mantissa * tl.load(inverse + index, wanted, 1.0) - 1.0
    series = rest * (1.0 - rest * (0.5 - rest * 0.3333333333333333))
    return exponent * 0.6931471805599453 + (tl.load(logarithm + index, wanted, 0.0) + series)


@triton.jit
def ask_for_tables(inverse, logarithm, program):
    """A program's share: eight neighbours ask for all of them. A round's weights have come by since they were read."""
    line = (program * _ASKED + tl.arange(0, _ASKED)) % _LINES
    prefetch(inverse + line * _ENTRIES)
    prefetch(logarithm + line * _ENTRIES)


@triton.jit
def bits_of(words, ids):
    """32 bits of each token, from their row's words."""
    return _mix(_mix(ids.to(tl.uint32) ^ words[0]) + words[1])


@triton.jit
def gumbel(bits, wanted, inverse, logarithm):
    """float32 noise of those that are wanted; that of others is anything."""
    unit = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-_log(-_log(unit, wanted, inverse, logarithm), wanted, inverse, logarithm)).to(tl.float32)


@triton.jit
def _rough_log(x):
    """By the device's own logarithm of base 2, off by 2⁻²² (beyond 0.5 … 2 by as much of itself); where there is none,
    the interpreter's."""
    if _APPROXIMATE:
        two = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        two = tl.log2(x)
    return two * 0.6931472


@triton.jit
def rough_gumbel(bits):
    """The same to within 5e-5. Where the first logarithm is of nearly 1 it is a series: the second needs it exact in
    proportion."""
    unit = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - unit
    near = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -_rough_log(tl.where(rest < 0.015625, near, -_rough_log(unit)))


@triton.jit
def may_win(rough, least):
    """Which values, roughly known, may in truth be no less than what is roughly `least`; a NaN may, -inf need not."""
    near = tl.minimum(least, 3e38)  # what is about as large may be infinite or not
    near = tl.where(near > 0.0, near * (1.0 - _SHARE), near * (1.0 + _SHARE)) - _ROOM
    return (rough != -float("inf")) & ~(rough < near)
