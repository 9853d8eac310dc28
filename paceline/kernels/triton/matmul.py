"""Matrix products in Triton, with what stands around them in a layer: `matmul`, `logits`, `logits_bests`.

Every result is row-invariant: bits depend on a row and the weight, neither on how many rows there are nor on the tile
(but for a drafter's weights of 8 bits: see `product.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.ops import ACTIVATIONS
from paceline.kernels.triton import product
from paceline.kernels.triton.device import BOXES, INTERPRETED, PDL, launching, processors
from paceline.kernels.triton.int8 import Int8, Matrix, split
from paceline.kernels.triton.interpreter import mend
from paceline.kernels.triton.tiles import Shape, Tile, find_tile

mend()

Bests = tuple[Tensor, Tensor]  # [T, blocks] values and ids


@dataclass(frozen=True)
class Norm:
    """An rms norm of rows, mostly in front of a product."""

    weight: Tensor  # [K]
    eps: float


def matmul(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gate: str | None = None,
) -> Tensor:
    """x [T, K] · weight [N, K]ᵀ → [T, N] in x's dtype, summed in float32 and rounded once, at the very end.

    norm: rows are rms-normed first: x · norm.weight is rounded to x's dtype, the sum is multiplied by the row's factor.
    gate: weight is [2N, K], and the result is activation(first half) · second half. residual [T, N] is added last.
    """
    if gate is not None and gate not in ACTIVATIONS:
        raise ValueError(f"gate must be one of {', '.join(ACTIVATIONS)}, not {gate!r}")
    width = weight.shape[0] if gate is None else weight.shape[0] // 2
    out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
    launch(x, weight, out, Around(bias, norm, residual, gate))
    return out


def logits(x: Tensor, weight: Matrix, norm: Norm | None = None) -> Tensor:
    """x [R, K] · weight [V, K]ᵀ → [R, V] float32, unrounded."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    launch(x, weight, out, Around(norm=norm), _tile_of_logits(len(x), x, weight, norm))
    return out


def best_of(bests: Bests) -> Tensor:
    """[R] int64 the lowest id of each row's largest, of what its blocks left; -1: none is above -inf, or one is NaN."""
    values, ids = bests
    rows, blocks = values.shape
    best = torch.empty(rows, dtype=torch.int64, device=values.device)
    if rows:
        size = triton.next_power_of_2(blocks)
        product.find_best[(rows,)](values, ids, best, blocks, BLOCKS=size, PDL=PDL, **launching(4))
    return best


def logits_bests(
    x: Tensor, weight: Matrix, norm: Norm | None = None, picked: Tensor | None = None
) -> tuple[Tensor, Bests]:
    """`logits`, and of each block of a row the largest, by `product.leave_best`: what the row's best is found in.

    picked [R]: of these rows of x.
    """
    rows, width = len(x) if picked is None else len(picked), weight.shape[0]
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    tile, factors = _tile_of_logits(rows, x, weight, norm), None
    if picked is not None and norm is not None and not tile.folded:
        x, factors = fold(x, norm, picked)
        norm = None
    elif picked is not None:
        x = x[picked]
    blocks = triton.cdiv(width, tile.n)
    values = torch.empty(rows, blocks, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=x.device)
    launch(x, weight, out, Around(norm=norm, bests=(values, ids), factors=factors), tile)
    return out, (values, ids)


def _tile_of_logits(rows: int, x: Tensor, weight: Matrix, norm: Norm | None) -> Tile:
    """Logits are twice as wide, and a row's best is found: too much for large tiles that last."""
    tile = find_tile(rows, shape_of(x, weight, False, norm), x.dtype)
    return replace(tile, lasting=tile.lasting and tile.m <= 64)


