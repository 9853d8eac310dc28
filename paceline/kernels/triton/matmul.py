"""Matrix products in Triton, with what stands around them in a layer: `matmul`, `logits`, `logits_bests`.

Every result is row-invariant: bits depend on a row and the weight, neither on how many rows there are nor on the tile
(but for a drafter's weights of 8 bits: see `product.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.ops import ACTIVATIONS
from paceline.kernels.triton import product
from paceline.kernels.triton.arithmetic import LANES, group_of
from paceline.kernels.triton.device import BOXES, INTERPRETED, PDL, launching, processors
from paceline.kernels.triton.int8 import Int8, Matrix, split
from paceline.kernels.triton.interpreter import mend
from paceline.kernels.triton.parts import product_of_parts
from paceline.kernels.triton.tiles import Shape, Tile, find_tile

mend()

FEW, FEW_SUMS = 32, 2048  # rows and sums of a small tile
LEAST = 16  # columns that a tensor core multiplies at a time
# Rows of a product that leaves something for the norm behind it. Of more a kernel makes the norm, for every program of
# the next product would read the sums of all its rows.
MOST_LEFT = 256

Bests = Tensor  # [T, blocks] keys, a row's greatest of which names its best (`picking.decide`)


@dataclass(frozen=True)
class Norm:
    """An rms norm of rows, mostly in front of a product."""

    weight: Tensor  # [K]
    eps: float


class Folded(NamedTuple):
    """Rows in front of a product as their norm has them."""

    norm: Norm
    scaled: Tensor  # [T, K] the rows · norm.weight, in their dtype
    factors: Tensor  # float32: [T], or [T, 128] of which a row's first are sums of neighbours' squares


def matmul(
    x: Tensor | Folded,
    weight: Matrix,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
    left: Folded | None = None,
) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ → [T, N] in x's dtype, summed in float32 and rounded once, at the very end.

    norm: rows are rms-normed first: x · norm.weight is rounded to x's dtype, the sum is multiplied by the row's factor.
    gate: weight is [2N, K], and the result is activation(first half) · second half. residual [T, N] is added last.
    left: room that `room_behind` found for what a norm makes of the result.
    """
    if gate is not None and gate not in ACTIVATIONS:
        raise ValueError(f"gate must be one of {', '.join(ACTIVATIONS)}, not {gate!r}")
    rows, width = given_rows(x), weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    launch(x, weight, out, Around(bias, norm, residual, gate, left=left))
    return out


def given_rows(x: Tensor | Folded) -> Tensor:
    """[T, K] what meets the weight."""
    return x.scaled if isinstance(x, Folded) else x


def room_behind(x: Tensor | Folded, weight: Matrix, norm: Norm) -> Folded | None:
    """Room for what a norm makes of a product's result; None: it leaves nothing, being of many rows or in tiles too
    narrow."""
    rows, width = given_rows(x), weight.shape[0]
    group, tile = group_of(width), find_tile(len(rows), shape_of(x, weight, False, None), rows.dtype)
    if len(rows) > MOST_LEFT or tile.n % group:
        return None
    scaled = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    squares = torch.empty(len(rows), LANES, dtype=torch.float32, device=rows.device)
    return Folded(norm, scaled, squares)


def logits(x: Tensor | Folded, weight: Matrix, norm: Norm | None = None) -> Tensor:
    """x [R, K] · weight [V, K]ᵀ → [R, V] float32, unrounded."""
    rows = given_rows(x)
    out = torch.empty(len(rows), weight.shape[0], dtype=torch.float32, device=rows.device)
    launch(x, weight, out, Around(norm=norm), tile_of_logits(len(rows), x, weight, norm))
    return out


def logits_bests(
    x: Tensor | Folded, weight: Matrix, norm: Norm | None = None, picked: Tensor | None = None
) -> tuple[Tensor, Bests]:
    """`logits`, and of each block of a row its best, by `product.leave_best`. picked [R]: of these rows of x."""
    if picked is not None:
        x, norm = given_rows(x)[picked] if norm is None else fold(given_rows(x), norm, picked), None
    rows, width = given_rows(x), weight.shape[0]
    out = torch.empty(len(rows), width, dtype=torch.float32, device=rows.device)
    tile = tile_of_logits(len(rows), x, weight, norm)
    keys = torch.empty(len(rows), triton.cdiv(width, tile.n), dtype=torch.int64, device=rows.device)
    launch(x, weight, out, Around(norm=norm, bests=keys), tile)
    return out, keys


def tile_of_logits(rows: int, x: Tensor | Folded, weight: Matrix, norm: Norm | None) -> Tile:
    """Logits are twice as wide, and a row's best is found: too much for large tiles that last."""
    tile = find_tile(rows, shape_of(x, weight, False, norm), given_rows(x).dtype)
    return replace(tile, lasting=tile.lasting and tile.m <= 64)


