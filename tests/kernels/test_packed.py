"""Packed weights against their definition: unpacked values, and products to the last bit.

The reference below is csrc/packed.h in numpy: float32, products fused into sums, blocks in ascending order. What a
block holds is read through the GGUF reader, which has an oracle of its own: the quants are its values for scales of
one.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.kernels.blocks import BLOCKS, Blocks
from paceline.kernels.cpu.library import SOURCES
from paceline.kernels.cpu.native import NativeOps
from paceline.kernels.ops import Weight
from tests.kernels.tiny import CPU, packed, random_blocks, same_bits

Floats = np.ndarray[Any, np.dtype[np.float32]]
ONE, ZERO, MINUS_ONE = (np.array([x], "<f2").view(np.uint8) for x in (1.0, 0.0, -1.0))
WITH_MIN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K")
SHAPES = [(1, 1), (15, 2), (17, 3), (97, 1)]  # outputs, and columns in super-blocks or in blocks
HUGE = np.float32(np.finfo(np.float32).max)


def pack(*parts: Any) -> Weight:
    return NativeOps().pack(list(parts), torch.float32, CPU)


def columns_of(kind: str, blocks: int) -> int:
    return 256 * blocks if kind.endswith("_K") else 32 * blocks


# ---- the definition


def decoded(kind: str, raw: np.ndarray, shape: tuple[int, int], changes: dict[tuple[int, int | None], Any]) -> Floats:
    """The reader's values after some bytes of every block were replaced."""
    blocks = raw.reshape(-1, BLOCKS[kind][1]).copy()
    for (start, stop), value in changes.items():
        blocks[:, start:stop] = value
    return Blocks(kind, shape, blocks.reshape(len(raw), -1)).dequantize().numpy()


