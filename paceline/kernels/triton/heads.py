"""Heads of fused rows: normed, turned by their positions, and stored where attention looks for them.

A program has some heads of one row. Its squares are summed in the order of `arithmetic.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.ops import Heads
from paceline.kernels.triton.arithmetic import factor_of, normed
from paceline.kernels.triton.device import PDL, begin, launching

HEADS = 4  # heads that a program has


class HeadNorms(NamedTuple):
    """Rms norms of every query and key head."""

    query: Tensor  # [D]
    key: Tensor  # [D]
    eps: float


def head_norm(qkv: Tensor, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Tensor:
    """Every query and key head of a fused row rms-normed: [T, …] → the same."""
    return _row_of_heads(qkv, heads, None, HeadNorms(query, key, eps))


def rope(qkv: Tensor, heads: Heads, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys turned by the rows' positions, the values as they are: [T, …] → the same."""
    return _row_of_heads(qkv, heads, _Turn(positions, cos, sin), None)


def turn(
    qkv: Tensor,
    heads: Heads,
    positions: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    write: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """`head_norm` (with norms) and `rope` in one, keys and values stored: the turned queries [T, heads · D].

    keys, values: a cache layer's parts [rows, kv heads, width], of which write [T] names the rows. Without cos and sin
    nothing is turned.
    """
    queries = torch.empty(len(qkv), heads.num_heads * heads.head_dim, dtype=qkv.dtype, device=qkv.device)
    turning = None if cos is None or sin is None else _Turn(positions, cos, sin)
    _store_heads(qkv, heads, turning, norms, (queries, keys, values, write))
    return queries


class _Turn(NamedTuple):
    positions: Tensor  # [T]
    cos: Tensor  # [positions, C] float32
    sin: Tensor


def _row_of_heads(qkv: Tensor, heads: Heads, turning: _Turn | None, norms: HeadNorms | None) -> Tensor:
    out = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    ends = [heads.num_heads * heads.head_dim, (heads.num_heads + heads.num_kv_heads) * heads.head_dim]
    queries, keys, values = torch.tensor_split(out, ends, dim=1)
    if heads.num_kv_heads:
        keys, values = (part.unflatten(1, (heads.num_kv_heads, -1)) for part in (keys, values))
    _store_heads(qkv, heads, turning, norms, (queries, keys, values, None))
    return out


def _store_heads(
    qkv: Tensor,
    heads: Heads,
    turning: _Turn | None,
    norms: HeadNorms | None,
    places: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    queries, keys, values, write = places
    turned = heads.num_heads + heads.num_kv_heads
    blocks = triton.cdiv(turned, HEADS)
    grid = len(qkv), blocks + triton.cdiv(heads.num_kv_heads, HEADS)
    if not len(qkv):
        return
    half = 0 if turning is None else turning.cos.shape[1]
    rest = max(heads.head_dim - 2 * half, 1)
    store_heads[grid](
        qkv, queries, keys, values, write, *(turning or (None,) * 3), *(norms or (None, None, 0.0)),
        qkv.stride(0), queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        0 if turning is None else turning.cos.stride(0),
        NUM=heads.num_heads, TURNED=turned, BLOCKS=blocks, KV=heads.num_kv_heads, D=heads.head_dim,
        V=heads.value_width, HALF=half, WIDE=triton.next_power_of_2(max(half, 1)), REST=triton.next_power_of_2(rest),
        VALUES=triton.next_power_of_2(heads.value_width), HEADS=HEADS, PDL=PDL, **launching(4),
    )  # fmt: skip


@triton.jit
def read(at, columns, D: tl.constexpr, head, NUM: tl.constexpr, TURNED: tl.constexpr, query, key, factor):
    """Some columns of some heads, normed where there are norms, in float32 of rounded values."""
    dtype: tl.constexpr = at.dtype.element_ty
    inside = columns < D
    values = tl.load(at[:, None] + columns[None, :], mask=(head < TURNED)[:, None] & inside[None, :], other=0.0)
    wide = values.to(tl.float32)
    if query is not None:
        of_query = tl.load(query + columns, mask=inside, other=0.0).to(tl.float32)
        of_key = tl.load(key + columns, mask=inside, other=0.0).to(tl.float32)
        by = tl.where((head < NUM)[:, None], of_query[None, :], of_key[None, :])
        wide = normed(wide, by, factor[:, None], dtype).to(dtype).to(tl.float32)
    return wide


@triton.jit
def put(to_query, to_key, columns, END: tl.constexpr, wide, is_query, is_key):
    """Query heads go to one place, key heads to another."""
    inside = (columns < END)[None, :]
    tl.store(to_query[:, None] + columns[None, :], wide.to(to_query.dtype.element_ty), mask=is_query[:, None] & inside)
    tl.store(to_key[:, None] + columns[None, :], wide.to(to_key.dtype.element_ty), mask=is_key[:, None] & inside)


@triton.jit
def head_factors(at, there, eps, HEADS: tl.constexpr, D: tl.constexpr):
    lanes = tl.arange(0, 128)
    squares = tl.zeros((HEADS, 128), dtype=tl.float32)
    for step in tl.static_range((D + 127) // 128):
        columns = step * 128 + lanes
        mask = there[:, None] & (columns < D)[None, :]
        wide = tl.load(at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += wide * wide
    return factor_of(squares, 1.0 / D, eps, HEADS)


@triton.jit
def store_heads(
    qkv, queries, keys, values, write, positions, cos, sin, query_norm, key_norm, eps,
    row_stride, query_stride, key_row, key_head, value_row, value_head, turn_stride,
    NUM: tl.constexpr, TURNED: tl.constexpr, BLOCKS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = row
    if write is not None:
        to = tl.load(write + row, cache_modifier=".cg")  # see `device.py`
    if HALF > 0:
        half = tl.arange(0, WIDE)
        place = tl.load(positions + row, cache_modifier=".cg") * turn_stride + half
        c = tl.load(cos + place, mask=half < HALF, other=0.0)[None, :]
        s = tl.load(sin + place, mask=half < HALF, other=0.0)[None, :]
    begin(PDL, True)  # attention reads where its rows look meanwhile
    if block < BLOCKS:
        head = block * HEADS + tl.arange(0, HEADS)
        there, is_query = head < TURNED, head < NUM
        is_key = there & (head >= NUM)
        at = qkv + row * row_stride + head * D
        to_query, to_key = queries + row * query_stride + head * D, keys + to * key_row + (head - NUM) * key_head
        factor = 0.0
        if query_norm is not None:
            factor = head_factors(at, there, eps, HEADS, D)
        if HALF > 0:
            first = read(at, half, D, head, NUM, TURNED, query_norm, key_norm, factor)
            second = read(at, half + HALF, D, head, NUM, TURNED, query_norm, key_norm, factor)
            turned = (first * c - second * s).to(qkv.dtype.element_ty)
            put(to_query, to_key, half, HALF, turned, is_query, is_key)
            turned = (second * c + first * s).to(qkv.dtype.element_ty)
            put(to_query + HALF, to_key + HALF, half, HALF, turned, is_query, is_key)
        if 2 * HALF < D:
            rest = 2 * HALF + tl.arange(0, REST)
            kept = read(at, rest, D, head, NUM, TURNED, query_norm, key_norm, factor)
            put(to_query, to_key, rest, D, kept, is_query, is_key)
    else:
        head = (block - BLOCKS) * HEADS + tl.arange(0, HEADS)
        columns = tl.arange(0, VALUES)[None, :]
        mask = (head < KV)[:, None] & (columns < V)
        stored = tl.load(qkv + row * row_stride + TURNED * D + head[:, None] * V + columns, mask=mask, other=0.0)
        to_value = values + to * value_row + head[:, None] * value_head + columns
        tl.store(to_value, stored.to(values.dtype.element_ty), mask=mask)