def fold(x: Tensor, norm: Norm, picked: Tensor | None = None, kept: Tensor | None = None) -> Folded:
    """The parts a normed product is made of; picked [T]: of these rows of x, which go into `kept` [T, K], if given."""
    picked = None if picked is None else picked.contiguous()
    rows, width = len(x) if picked is None else len(picked), x.shape[1]
    scaled = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        product.fold[(rows,)](
            x, picked, kept, norm.weight, scaled, factors, x.stride(0), norm.eps,
            K=width, WIDE=triton.next_power_of_2(width), PDL=PDL, **launching(4),
        )  # fmt: skip
    return Folded(norm, scaled, factors)


@dataclass(frozen=True)
class Around:
    """What is done on the way."""

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    gate: str | None = None
    bests: Bests | None = None
    left: Folded | None = None


def shape_of(x: Tensor | Folded, weight: Matrix, gate: bool, norm: Norm | None) -> Shape:
    width = weight.shape[0] // 2 if gate else weight.shape[0]
    return Shape(width, weight.shape[1], gate, norm is not None or isinstance(x, Folded), isinstance(weight, Int8))


def launch(given: Tensor | Folded, weight: Matrix, out: Tensor, around: Around, tile: Tile | None = None) -> None:
    """One product into `out`; tile: another than the table's."""
    x = given_rows(given)
    apart = x.stride(1) != 1 or split(weight)[0].stride(1) != 1
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[1] or apart:
        raise ValueError(
            "a product needs rows [T, K] and a weight [N, K] of one dtype, each row's values side by side; given "
            f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    if not x.shape[0]:
        return
    tile = tile or find_tile(x.shape[0], shape_of(given, weight, around.gate is not None, around.norm), x.dtype)
    if around.norm is not None:
        given = fold(x, around.norm)
    kernel, grid, arguments, options = launching_of(given, weight, out, around, tile)
    kernel[grid](*arguments, **options)


def launching_of(given: Tensor | Folded, weight: Matrix, out: Tensor, around: Around, tile: Tile) -> Any:
    """A launch: kernel, grid, arguments, options. Rows whose norm is not made yet have none."""
    folded, left, x = given if isinstance(given, Folded) else None, around.left, given_rows(given)
    (rows, depth), width, residual = x.shape, out.shape[1], around.residual
    values, scales = split(weight)
    programs = triton.cdiv(rows, tile.m) * triton.cdiv(width, tile.n)
    kind = product.PLAIN
    if folded is not None:
        kind = product.FACTORS if folded.factors.dim() == 1 else product.SQUARES
    kernel, rows_given, weight_given, lines, more = product.product, x, values, None, {}
    # Values that are widened come from registers, which a tensor core allows its left side alone.
    if tile.boxes and (scales is None or tile.turned) and all(map(_has_boxes, (x, values))):
        kernel, lines = product.product_of_boxes, values
        if tile.lasting:
            programs = min(programs, processors(x.device))
        more = {"TURNED": tile.turned, "LASTING": programs if tile.lasting else 0}
        rows_given = TensorDescriptor.from_tensor(x, [tile.m, tile.k])
        weight_given = TensorDescriptor.from_tensor(values, [tile.n, tile.k])
    summed, step = depth, tile.k  # by one, and of that in a step
    if tile.parts > 1 and scales is not None and not tile.boxes:
        kernel, summed, step = product_of_parts, -(-depth // (tile.parts * LEAST)) * LEAST, tile.k // tile.parts
        more = {"part_size": summed, "PARTS": tile.parts, "EVEN": False}
    arguments = (
        rows_given, weight_given, out, scales, around.bias, residual, lines, None if folded is None else folded.factors,
        around.bests, *((None,) * 3 if left is None else (left.norm.weight, *left[1:])),
        rows, width, depth, x.stride(0), values.stride(0), 0 if residual is None else residual.stride(0),
        1.0 / depth, 0.0 if folded is None else folded.norm.eps,
    )  # fmt: skip
    # The interpreter cannot count to a number it was given; compiled, one kernel serves every K.
    steps = triton.cdiv(summed, step) if INTERPRETED else 0
    options = {
        "EVEN": depth % tile.k == 0, "ONCE": rows <= tile.m, "STEPS": steps, "NORM": kind, "GATE": around.gate or "",
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group,
        "SUMS": triton.cdiv(depth, group_of(depth)) if kind == product.SQUARES else 0,
        "LEFT": 0 if left is None else group_of(width), "AHEAD": tile.ahead, "AT_ONCE": _has_room(tile),
        "PDL": PDL, "WIDEN": INTERPRETED,
        **more, **launching(tile.warps, tile.stages),
    }  # fmt: skip
    return kernel, (programs,), arguments, options


def _has_room(tile: Tile) -> bool:
    """Whether a program has registers for what meets its sums in the end while it makes them."""
    return not tile.lasting and (tile.m <= FEW or (tile.m <= 2 * FEW and tile.m * tile.n <= FEW_SUMS))


def _has_boxes(matrix: Tensor) -> bool:
    """Whether its rows begin where the device can copy boxes of them."""
    size = matrix.element_size()
    return BOXES and size <= 2 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
