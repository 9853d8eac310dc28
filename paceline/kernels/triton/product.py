"""The matrix product's kernel: one float32 sum for each value, over k in ascending order, whatever the tile.

So a row's bits depend on the row and the weight alone. What comes behind the product (bias, gate, residual, the best of
a row) is done on the way, in float32, and rounded once. Of an rms norm in front, rows are multiplied by its weight
beforehand, and the sum by the row's factor. Who makes rows that a norm comes behind leaves both: rows times the weight,
and sums of squares, of which the next product makes the factor; or `fold` does, a kernel of its own.

A weight's values of 8 bits are widened to those of x, which loses nothing, and the sum is multiplied by the scale of
the weight's row; the order in which a step's values are added is then the tile's own, which is a drafter's affair and
changes no text.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.arithmetic import activate, factor_of, row_factor, sum_groups
from paceline.kernels.triton.device import begin, prefetch
from paceline.kernels.triton.keys import NAN_KEY, keys_of

PLAIN, FACTORS, SQUARES = 0, 1, 2  # no norm; its factors are given, or sums of squares


@triton.jit
def dot(a, b, total, WIDEN: tl.constexpr):
    """The interpreter knows no product of bfloat16: there both are widened, which loses nothing."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def widen(values, like, PAIRS: tl.constexpr, WIDEN: tl.constexpr):
    """Values of 8 bits in the type of `like`. PAIRS: each thread has them two by two, else four by four.

    A byte is put under a large exponent, where it counts ones, and what it counts from is taken off. The compiler's own
    way is this one for fours in bfloat16; pairs it would take apart, and it has none for float16.
    """
    if values.dtype != tl.int8:
        return values
    if WIDEN:
        return values.to(tl.float32)
    if PAIRS and like.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 u, v; prmt.b32 u, $1, 0x43434343, 0x4140; and.b32 v, u, 0xff80ff80; and.b32 u, u, 0xff7fff7f;"
            " sub.bf16x2 $0, u, v;}",
            "=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    if PAIRS and like.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 u, v; xor.b32 u, $1, 0x80808080; prmt.b32 u, u, 0x64646464, 0x4140; mov.b32 v, 0x64806480;"
            " sub.f16x2 $0, u, v;}",
            "=r,r", [values], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    if like.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{.reg .b32 u, v, w; xor.b32 u, $2, 0x80808080; prmt.b32 w, u, 0x64646464, 0x4342;"
            " prmt.b32 u, u, 0x64646464, 0x4140; mov.b32 v, 0x64806480; sub.f16x2 $0, u, v; sub.f16x2 $1, w, v;}",
            "=r,=r,r", [values], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return values.to(like.dtype)


@triton.jit
def place(number, T, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Where a tile is: programs that run together share GROUP tiles of rows, so that weights are read once."""
    tall, wide = tl.cdiv(T, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = number // (GROUP * wide)
    height = tl.minimum(tall - group * GROUP, GROUP)
    within = number % (GROUP * wide)
    return group * GROUP + within % height, within // height


@triton.jit
def prefetch_rows(w, row_numbers, stride, K, LINES: tl.constexpr):
    """The first lines of some of the weight's rows: no kernel writes them."""
    at = tl.arange(0, LINES) * (1024 // w.dtype.element_ty.primitive_bitwidth)  # values in a line
    prefetch(w + row_numbers[:, None] * stride + tl.minimum(at, K - 1)[None, :])


@triton.jit
def leave_best(keys, acc, cols, N, number, blocks, rows, T):
    """A block's greatest key of each row (`keys.keys_of`): of the lowest id that has its largest value."""
    inside, number_like = (cols < N)[None, :], acc == acc
    wrong = tl.max(tl.where(inside & ~number_like, 1, 0), axis=1)
    seen = tl.where(inside & number_like, acc, float("-inf"))
    best = tl.max(seen, axis=1)
    winner = tl.min(tl.where((seen == best[:, None]) & inside, cols[None, :], 2147483647), axis=1)
    key = tl.where(wrong > 0, NAN_KEY, keys_of(best, winner))
    tl.store(keys + rows.to(tl.int64) * blocks + number, key, mask=rows < T)


@triton.jit
def leave_norm(made, by, rows, cols, tile_col, scaled, squares, T, N, GROUP: tl.constexpr):
    """For the norm behind: a tile's rounded values times its weight, and the sums of GROUP neighbours' squares."""
    GROUPS: tl.constexpr = made.shape[1] // GROUP
    wide, inside, by = made.to(tl.float32), cols < N, by[None, :]
    at, there = rows.to(tl.int64), rows < T
    mask = there[:, None] & inside[None, :]
    tl.store(scaled + at[:, None] * N + cols[None, :], (wide * by).to(made.dtype), mask=mask)
    sums = sum_groups(tl.where(inside[None, :], wide * wide, 0.0), made.shape[0], made.shape[1], GROUP)
    group = tile_col * GROUPS + tl.arange(0, GROUPS)
    mask = there[:, None] & (group * GROUP < N)[None, :]
    tl.store(squares + at[:, None] * 128 + group[None, :], sums, mask=mask)


@triton.jit
def read_squares(squares, rows, T, SUMS: tl.constexpr):
    """[rows, 128] what `leave_norm` left: so many sums of each row, and zeros."""
    lanes = tl.arange(0, 128)
    at = rows.to(tl.int64)[:, None] * 128 + lanes[None, :]
    return tl.load(squares + at, mask=(rows < T)[:, None] & (lanes < SUMS)[None, :], other=0.0)


@triton.jit
def read_columns(scales, bias, left_scale, cols, N, GATE: tl.constexpr):
    """What meets a tile's columns in the end, and no kernel writes: scales and biases, with a gate of both halves, and
    the weight of the norm behind."""
    inside = cols < N
    scale, up_scale, offset, up_offset, by = 1.0, 1.0, 0.0, 0.0, 1.0
    if scales is not None:
        scale = tl.load(scales + cols, mask=inside, other=0.0)
        if GATE != "":
            up_scale = tl.load(scales + N + cols, mask=inside, other=0.0)
    if bias is not None:
        offset = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
        if GATE != "":
            up_offset = tl.load(bias + N + cols, mask=inside, other=0.0).to(tl.float32)
    if left_scale is not None:
        by = tl.load(left_scale + cols, mask=inside, other=0.0).to(tl.float32)
    return scale, up_scale, offset, up_offset, by


@triton.jit
def read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM: tl.constexpr, SUMS: tl.constexpr):
    """What meets a tile's rows in the end: the norm's factors, or what they are made of, and what is added."""
    there = rows < T
    normed, added = 1.0, 0.0
    if NORM == 1:
        normed = tl.load(factors + rows, mask=there, other=0.0)
    elif NORM == 2:
        normed = read_squares(factors, rows, T, SUMS)
    if residual is not None:
        at = rows.to(tl.int64)[:, None] * residual_stride + cols[None, :]
        added = tl.load(residual + at, mask=there[:, None] & (cols < N)[None, :], other=0.0)
    return normed, added


@triton.jit
def finish(
    acc, up, of_columns, of_rows, rows, cols, tile_col, out, scales, bias, residual, best, left, T, N, share, eps,
    NORM: tl.constexpr, GATE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What is done to a tile's sums, in float32, before they are rounded and stored. left: rows and squares, see
    `leave_norm`."""
    scale, up_scale, offset, up_offset, by = of_columns
    normed, added = of_rows
    if scales is not None:
        acc *= scale[None, :]
        if GATE != "":
            up *= up_scale[None, :]
    if NORM != 0:
        factor = normed
        if NORM == 2:
            factor = factor_of(normed, share, eps, acc.shape[0])
        acc *= factor[:, None]
        up *= factor[:, None]
    if bias is not None:
        acc += offset[None, :]
        if GATE != "":
            up += up_offset[None, :]
    if GATE != "":
        acc = activate(acc, GATE) * up
    if residual is not None:
        acc += added.to(tl.float32)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    made = acc.to(out.dtype.element_ty)
    tl.store(out + at, made, mask=(rows < T)[:, None] & (cols < N)[None, :])
    if GROUP > 0:
        leave_norm(made, by, rows, cols, tile_col, left[0], left[1], T, N, GROUP)
    if best is not None:
        leave_best(best, acc, cols, N, tile_col, tl.cdiv(N, cols.shape[0]), rows, T)


@triton.jit(do_not_specialize=["T"])
def product(
    x,  # [T, K]
    w,  # [N, K]; with a gate [2N, K]
    out,  # [T, N]
    scales,  # [N] float32 of a weight of 8 bits; with a gate [2N]
    bias,
    residual,  # [T, N]
    lines,  # nothing: see `product_of_boxes`
    factors,  # [T] float32, or sums of squares [T, 128]
    best,  # [T, blocks] keys
    left_scale,  # [N] the weight of the norm behind
    left_rows,  # [T, N]
    left_squares,  # [T, 128] float32
    T,
    N,
    K,
    x_stride,
    w_stride,
    residual_stride,
    share,  # 1 / K
    eps,
    EVEN: tl.constexpr,  # K is a multiple of BLOCK_K
    ONCE: tl.constexpr,  # one tile has all rows: no other program reads these weights
    STEPS: tl.constexpr,  # of the sum, where they are known beforehand, else 0
    NORM: tl.constexpr,
    GATE: tl.constexpr,  # an activation's name or ""
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,  # of squares, of each row of x
    LEFT: tl.constexpr,  # neighbours whose squares are added for the norm behind; 0: there is none
    AHEAD: tl.constexpr,  # lines of each weight row asked for before the kernel waits
    AT_ONCE: tl.constexpr,  # what meets the sums in the end is on its way while they are made
    PDL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile_row, tile_col = place(tl.program_id(0), T, N, BLOCK_M, BLOCK_N, GROUP)
    rows, cols = tile_row * BLOCK_M + tl.arange(0, BLOCK_M), tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    there = (rows < T)[:, None]
    # Columns beyond the last read the last one again; nothing is stored for them.
    weight_rows = tl.minimum(cols, N - 1).to(tl.int64)
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    w_at = w + weight_rows[None, :] * w_stride + lanes[:, None]
    up_at = w_at
    if GATE != "":
        up_at += N.to(tl.int64) * w_stride
    if PDL and AHEAD > 0:
        prefetch_rows(w, weight_rows, w_stride, K, AHEAD)
        if GATE != "":
            prefetch_rows(w, weight_rows + N, w_stride, K, AHEAD)
    if AT_ONCE:
        of_columns = read_columns(scales, bias, left_scale, cols, N, GATE)
    begin(PDL)

    if AT_ONCE:
        of_rows = read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM, SUMS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    WEIGHTS: tl.constexpr = "evict_first" if ONCE else ""
    for step in range(STEPS if STEPS > 0 else tl.cdiv(K, BLOCK_K)):
        if EVEN:
            a = tl.load(x_at, mask=there, other=0.0, eviction_policy="evict_last")
            b = tl.load(w_at, eviction_policy=WEIGHTS)
        else:
            inside = step * BLOCK_K + lanes < K
            a = tl.load(x_at, mask=there & inside[None, :], other=0.0, eviction_policy="evict_last")
            b = tl.load(w_at, mask=inside[:, None], other=0.0, eviction_policy=WEIGHTS)
        acc = dot(a, widen(b, a, False, WIDEN), acc, WIDEN)
        if GATE != "":
            if EVEN:
                c = tl.load(up_at, eviction_policy=WEIGHTS)
            else:
                c = tl.load(up_at, mask=inside[:, None], other=0.0, eviction_policy=WEIGHTS)
            up = dot(a, widen(c, a, False, WIDEN), up, WIDEN)
            up_at += BLOCK_K
        x_at += BLOCK_K
        w_at += BLOCK_K

    if not AT_ONCE:
        of_columns = read_columns(scales, bias, left_scale, cols, N, GATE)
        of_rows = read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM, SUMS)
    finish(
        acc, up, of_columns, of_rows, rows, cols, tile_col, out, scales, bias, residual, best,
        (left_rows, left_squares), T, N, share, eps, NORM, GATE, LEFT,
    )  # fmt: skip


@triton.jit
def tile_of_boxes(
    number, of_columns, x, w, out, scales, bias, residual, factors, best, left_scale, left, T, N, K, residual_stride,
    share, eps, STEPS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, WIDEN: tl.constexpr, TURNED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One tile from its first box to what is stored. AT_ONCE: what meets its sums in the end is on its way meanwhile,
    what meets its columns since before."""
    tile_row, tile_col = place(number, T, N, BLOCK_M, BLOCK_N, GROUP)
    rows, cols = tile_row * BLOCK_M + tl.arange(0, BLOCK_M), tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    if AT_ONCE:
        of_rows = read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM, SUMS)
    HIGH: tl.constexpr = BLOCK_N if TURNED else BLOCK_M
    WIDE: tl.constexpr = BLOCK_M if TURNED else BLOCK_N
    acc = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    up = tl.zeros((HIGH, WIDE), dtype=tl.float32)
    # Beyond an edge a box holds zeros.
    for step in range(STEPS if STEPS > 0 else tl.cdiv(K, BLOCK_K)):
        a = x.load([tile_row * BLOCK_M, step * BLOCK_K])
        b = w.load([tile_col * BLOCK_N, step * BLOCK_K])
        b = widen(b, a, True, WIDEN)
        acc = dot(b, a.T, acc, WIDEN) if TURNED else dot(a, b.T, acc, WIDEN)
        if GATE != "":
            c = w.load([N + tile_col * BLOCK_N, step * BLOCK_K])
            c = widen(c, a, True, WIDEN)
            up = dot(c, a.T, up, WIDEN) if TURNED else dot(a, c.T, up, WIDEN)
    if TURNED:
        acc, up = acc.T, up.T
    if not AT_ONCE:
        of_columns = read_columns(scales, bias, left_scale, cols, N, GATE)
        of_rows = read_rows(factors, residual, rows, cols, T, N, residual_stride, NORM, SUMS)
    finish(
        acc, up, of_columns, of_rows, rows, cols, tile_col, out, scales, bias, residual, best, left, T, N, share, eps,
        NORM, GATE, LEFT,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def product_of_boxes(
    x,  # [T, K] a descriptor of boxes [BLOCK_M, BLOCK_K]
    w,  # [N, K], with a gate [2N, K]: of boxes [BLOCK_N, BLOCK_K]
    out, scales, bias, residual,
    lines,  # the weight itself: a descriptor asks for nothing ahead
    factors, best, left_scale, left_rows, left_squares,
    T, N, K, x_stride, w_stride, residual_stride, share, eps,
    EVEN: tl.constexpr, ONCE: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SUMS: tl.constexpr,
    LEFT: tl.constexpr, AHEAD: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr, WIDEN: tl.constexpr,
    TURNED: tl.constexpr,  # sums are [BLOCK_N, BLOCK_M]: few rows are a tensor core's columns, which may be 8 or 16
    LASTING: tl.constexpr,  # there are so many programs, and each takes tile after tile; 0: a program for each
):  # fmt: skip
    """`product` where the device copies whole boxes by itself (TMA)."""
    first, left = tl.program_id(0), (left_rows, left_squares)
    _, tile_col = place(first, T, N, BLOCK_M, BLOCK_N, GROUP)
    cols = tile_col * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL and AHEAD > 0:
        weight_rows = tl.minimum(cols, N - 1).to(tl.int64)
        prefetch_rows(lines, weight_rows, w_stride, K, AHEAD)
        if GATE != "":
            prefetch_rows(lines, weight_rows + N, w_stride, K, AHEAD)
    of_columns = None
    if AT_ONCE:
        of_columns = read_columns(scales, bias, left_scale, cols, N, GATE)
    begin(PDL)
    if LASTING == 0:
        tile_of_boxes(
            first, of_columns, x, w, out, scales, bias, residual, factors, best, left_scale, left, T, N, K,
            residual_stride, share, eps,
            STEPS, NORM, GATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, SUMS, LEFT, WIDEN, TURNED, AT_ONCE,
        )  # fmt: skip
    else:
        # In one flat loop: the next tile's boxes are on their way while one is finished. What else meets its sums is
        # read then: on its way with the boxes it would be held once for each step that is.
        tiles = tl.cdiv(T, BLOCK_M) * tl.cdiv(N, BLOCK_N)
        for number in tl.range(first, tiles, LASTING, flatten=True):
            tile_of_boxes(
                number, of_columns, x, w, out, scales, bias, residual, factors, best, left_scale, left, T, N, K,
                residual_stride, share, eps,
                STEPS, NORM, GATE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, SUMS, LEFT, WIDEN, TURNED, False,
            )  # fmt: skip


@triton.jit
def fold(
    x, picked, kept, scale, scaled, factors, x_stride, eps, K: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """What whoever makes rows leaves for the norm behind them, of rows that are there; picked: of these, which are
    copied if they are to be kept.

    Programs of the product that follows start at once: while this one waits and works they ask for their weights.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDE)
    by = tl.load(scale + columns, mask=columns < K, other=0.0)
    begin(PDL, True)
    at = row
    if picked is not None:
        at = tl.load(picked + row)
    values = tl.load(x + at * x_stride + columns, mask=columns < K, other=0.0)
    if kept is not None:
        tl.store(kept + row * K + columns, values, mask=columns < K)
    tl.store(factors + row + tl.arange(0, 1), row_factor(x + at * x_stride, eps, K, WIDE))
    made = (values.to(tl.float32) * by.to(tl.float32)).to(scaled.dtype.element_ty)
    tl.store(scaled + row * K + columns, made, mask=columns < K)
