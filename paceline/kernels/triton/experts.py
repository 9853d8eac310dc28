"""Experts in Triton: (row, expert) pairs sorted by expert, every chosen expert's weights read once for its rows.

Four kernels: who goes where; gate and up; down, weighed; the sum of a row's experts in ascending order. Shapes follow
from the number of pairs alone, so a graph can replay them whatever is chosen. Every value is one float32 sum over k, as
in `product.py`: a row's bits do not depend on the rows that share its experts.

    pairs           0 … T·C-1, row by row        slots    tiles of up to BLOCK_M pairs of one expert
    order [T·C]     pairs by expert              expert e has slots from start // BLOCK_M + e on: never one that the
                                                 next expert has, and T·C // BLOCK_M + E are enough for all
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.experts import Chosen
from paceline.kernels.ops import Experts
from paceline.kernels.triton.arithmetic import activate
from paceline.kernels.triton.device import INTERPRETED, PDL, begin, launching
from paceline.kernels.triton.product import dot

SCANNED = 1024  # pairs looked at together
COLUMNS = 1024  # of a row, summed by one program


def mix(x: Tensor, chosen: Chosen, experts: Experts, residual: Tensor | None = None) -> Tensor:
    """The chosen experts' results for rows [T, H], weighed, summed in ascending order; a residual is added last."""
    rows, hidden = x.shape
    inner, num_chosen = experts.down.shape[1], chosen.ids.shape[1]
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    slots = _plan(chosen.ids, experts.down.shape[0] // hidden)
    wide = torch.empty(rows * num_chosen, inner, dtype=x.dtype, device=x.device)
    _multiply(x, experts.gate_up.data, wide, slots, None, experts.activation)
    parts = torch.empty(rows * num_chosen, hidden, dtype=torch.float32, device=x.device)
    _multiply(wide, experts.down.data, parts, slots, chosen.weights, "")
    _sum[(rows, triton.cdiv(hidden, COLUMNS))](
        parts, residual, out, hidden, 0 if residual is None else residual.stride(0),
        CHOSEN=num_chosen, COLUMNS=COLUMNS, PDL=PDL, **launching(4),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Slots:
    """Tiles of pairs, on the device."""

    order: Tensor  # [pairs] int32
    expert: Tensor  # [slots] int32
    first: Tensor  # [slots] its first place in the order
    count: Tensor  # [slots] its pairs; 0: nothing to do
    num_chosen: int
    height: int  # no slot has more pairs


def _plan(ids: Tensor, num_experts: int) -> Slots:
    pairs = ids.numel()
    height = min(64, max(16, triton.next_power_of_2(-(-pairs // num_experts))))
    num_slots = pairs // height + num_experts
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(3, num_slots, dtype=torch.int32, device=ids.device)
    _sort[(num_experts,)](
        ids.contiguous(), order, table, num_slots, pairs, STEPS=_steps(pairs, SCANNED), NUM=num_experts, HEIGHT=height,
        SLOTS=triton.next_power_of_2(pairs // height + 2), SCANNED=SCANNED, PDL=PDL, **launching(4),
    )  # fmt: skip
    return Slots(order, table[0], table[1], table[2], ids.shape[1], height)


def _multiply(x: Tensor, weight: Tensor, out: Tensor, slots: Slots, shares: Tensor | None, gate: str) -> None:
    width, depth = out.shape[1], x.shape[1]
    narrow = x.dtype == torch.float32  # no tensor cores: what threads hold is the limit
    n, k = (32, 32) if narrow else (32 if gate else 64, 128)
    grid = triton.cdiv(width, n), len(slots.expert)
    _grouped[grid](
        x, weight, out, slots.order, slots.expert, slots.first, slots.count, shares, width, depth, x.stride(0),
        EVEN=depth % k == 0, STEPS=_steps(depth, k), GATE=gate, CHOSEN=slots.num_chosen, BLOCK_M=slots.height,
        BLOCK_N=n, BLOCK_K=k, PDL=PDL, WIDEN=INTERPRETED, **launching(4, 2 if narrow else 4),
    )  # fmt: skip


def _steps(total: int, each: int) -> int:
    """The interpreter cannot count to a number that a kernel was given."""
    return int(triton.cdiv(total, each)) if INTERPRETED else 0


@triton.jit(do_not_specialize=["slots", "pairs"])
def _sort(
    ids, order, table, slots, pairs,
    STEPS: tl.constexpr, NUM: tl.constexpr, HEIGHT: tl.constexpr, SLOTS: tl.constexpr, SCANNED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One expert finds its pairs: how many stand before them, their order, and their slots."""
    expert = tl.program_id(0)
    begin(PDL)
    lanes = tl.arange(0, SCANNED)
    before, mine = tl.zeros((SCANNED,), dtype=tl.int32), tl.zeros((SCANNED,), dtype=tl.int32)
    for step in range(STEPS if STEPS > 0 else tl.cdiv(pairs, SCANNED)):
        at = step * SCANNED + lanes
        found = tl.load(ids + at, mask=at < pairs, other=NUM)
        before += (found < expert).to(tl.int32)
        mine += (found == expert).to(tl.int32)
    start, count = tl.sum(before, axis=0), tl.sum(mine, axis=0)
    done = start
    for step in range(STEPS if STEPS > 0 else tl.cdiv(pairs, SCANNED)):
        at = step * SCANNED + lanes
        own = (tl.load(ids + at, mask=at < pairs, other=NUM) == expert).to(tl.int32)
        tl.store(order + done + tl.cumsum(own, axis=0) - own, at, mask=own > 0)
        done += tl.sum(own, axis=0)
    number = tl.arange(0, SLOTS)
    slot = start // HEIGHT + expert + number
    inside = slot < (start + count) // HEIGHT + expert + 1
    tl.store(table + slot, expert + tl.zeros((SLOTS,), dtype=tl.int32), mask=inside)
    tl.store(table + slots + slot, start + number * HEIGHT, mask=inside)
    left = tl.minimum(tl.maximum(count - number * HEIGHT, 0), HEIGHT)
    tl.store(table + 2 * slots + slot, left, mask=inside)


@triton.jit
def _grouped(
    x, w, out, order, experts, firsts, counts, shares, N, K, x_stride,
    EVEN: tl.constexpr, STEPS: tl.constexpr, GATE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A slot's rows through its expert: with a gate from x into the sorted order, without from there to the pairs."""
    begin(PDL)
    slot = tl.program_id(1)
    count = tl.load(counts + slot)
    if count == 0:
        return
    number = tl.arange(0, BLOCK_M)
    there = (number < count)[:, None]
    sorted_at = tl.load(firsts + slot) + number
    pair = tl.load(order + sorted_at, mask=number < count, other=0)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    source, target = (pair // CHOSEN, sorted_at) if GATE != "" else (sorted_at, pair)
    height = N * 2 if GATE != "" else N
    weight_row = tl.load(experts + slot).to(tl.int64) * height + tl.minimum(cols, N - 1)
    x_at = x + source.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    w_at = w + weight_row[None, :] * K + lanes[:, None]
    up_at = w_at
    if GATE != "":
        up_at += N.to(tl.int64) * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(STEPS if STEPS > 0 else tl.cdiv(K, BLOCK_K)):
        inside = step * BLOCK_K + lanes < K
        a = tl.load(x_at, mask=there if EVEN else there & inside[None, :], other=0.0)
        b = tl.load(w_at) if EVEN else tl.load(w_at, mask=inside[:, None], other=0.0)
        acc = dot(a, b, acc, WIDEN)
        if GATE != "":
            c = tl.load(up_at) if EVEN else tl.load(up_at, mask=inside[:, None], other=0.0)
            up = dot(a, c, up, WIDEN)
            up_at += BLOCK_K
        x_at += BLOCK_K
        w_at += BLOCK_K
    if GATE != "":
        acc = activate(acc, GATE) * up
    if shares is not None:
        acc *= tl.load(shares + pair, mask=number < count, other=0.0)[:, None]
    at = target.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=there & (cols < N)[None, :])


@triton.jit
def _sum(parts, residual, out, width, residual_stride, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    begin(PDL)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for number in tl.static_range(CHOSEN):
        total += tl.load(parts + (row * CHOSEN + number) * width + columns, mask=inside, other=0.0)
    if residual is not None:
        total += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