def fold(x: Tensor, norm: Norm, picked: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x · norm.weight in x's dtype [T, K], the rows' factors [T] float32): the parts a normed product is made of.
    picked [T]: of these rows of x."""
    picked = None if picked is None else picked.contiguous()
    rows, width = len(x) if picked is None else len(picked), x.shape[1]
    scaled = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        product.fold[(rows,)](
            x, picked, norm.weight, scaled, factors, x.stride(0), norm.eps,
            K=width, WIDE=triton.next_power_of_2(width), PDL=PDL, **launching(4),
        )  # fmt: skip
    return scaled, factors


@dataclass(frozen=True)
class Around:
    """What is done on the way."""

    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    gate: str | None = None
    bests: Bests | None = None
    factors: Tensor | None = None  # [T] of rows that are scaled already


def shape_of(x: Tensor, weight: Matrix, gate: bool, norm: Norm | None) -> Shape:
    width = weight.shape[0] // 2 if gate else weight.shape[0]
    return Shape(width, weight.shape[1], gate, norm is not None, isinstance(weight, Int8))


def launch(x: Tensor, weight: Matrix, out: Tensor, around: Around, tile: Tile | None = None) -> None:
    """One product into `out`; tile: another than the table's."""
    apart = x.stride(1) != 1 or split(weight)[0].stride(1) != 1
    if x.dtype != weight.dtype or x.shape[1] != weight.shape[1] or apart:
        raise ValueError(
            "a product needs rows [T, K] and a weight [N, K] of one dtype, each row's values side by side; given "
            f"{x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    if not x.shape[0]:
        return
    tile = tile or find_tile(x.shape[0], shape_of(x, weight, around.gate is not None, around.norm), x.dtype)
    if around.norm is not None and tile.folded:
        around = replace(around, norm=Norm(_wide(around.norm.weight), around.norm.eps))
    elif around.norm is not None:
        x, factors = fold(x, around.norm)
        around = replace(around, norm=None, factors=factors)
    kernel, grid, given, options = arguments(x, weight, out, around, tile)
    kernel[grid](*given, **options)


def arguments(x: Tensor, weight: Matrix, out: Tensor, around: Around, tile: Tile) -> Any:
    """A launch: kernel, grid, arguments, options."""
    (rows, depth), width, norm, residual = x.shape, out.shape[1], around.norm, around.residual
    values, scales = split(weight)
    programs = triton.cdiv(rows, tile.m) * triton.cdiv(width, tile.n)
    kind = product.FOLDED if norm is not None else product.PLAIN if around.factors is None else product.FACTORS
    kernel, rows_given, weight_given = product.product, x, values
    beside, more = None if norm is None else norm.weight, {}
    # Values that are widened come from registers, which a tensor core allows its left side alone.
    if tile.boxes and norm is None and (scales is None or tile.turned) and all(map(_has_boxes, (x, values))):
        kernel, beside = product.product_of_boxes, values
        if tile.lasting:
            programs = min(programs, processors(x.device))
        more = {"TURNED": tile.turned, "LASTING": programs if tile.lasting else 0}
        rows_given = TensorDescriptor.from_tensor(x, [tile.m, tile.k])
        weight_given = TensorDescriptor.from_tensor(values, [tile.n, tile.k])
    given = (
        rows_given, weight_given, out, scales, around.bias, residual, beside, around.factors,
        *(around.bests or (None, None)), rows, width, depth, x.stride(0), values.stride(0),
        0 if residual is None else residual.stride(0), 1.0 / depth, 0.0 if norm is None else norm.eps,
    )  # fmt: skip
    # The interpreter cannot count to a number it was given; compiled, one kernel serves every K.
    steps = triton.cdiv(depth, tile.k) if INTERPRETED else 0
    options = {
        "EVEN": depth % tile.k == 0, "ONCE": rows <= tile.m, "STEPS": steps, "NORM": kind, "GATE": around.gate or "",
        "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group, "AHEAD": tile.ahead,
        "PDL": PDL, "WIDEN": INTERPRETED, **more, **launching(tile.warps, tile.stages),
    }  # fmt: skip
    return kernel, (programs,), given, options


_kept_wide = WeakIdKeyDictionary()


def _wide(weight: Tensor) -> Tensor:
    """A norm's weight in float32, made once: inside a product only values of 32 bits are fetched ahead."""
    if weight.dtype == torch.float32:
        return weight
    if weight not in _kept_wide:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return weight  # what a graph makes is the graph's
        _kept_wide[weight] = weight.float()
    return cast(Tensor, _kept_wide[weight])


def _has_boxes(matrix: Tensor) -> bool:
    """Whether its rows begin where the device can copy boxes of them."""
    size = matrix.element_size()
    return BOXES and size <= 2 and matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