def halves(kind: str, raw: np.ndarray, at: int) -> Floats:
    """The half at byte `at` of every block, [rows, blocks of 32]."""
    elements, size = BLOCKS[kind]
    blocks = np.ascontiguousarray(raw.reshape(len(raw), -1, size)[:, :, at : at + 2]).view("<f2")[..., 0]
    return np.repeat(blocks.astype(np.float32), elements // 32, axis=1)


def parts(tensor: Blocks) -> tuple[np.ndarray, Floats, Floats | None]:
    """Integers [rows, columns], scales [rows, blocks of 32] and minimums: value = scale * integer + minimum."""
    kind, raw, shape = tensor.kind, np.asarray(tensor.raw), (tensor.shape[0], tensor.shape[1])
    d, m = (0, 2), (2, 4)
    if kind == "Q6_K":
        ones = {(0, 128): 0x11, (128, 192): 0xAA, (208, 210): ONE}  # every quant is 33 - 32
        quants = decoded(kind, raw, shape, {(192, 208): 1, (208, 210): ONE})
        return (quants * decoded(kind, raw, shape, ones)).astype(np.int64), halves(kind, raw, 208), None
    if kind in ("Q4_K", "Q5_K"):
        unit = np.array([1] * 4 + [0] * 4 + [1] * 4, np.uint8)  # eight scales of 1, eight minimums of 0
        quants = decoded(kind, raw, shape, {d: ONE, m: ZERO, (4, 16): unit})
        no_quants = {(16, None): 0}
        low = decoded(kind, raw, shape, {d: ZERO, m: MINUS_ONE, **no_quants})[:, ::32]
        one_quants = {(16, None): 0x11} if kind == "Q4_K" else {(16, 48): 0, (48, None): 0x11}
        scale = decoded(kind, raw, shape, {d: ONE, m: ZERO, **one_quants})[:, ::32]
        return quants.astype(np.int64), halves(kind, raw, 0) * scale, -(halves(kind, raw, 2) * low)
    if kind in ("Q4_1", "Q5_1"):
        quants = decoded(kind, raw, shape, {d: ONE, m: ZERO})
        return quants.astype(np.int64), halves(kind, raw, 0), halves(kind, raw, 2)
    scale = halves(kind, raw, 0)
    quants = decoded(kind, raw, shape, {d: ONE}).astype(np.int64)
    if kind == "Q8_0":
        return quants, scale, None
    middle = 8 if kind == "Q4_0" else 16
    return quants + middle, scale, np.float32(-middle) * scale


def quantised(x: Floats) -> tuple[np.ndarray, Floats, Floats]:
    """Activations by blocks of 32: quants [rows, columns], scales and sums [rows, blocks]."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    quants = np.rint(blocks * inverse[:, :, None]).astype(np.int64)
    scales = largest / np.float32(127)
    with np.errstate(over="ignore"):  # of huge values the sum may be infinite
        sums = scales * quants.sum(axis=2).astype(np.float32)
    return quants.reshape(x.shape), scales, sums


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: exact product and sum in float64, rounded there to odd, which a second rounding keeps."""
    with np.errstate(all="ignore"):  # infinities and NaN pass through
        product = a.astype(np.float64) * b.astype(np.float64)  # exact: 24 + 24 bits
        wide = c.astype(np.float64)
        total = product + wide
        back = total - product
        error = (product - (total - back)) + (wide - back)
        even = (total.view(np.int64) & 1) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        return np.where(np.isfinite(total) & (error != 0) & even, odd, total).astype(np.float32)


def product(tensor: Blocks, x: Floats) -> Floats:
    weights, scale, minimum = parts(tensor)
    quants, scales, sums = quantised(x)
    dots = (quants.reshape(len(x), 1, -1, 32) * weights.reshape(1, len(weights), -1, 32)).sum(axis=3)
    acc = np.zeros((len(x), len(weights)), np.float32)
    for block in range(dots.shape[2]):
        acc = fma(dots[:, :, block].astype(np.float32), scale[:, block] * scales[:, block, None], acc)
        if minimum is not None:
            acc = fma(minimum[:, block][None], sums[:, block, None], acc)
    return acc


def dense_product(weights: Floats, x: Floats) -> Floats:
    acc = np.zeros((len(x), len(weights)), np.float32)
    for column in range(weights.shape[1]):
        acc = fma(weights[:, column][None], x[:, column, None], acc)
    return acc


def activations(rows: int, columns: int, seed: int = 5) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


# ---- values


@pytest.mark.parametrize("kind", SOURCES)
def test_embedding_rows_are_the_file_s_values(kind: str) -> None:
    for rows, blocks in SHAPES:
        tensor = packed(kind, rows, columns_of(kind, blocks))
        ids = torch.tensor([rows - 1, *range(rows), 0])
        found = NativeOps().embed(pack(tensor), ids)
        wanted = tensor.dequantize()[ids]
        # Bits, but for the sign of zero: 8 * d - 8 * d and -d * 0 are the same number.
        assert same_bits(found + 0.0, wanted + 0.0)
        assert wanted.abs().max() > 0


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if not kind.endswith("_K")])
def test_embedding_rows_of_a_quantised_matrix_are_near_the_matrix(kind: str) -> None:
    dense = activations(33, 96)
    raw = gguf.quants.quantize(dense, gguf.GGMLQuantizationType[kind])
    tensor = Blocks(kind, (33, 96), raw)
    found = NativeOps().embed(pack(tensor), torch.arange(33))
    assert same_bits(found + 0.0, tensor.dequantize() + 0.0)
    assert (found.numpy() - dense).std() < 0.15 * dense.std()


def test_embedding_rows_of_stacked_matrices_follow_one_another() -> None:
    stacked = [packed("Q4_K", 17, 256), packed("Q6_K", 1, 256, 1), torch.randn(3, 256), packed("Q8_0", 15, 256, 2)]
    wanted = torch.cat([part if isinstance(part, torch.Tensor) else part.dequantize() for part in stacked])
    found = NativeOps().embed(pack(*stacked), torch.arange(36))
    assert same_bits(found + 0.0, wanted + 0.0)


