"""Rows that are kept by slot, page or token, put there and taken from there: one launch for two tables. And rows of
the cache that move, in all layers at once.

A program has BLOCK columns of one row. To the bit what `StateReader` and `KVCache` do in tensor operations; nobody's
row, which nobody looks at, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.ops import LayerCache
from paceline.kernels.triton.device import PDL, begin, launching

BLOCK = 1024


@triton.jit(do_not_specialize=["nobody"], do_not_specialize_on_alignment=["places", "known"])
def _put_kernel(
    places, x, y, to_x, to_y, known, nobody, width, x_stride, y_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL, True)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, inside = tl.load(places + row), columns < width
    if place != nobody:
        to = place * width + columns
        tl.store(to_x + to, tl.load(x + row * x_stride + columns, inside).to(to_x.dtype.element_ty), inside)
        if y is not None:
            tl.store(to_y + to, tl.load(y + row * y_stride + columns, inside).to(to_y.dtype.element_ty), inside)
        if known is not None:
            tl.store(known + place, 1)


def put(places: Tensor, rows: Sequence[Tensor], kept: Sequence[Tensor], known: Tensor, nobody: int) -> None:
    """rows [T, W] each, into the rows of kept [P, W] that places [T] name; known [P] bool says of which they are."""
    for first in range(0, len(kept), 2):
        given = [row if row.stride(1) == 1 else row.contiguous() for row in rows[first : first + 2]]
        x, y = (*given, None)[:2]
        to_x, to_y = (*kept[first : first + 2], None)[:2]
        assert x is not None and to_x is not None and to_x.is_contiguous() and (to_y is None or to_y.is_contiguous())
        count, width = x.shape
        if count:
            _put_kernel[(count, triton.cdiv(width, BLOCK))](
                *(places, x, y, to_x, to_y, None if first else known.view(torch.uint8), nobody, width),
                *(x.stride(0), 0 if y is None else y.stride(0)),
                BLOCK=BLOCK,
                PDL=PDL,
                **launching(4),
            )


@triton.jit(do_not_specialize_on_alignment=["slots", "budgets", "known", "most"])
def _take_kernel(
    slots, x, y, out, budgets, known, most, width, next_out, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL, True)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, inside = tl.load(slots + row), columns < width
    tl.store(out + row * width + columns, tl.load(x + slot * width + columns, inside), inside)
    if y is not None:
        tl.store(out + next_out + row * width + columns, tl.load(y + slot * width + columns, inside), inside)
    if budgets is not None:
        tl.store(most + row, tl.where(tl.load(known + slot) != 0, tl.load(budgets + row), 0))


def take(slots: Tensor, budgets: Tensor, known: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """budgets [B], 0 where known [S+1] bool does not hold; and of each of kept [S+1, W] the rows of slots [B]."""
    count, width = len(slots), kept[0].shape[1]
    most = torch.empty_like(budgets)
    out = kept[0].new_empty(len(kept), count, width)
    for first in range(0, len(kept), 2):
        x, y = (*kept[first : first + 2], None)[:2]
        assert x is not None and x.is_contiguous() and (y is None or y.is_contiguous())
        asked = (None, None, None) if first else (budgets, known.view(torch.uint8), most)
        _take_kernel[(count, triton.cdiv(width, BLOCK))](
            *(slots, x, y, out[first], *asked, width, count * width), BLOCK=BLOCK, PDL=PDL, **launching(4)
        )
    return most, list(out)


def pick(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of table [V, W] that ids [T] name."""
    out = table.new_empty(len(ids), table.shape[1])
    if len(ids):
        assert table.is_contiguous()
        _take_kernel[(len(ids), triton.cdiv(table.shape[1], BLOCK))](
            *(ids.contiguous(), table, None, out, None, None, None, table.shape[1], 0),
            BLOCK=BLOCK,
            PDL=PDL,
            **launching(4),
        )
    return out


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["source", "target"])
def _move_kernel(
    part, other, source, target, depth, layers, layer_stride, row_stride, head_stride, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one head of one layer's part, or of its other one, and all rows of one sequence."""
    begin(PDL, True)
    of, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    place, column = tl.arange(0, DEPTH), tl.arange(0, WIDE)
    here = tl.load(source + of * depth + place, place < depth, 0)
    there = tl.load(target + of * depth + place, place < depth, 0)
    moved = ((place < depth) & (here != there))[:, None] & (column < WIDTH)[None, :]
    if other is not None:  # noqa: SIM102 (known when it is compiled; the next is not)
        if layer >= layers:
            part, layer = other, layer - layers
    part += layer * layer_stride + head * head_stride + column[None, :]
    values = tl.load(part + here[:, None] * row_stride, moved)
    tl.debug_barrier()  # all are read before any is written
    tl.store(part + there[:, None] * row_stride, values, moved)


def move(caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
    """Rows source [B, D] of all layers to target [B, D], a sequence's own: one launch for layers that are alike, keys
    and values together where these are alike too."""
    if not source.numel():
        return
    source, target = source.contiguous(), target.contiguous()
    batch, depth = source.shape if source.dim() == 2 else (1, len(source))
    for _, alike in groupby(caches, key=lambda layer: [(part.shape, part.stride(), part.dtype) for part in layer]):
        for first, other, count, apart in _paired([run for parts in zip(*alike) for run in _evenly(parts)]):
            _, heads, width = first.shape
            _move_kernel[(batch, count if other is None else 2 * count, heads)](
                *(first, other, source, target, depth, count, apart, first.stride(0), first.stride(1)),
                WIDTH=width,
                WIDE=triton.next_power_of_2(width),
                DEPTH=triton.next_power_of_2(depth),
                PDL=PDL,
                **launching(4 if depth * width <= 4096 else 8),
            )


def _paired(runs: Sequence[tuple[Tensor, int, int]]) -> Iterator[tuple[Tensor, Tensor | None, int, int]]:
    """Two runs in one, where there are two that are alike: keys and values mostly are."""
    if len(runs) == 2 and runs[0][1:] == runs[1][1:] and _alike(runs[0][0], runs[1][0]):
        yield runs[0][0], runs[1][0], *runs[0][1:]
    else:
        yield from ((first, None, count, apart) for first, count, apart in runs)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _evenly(parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """The parts as rows of equal distances: the first, how many, how many values apart."""
    size, start = parts[0].element_size(), 0
    while start < len(parts):
        places = [(part.data_ptr() - parts[start].data_ptr()) // size for part in parts[start:]]
        apart = places[1] if len(places) > 1 else 0
        count = next((number for number, place in enumerate(places) if place != number * apart), len(places))
        yield parts[start], count, apart
        start += count
