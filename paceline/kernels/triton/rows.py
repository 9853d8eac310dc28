"""What is done to rows between products: norms, activations, joining; to heads in `heads.py`, by the same names here.

One program has one row (or a part of one), so nothing depends on the other rows. Sums are made in the order of
`arithmetic.py`; a norm here and one in front of a product (`matmul`) are made of the same scaled values and factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.ops import ACTIVATIONS
from paceline.kernels.triton.arithmetic import activate, factor_of, normed, row_factor, sum_lanes
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.heads import HeadNorms, head_norm, rope, turn
from paceline.kernels.triton.matmul import Norm

__all__ = [
    "HeadNorms",
    "Part",
    "activation",
    "beside",
    "gated",
    "head_norm",
    "join",
    "layer_norm",
    "rms_norm",
    "rope",
    "turn",
]

WIDTH = 1024  # columns that a program of an activation has
MOST_BESIDE = 4  # parts of a row


def rms_norm(x: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """x [T, K] · weight in x's dtype, then times the row's factor: rounded once more, with the bias in it."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rms_norm[(len(x),)](
            x, weight, bias, out, x.stride(0), eps, K=x.shape[1], WIDE=_wide(x), PDL=PDL, **launching(4)
        )
    return out


class Part(NamedTuple):
    """What a half of a joined row is made of."""

    rows: Tensor  # [T, K]
    ids: Tensor | None = None  # [T]: `rows` is a table, and these are its rows
    norm: Norm | None = None  # as `rms_norm` makes it


def join(x: Part, y: Part) -> Tensor:
    """x and y side by side: [T, K + L]."""
    ids = [None if part.ids is None else part.ids.contiguous() for part in (x, y)]
    rows, widths = len(x.rows) if ids[0] is None else len(ids[0]), (x.rows.shape[1], y.rows.shape[1])
    out = torch.empty(rows, sum(widths), dtype=x.rows.dtype, device=x.rows.device)
    if rows:
        norms = [(None, 0.0) if part.norm is None else (part.norm.weight, part.norm.eps) for part in (x, y)]
        weights, eps = zip(*norms)
        _join[(rows, 2)](
            x.rows, y.rows, *ids, *weights, out, x.rows.stride(0), y.rows.stride(0), *eps,
            K=widths[0], L=widths[1], WIDE_K=_wide(x.rows), WIDE_L=_wide(y.rows), PDL=PDL, **launching(4),
        )  # fmt: skip
    return out


def beside(parts: Sequence[Tensor]) -> Tensor:
    """[T, K] each, side by side: [T, n·K]."""
    rows, width = parts[0].shape
    alike = len({(part.shape, part.stride(), part.dtype) for part in parts}) == 1 and parts[0].stride(1) == 1
    if not alike or len(parts) > MOST_BESIDE:
        return torch.cat(list(parts), dim=-1)
    out = torch.empty(rows, len(parts) * width, dtype=parts[0].dtype, device=parts[0].device)
    if rows:
        given = (*parts, *[None] * (MOST_BESIDE - len(parts)))
        sizes = out.stride(0), parts[0].stride(0), width
        _beside[(rows, len(parts))](*given, out, *sizes, WIDE=_wide(parts[0]), PDL=PDL, **launching(4))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """In float32, rounded once."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _layer_norm[(len(x),)](
            x, weight, bias, out, x.stride(0), eps, K=x.shape[1], WIDE=_wide(x), PDL=PDL, **launching(4)
        )
    return out


def activation(x: Tensor, kind: str) -> Tensor:
    """[T, I], in float32 and rounded once."""
    return _activate(x, x.shape[1], kind, False)


def gated(x: Tensor, kind: str) -> Tensor:
    """activation(first half) · second half: [T, 2I] → [T, I], in float32 and rounded once."""
    return _activate(x, x.shape[1] // 2, kind, True)


def _wide(x: Tensor) -> int:
    return int(triton.next_power_of_2(x.shape[1]))


def _activate(x: Tensor, width: int, kind: str, gate: bool) -> Tensor:
    if kind not in ACTIVATIONS:
        raise ValueError(f"an activation must be one of {', '.join(ACTIVATIONS)}, not {kind!r}")
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    if len(x):
        grid = len(x), triton.cdiv(width, WIDTH)
        _activation[grid](x, out, width, x.stride(0), KIND=kind, GATE=gate, WIDTH=WIDTH, PDL=PDL, **launching(4))
    return out


@triton.jit
def _rms_norm(x, weight, bias, out, x_stride, eps, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    inside = columns < K
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    begin(PDL)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    made = normed(values.to(tl.float32), by, row_factor(x + row * x_stride, eps, K, WIDE), values.dtype)
    if bias is not None:
        made += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * K + columns, made.to(values.dtype), mask=inside)


@triton.jit
def _put_part(
    x, ids, weight, to, row, stride, eps, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row of K values, normed as `_rms_norm` does it."""
    columns = tl.arange(0, WIDE)
    inside = columns < K
    if weight is not None:
        by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    begin(PDL, True)
    at = row
    if ids is not None:
        at = tl.load(ids + row)
    values = tl.load(x + at * stride + columns, mask=inside, other=0.0)
    if weight is not None:
        made = normed(values.to(tl.float32), by, row_factor(x + at * stride, eps, K, WIDE), values.dtype)
        values = made.to(values.dtype)
    tl.store(to + columns, values, mask=inside)


@triton.jit
def _join(
    x, y, x_ids, y_ids, x_weight, y_weight, out, x_stride, y_stride, x_eps, y_eps,
    K: tl.constexpr, L: tl.constexpr, WIDE_K: tl.constexpr, WIDE_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    to = out + row * (K + L)
    if tl.program_id(1) == 0:
        _put_part(x, x_ids, x_weight, to, row, x_stride, x_eps, K, WIDE_K, PDL)
    else:
        _put_part(y, y_ids, y_weight, to + K, row, y_stride, y_eps, L, WIDE_L, PDL)


@triton.jit
def _beside(one, two, three, four, out, out_row, row_stride, width, WIDE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL, True)
    row, number, columns = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    part = one
    if number == 1:
        part = two
    if three is not None:  # noqa: SIM102 (known when it is compiled; the next is not)
        if number == 2:
            part = three
    if four is not None:  # noqa: SIM102
        if number == 3:
            part = four
    inside = columns < width
    values = tl.load(part + row * row_stride + columns, inside)
    tl.store(out + row * out_row + number * width + columns, values, inside)


@triton.jit
def _layer_norm(x, weight, bias, out, x_stride, eps, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    inside = columns < K
    by = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    begin(PDL)
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    lanes = tl.arange(0, 128)[None, :]
    sums = tl.zeros((1, 128), dtype=tl.float32)
    for step in tl.static_range((K + 127) // 128):
        at = step * 128 + lanes
        sums += tl.load(x + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    mean = tl.sum(sum_lanes(sums, 1), 0) * (1.0 / K)  # one value: as a row of one its layout would be all others'
    squares = tl.zeros((1, 128), dtype=tl.float32)
    for step in tl.static_range((K + 127) // 128):
        at = step * 128 + lanes
        apart = tl.load(x + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32) - mean
        squares += tl.where(at < K, apart * apart, 0.0)
    made = (wide - mean) * tl.sum(factor_of(squares, 1.0 / K, eps, 1), 0) * by + shift
    tl.store(out + row * K + columns, made.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activation(
    x, out, width, x_stride, KIND: tl.constexpr, GATE: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    begin(PDL)
    made = activate(tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATE:
        made *= tl.load(x + row * x_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, made.to(out.dtype.element_ty), mask=inside)