@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_dense_rows_come_back_unchanged(columns: int) -> None:
    dense = torch.from_numpy(activations(18, columns))
    ids = torch.arange(18)
    assert same_bits(NativeOps().embed(pack(dense), ids), dense)
    for half in (dense.bfloat16(), dense.half()):
        assert same_bits(NativeOps().embed(pack(half), ids), half.float())


# ---- products


@pytest.mark.parametrize("kind", SOURCES)
def test_the_parts_read_for_the_reference_make_the_file_s_values(kind: str) -> None:
    tensor = packed(kind, 9, columns_of(kind, 2))
    weights, scale, minimum = parts(tensor)
    values = weights * np.repeat(scale, 32, axis=1).astype(np.float64)
    if minimum is not None:
        values = values + np.repeat(minimum, 32, axis=1)
    assert np.abs(values - tensor.dequantize().numpy()).max() < 1e-6
    assert (minimum is not None) == (kind in WITH_MIN)


@pytest.mark.parametrize("kind", SOURCES)
def test_products_are_the_definition_s_bits(kind: str) -> None:
    for outputs, blocks in SHAPES:
        tensor = packed(kind, outputs, columns_of(kind, blocks))
        weight = pack(tensor)
        x = activations(9, tensor.shape[1])
        wanted = product(tensor, x)
        for rows in range(1, 10):
            found = NativeOps().linear(torch.from_numpy(x[:rows]), weight)
            assert same_bits(found, torch.from_numpy(wanted[:rows])), (outputs, rows)


@pytest.mark.parametrize("kind", SOURCES)
def test_products_are_near_those_of_the_unpacked_values(kind: str) -> None:
    tensor = packed(kind, 40, columns_of(kind, 4))
    x = activations(5, tensor.shape[1])
    found = NativeOps().linear(torch.from_numpy(x), pack(tensor)).double()
    weights = tensor.dequantize().double()
    wanted = torch.from_numpy(x).double() @ weights.T
    half_step = (
        torch.from_numpy(quantised(x)[1]).double().repeat_interleave(32, 1) / 2
    )  # each activation is off by less
    assert ((found - wanted).abs() <= half_step @ weights.abs().T + 1e-5).all()
    assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize("rows", [1, 4, 9, 64, 70])
def test_mixed_segments_and_a_bias(rows: int) -> None:
    stacked = [packed("Q4_K", 17, 512), packed("Q6_K", 15, 512, 1), packed("Q4_1", 1, 512, 2)]
    bias = torch.from_numpy(activations(1, 33 + 5)[0])
    dense = torch.from_numpy(activations(5, 512, seed=8))
    x = activations(rows, 512)
    wanted = np.concatenate([*(product(part, x) for part in stacked), dense_product(dense.numpy(), x)], axis=1)
    ops, weight = NativeOps(), pack(*stacked, dense)
    assert same_bits(ops.linear(torch.from_numpy(x), weight), torch.from_numpy(wanted))
    assert same_bits(ops.linear(torch.from_numpy(x), weight, bias), torch.from_numpy(wanted + bias.numpy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 7, 32, 33, 100])
def test_dense_products_are_sequential_sums(columns: int, dtype: torch.dtype) -> None:
    for outputs in (1, 15, 17, 97):
        dense = torch.from_numpy(activations(outputs, columns, seed=outputs)).to(dtype)
        x = activations(9, columns)
        wanted = torch.from_numpy(dense_product(dense.float().numpy(), x))
        weight = pack(dense)
        for rows in range(1, 10):
            assert same_bits(NativeOps().linear(torch.from_numpy(x[:rows]), weight), wanted[:rows])


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q6_K"])
def test_no_rows_give_no_rows(kind: str) -> None:
    weight = pack(torch.randn(17, 256) if kind == "F32" else packed(kind, 17, 256))
    assert NativeOps().linear(torch.empty(0, 256), weight).shape == (0, 17)
    assert NativeOps().embed(weight, torch.empty(0, dtype=torch.int64)).shape == (0, 256)


def test_rows_that_do_not_lie_together_are_read_right() -> None:
    tensor = packed("Q4_1", 17, 64)
    x = torch.from_numpy(activations(6, 128))[::2, 32:96]
    assert same_bits(NativeOps().linear(x, pack(tensor)), torch.from_numpy(product(tensor, x.contiguous().numpy())))


def test_damaged_sizes_are_refused() -> None:
    from paceline.errors import OptionError

    broken = Blocks("Q4_1", (2, 64), random_blocks("Q4_1", 2, 32))
    with pytest.raises(OptionError, match="2 x 64"):
        pack(broken)


# ---- activations


def native_quantised(x: Floats) -> tuple[np.ndarray, Floats, Floats, np.ndarray]:
    found = NativeOps().library
    columns = len(x)
    quants, scales = np.full(columns, 99, np.int8), np.full(columns // 32, 9, np.float32)
    sums, halves_ = np.full(columns // 32, 9, np.float32), np.full(columns // 16, 99, np.int32)
    found.paceline_quantise(x.ctypes.data, columns, *(part.ctypes.data for part in (quants, scales, sums, halves_)))
    return quants, scales, sums, halves_


def ties() -> Floats:
    """A block whose inverse scale is 1: every half lies between two integers."""
    return np.array([127, *(n + 0.5 for n in range(-15, 16))], np.float32)


BLOCKS_OF_32 = {
    "random": activations(1, 320)[0],
    "zeros": np.zeros(64, np.float32),
    "negative zeros": np.full(32, -0.0, np.float32),
    "ties": ties(),
    "one value": np.eye(1, 32, 31, dtype=np.float32)[0] * np.float32(-3.7),
    "huge": np.array([HUGE, -HUGE, HUGE / 2, 1.0] * 8, np.float32),
    "small": activations(1, 64)[0] * np.float32(1e-30),
    "smallest normal scale": activations(1, 64)[0] * np.float32(1e-35),
    "zeros and values": np.concatenate([np.zeros(32, np.float32), activations(1, 32)[0]]),
}
TINY = {
    "denormal": activations(1, 64)[0] * np.float32(1e-40),
    "denormal and zeros": np.array([1e-40, 0.0, -1e-41, 0.0] * 8, np.float32),
    "smallest": np.full(32, 1e-45, np.float32),
    "inverse overflows": activations(1, 32)[0] * np.float32(1e-37),
}


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_activations_are_quantised_as_defined(name: str) -> None:
    x = BLOCKS_OF_32[name]
    quants, scales, sums, halves_ = native_quantised(x)
    wanted_quants, wanted_scales, wanted_sums = (part[0] for part in quantised(x[None]))
    assert np.array_equal(quants, wanted_quants)
    assert scales.tobytes() == wanted_scales.tobytes()
    assert sums.tobytes() == wanted_sums.tobytes()
    assert np.array_equal(halves_, wanted_quants.reshape(-1, 16).sum(axis=1))


@pytest.mark.parametrize("name", TINY)
def test_values_too_small_to_divide_by_are_quantised_soundly(name: str) -> None:
    """127 / largest overflows here; the quants must still be sums of what they say, and the values nearly right."""
    x = TINY[name]
    quants, scales, sums, halves_ = native_quantised(x)
    assert np.array_equal(halves_, quants.reshape(-1, 16).astype(np.int32).sum(axis=1))
    assert np.array_equal(sums, scales * halves_.reshape(-1, 2).sum(axis=1).astype(np.float32))
    values = quants.astype(np.float64) * np.repeat(scales, 32)
    largest = np.abs(x.reshape(-1, 32)).max(axis=1).astype(np.float64)
    assert np.abs(values - x).max() <= largest.max()  # zeros will do


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 16, 31, 40])
def test_an_activation_that_is_no_number_makes_every_product_none(bad: float, place: int) -> None:
    x = activations(2, 256)
    x[0, place] = bad
    for kind in SOURCES:
        tensor = packed(kind, 17, 256)
        found = NativeOps().linear(torch.from_numpy(x), pack(tensor))
        assert not torch.isfinite(found[0]).any(), kind
        assert same_bits(found[1:], torch.from_numpy(product(tensor, x[1:])))
