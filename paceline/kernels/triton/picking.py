"""Tokens picked from logits: temperature, keyed noise, and the likeliest, of equals the lowest id.

To the bit what `sampling/noise.py` and `sampling/verify.argmax` make in tensor operations: hashing in 32-bit integers,
noise in float64 additions and multiplications that nothing may fuse. That noise takes tables and many operations, so
it is made for those tokens alone that may be picked: rough noise tells which, and is off by less than they are given
room for. A program has BLOCK neighbours of one row and leaves an integer, value before id, so that the greatest of
those is the pick and no order matters; or, where a node gets several children, BLOCK_OF_SEVERAL, and as many integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rounds import Keyed
from paceline.kernels.triton.device import INTERPRETED, PDL, begin, launching

BLOCK, WARPS = 1024, 4  # logits of a program
# The same where several of a row are wanted: whoever puts their greatest together has fewer to go through.
BLOCK_OF_SEVERAL, WARPS_OF_SEVERAL = 4096, 16
FEW = 1024  # keys of a row that one warp looks at

# Rough noise is off by 5e-5 at most, what it is added to by 5e-7 of itself. Of two that is twice as much; ten times it.
_ROOM, _SHARE = tl.constexpr(1e-3), tl.constexpr(1e-5)
_APPROXIMATE = tl.constexpr(not INTERPRETED)
CANDIDATES = 8  # times as many as are wanted: nearly always so few may be among them
_ONE = tl.constexpr(1 << 20)  # counts beside a sum of places

NAN_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # a key above all others: a row with a NaN has no pick
NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below all others
_NOTHING = tl.constexpr(-0x7F800001)  # the upper half of -inf's keys
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mix(x):
    """A 32-bit finaliser; x is uint32, which wraps."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _words(parts):
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
def _bits(words, ids):
    """32 bits of each token, from their row's words."""
    return _mix(_mix(ids.to(tl.uint32) ^ words[0]) + words[1])


@triton.jit
def _gumbel(bits, wanted, inverse, logarithm):
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
def _rough_gumbel(bits):
    """The same to within 5e-5. Where the first logarithm is of nearly 1 it is a series: the second needs it exact in
    proportion."""
    unit = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - unit
    near = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    return -_rough_log(tl.where(rest < 0.015625, near, -_rough_log(unit)))


@triton.jit
def _may_win(rough, least):
    """Which values, roughly known, may in truth be no less than what is roughly `least`; a NaN may, -inf need not."""
    near = tl.minimum(least, 3e38)  # what is about as large may be infinite or not
    near = tl.where(near > 0.0, near * (1.0 - _SHARE), near * (1.0 + _SHARE)) - _ROOM
    return (rough != -float("inf")) & ~(rough < near)


@triton.jit
def keys_of(values, ids):
    """Integers in the order of some values: theirs in the upper half, in the lower the lowest id first."""
    raw = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # -0 and 0 are equals
    upper = tl.where(raw < 0, raw ^ _LAST, raw).to(tl.int64)
    keys = (upper << 32) | (_LAST - ids.to(tl.int64))
    return tl.where(values != values, NAN_KEY, keys)


@triton.jit
def value_of(keys):
    """The values that keys were made of."""
    upper = (keys >> 32).to(tl.int32)
    return tl.where(upper < 0, upper ^ _LAST, upper).to(tl.float32, bitcast=True)


@triton.jit
def finite(greatest):
    """What values may be taken less by: where all are -inf, 0."""
    return tl.where(greatest == -float("inf"), 0.0, greatest)


@triton.jit
def _sum_up(sum_at, values):
    """The exponentials of all, added up, as shares of the greatest's. They may be known roughly: it shows in how likely
    drafts are said to be, and nowhere else."""
    tl.store(sum_at, tl.sum(tl.exp(values - finite(tl.max(values, 0))), 0))


@triton.jit
def _leave(to, values, ids, COUNT: tl.constexpr):
    """The greatest keys, in order."""
    keys = keys_of(values, ids)
    for place in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        tl.store(to + place, best)
        keys = tl.where(keys == best, NO_KEY, keys)


@triton.jit
def _candidates(values, GROUPS: tl.constexpr):
    """Which of values, known roughly, may be among the GROUPS greatest: as many groups have one each that is no less
    than the least of the groups' greatest. Neighbours are of different groups, so that none is empty behind a
    vocabulary's end."""
    groups = tl.reshape(values, (values.shape[0] // GROUPS, GROUPS))
    return _may_win(values, tl.min(tl.max(groups, 0), 0))


@triton.jit
def _put_together(wanted, room, to, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """Where the wanted stand, no more than ROOM of them, side by side, and -1; there is nothing at `to` yet."""
    place = tl.arange(0, wanted.shape[0])
    tl.store(room + tl.cumsum(wanted.to(tl.int32), 0) - 1, place.to(tl.int64), wanted)
    seat = tl.arange(0, ROOM)
    tl.store(to + seat, tl.full([ROOM], NO_KEY, tl.int64), seat < COUNT)
    tl.debug_barrier()
    return tl.load(room + seat, seat < tl.sum(wanted.to(tl.int32), 0), -1).to(tl.int32)


@triton.jit
def _leave_few(to, keys, room, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """The greatest, each where as many are greater; of those of NaNs, which are equals, the first. They are put down
    before, and compared as they are read: else a compiler has them made again by all threads that compare them."""
    seat, broken = tl.arange(0, ROOM), keys == NAN_KEY
    keys = tl.where(broken & (seat > tl.min(tl.where(broken, seat, ROOM), 0)), NO_KEY, keys)
    tl.store(room + ROOM + seat, keys)
    tl.debug_barrier()
    mine, others = tl.load(room + ROOM + seat), tl.load(room + ROOM + seat[:, None])
    rank = tl.sum((others > mine[None, :]).to(tl.int32), 0)
    tl.store(to + rank, mine, (rank < COUNT) & (mine > NO_KEY))


@triton.jit(do_not_specialize=["vocabulary", "stride"])
def _best_kernel(
    logits, keys, sums, room, vocabulary, stride, COUNT: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, logits = part * BLOCK + tl.arange(0, BLOCK), logits + row * stride
    values = tl.load(logits + ids, ids < vocabulary, -float("inf")).to(tl.float32)
    at = row * tl.num_programs(1) + part
    if sums is not None:
        _sum_up(sums + at, values)
    if COUNT == 1:
        _leave(keys + at, values, ids, COUNT)
    else:
        wanted = _candidates(values, GROUPS)
        if tl.sum(wanted.to(tl.int32), 0) <= ROOM:
            found = _put_together(wanted, room + at * 2 * ROOM, keys + at * COUNT, COUNT, ROOM)
            only = part * BLOCK + tl.maximum(found, 0)
            value = tl.load(logits + only, found >= 0, -float("inf")).to(tl.float32)
            few = tl.where(found >= 0, keys_of(value, only), NO_KEY)
            _leave_few(keys + at * COUNT, few, room + at * 2 * ROOM, COUNT, ROOM)
        else:
            _leave(keys + at * COUNT, values, ids, COUNT)


_LOOSE = ["slots", "positions", "seeds", "samples", "greedy", "temperature", "extra", "rows"]  # parts of tables


@triton.jit(
    do_not_specialize=["vocabulary", "stride", "ints", "floats", "ahead"],
    do_not_specialize_on_alignment=_LOOSE,
)
def _sample_kernel(
    logits,
    keys,
    sums,
    room,
    out,
    slots,
    positions,
    seeds,
    samples,
    greedy,
    temperature,
    extra,
    names,
    rows,
    inverse,
    logarithm,
    vocabulary,
    stride,
    ints,
    floats,
    ahead,
    weight,
    STREAM: tl.constexpr,
    NUMBERS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL, True)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row
    if rows is not None:
        at = tl.load(rows + row)
    slot = tl.load(slots + at)
    logits += row * stride
    place = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + place, place < vocabulary, -float("inf")).to(tl.float32)
    ids = place
    if names is not None:
        ids = tl.load(names + place, place < vocabulary, 0).to(tl.int32)
    heat = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        heat = tl.load(temperature + slot * floats)
    greedily = tl.load(greedy + slot * ints) != 0
    seed, sample = tl.load(seeds + slot * ints), tl.load(samples + slot * ints)
    position, stream = tl.load(positions + at) + ahead, tl.zeros_like(seed) + STREAM
    if extra is None:
        words = _words((seed, seed >> 32, sample, position, stream))
    else:
        words = _words((seed, seed >> 32, sample, position, stream, tl.load(extra + row)))
    bits = _bits(words, ids)
    if NUMBERS:
        ids = place
    to = row * tl.num_programs(1) + part
    if out is not None:
        values = tl.div_rn(values, heat)
        if not greedily:
            values += weight * _gumbel(bits, place < vocabulary, inverse, logarithm)
        tl.store(out + row * vocabulary + place, values, place < vocabulary)
    elif COUNT == 1 and sums is None:
        best = tl.full([], 0, tl.int64)
        if greedily:
            best = tl.max(keys_of(tl.div_rn(values, heat), ids), 0)
        else:
            rough = values * (1.0 / heat) + weight * _rough_gumbel(bits)
            wanted = _may_win(rough, tl.max(rough, 0))
            found = tl.sum(tl.where(wanted, tl.arange(0, BLOCK) + _ONE, 0), 0)
            if found // _ONE == 1:  # nearly always
                only = part * BLOCK + found % _ONE
                name = only
                if names is not None:
                    name = tl.load(names + only).to(tl.int32)
                value = tl.div_rn(tl.load(logits + only).to(tl.float32), heat)
                value += weight * _gumbel(_bits(words, name), True, inverse, logarithm)
                best = keys_of(value, only if NUMBERS else name)
            else:
                exact = tl.div_rn(values, heat) + weight * _gumbel(bits, wanted, inverse, logarithm)
                best = tl.max(keys_of(tl.where(wanted, exact, -float("inf")), ids), 0)
        tl.store(keys + to, best)
    else:
        values *= 1.0 / heat
        if not greedily:
            values += weight * _rough_gumbel(bits)
        if sums is not None:
            _sum_up(sums + to, values)
        wanted = _candidates(values, GROUPS)
        if tl.sum(wanted.to(tl.int32), 0) <= ROOM:
            found = _put_together(wanted, room + to * 2 * ROOM, keys + to * COUNT, COUNT, ROOM)
            only, there = part * BLOCK + tl.maximum(found, 0), found >= 0
            name = only
            if names is not None:
                name = tl.load(names + only, there, 0).to(tl.int32)
            value = tl.div_rn(tl.load(logits + only, there, -float("inf")).to(tl.float32), heat)
            if not greedily:
                value += weight * _gumbel(_bits(words, name), there, inverse, logarithm)
            few = tl.where(there, keys_of(value, only if NUMBERS else name), NO_KEY)
            _leave_few(keys + to * COUNT, few, room + to * 2 * ROOM, COUNT, ROOM)
        else:
            values = tl.div_rn(tl.load(logits + place, wanted, -float("inf")).to(tl.float32), heat)
            if not greedily:
                values += weight * tl.where(wanted, _gumbel(bits, wanted, inverse, logarithm), 0.0)
            _leave(keys + to * COUNT, values, ids, COUNT)


@triton.jit
def decided(keys, inside):
    """[..., parts] where keys lie → the ids that the greatest name; -1 where nothing is above -inf, or with a NaN."""
    return named(tl.max(tl.load(keys, inside, NO_KEY), len(keys.shape) - 1))


@triton.jit
def next_of(keys):
    """The greatest of [parts] keys, and the rest of them."""
    best = tl.max(keys, 0)
    return best, tl.where(keys == best, NO_KEY, keys)


@triton.jit
def named(key):
    """The id that a key names, or -1."""
    # No id is 2^31 - 1, which 0 would name: so much is there where whoever leaves keys was left out (`compiling`).
    there = ((key >> 32) > _NOTHING) & (key != NAN_KEY) & (key != 0)
    return tl.where(there, _LAST - (key & _LAST), -1)


@triton.jit(do_not_specialize=["parts"])
def _decide_kernel(keys, picks, parts, PARTS: tl.constexpr, PDL: tl.constexpr):
    begin(PDL, True)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    tl.store(picks + row, decided(keys + row * parts + part, part < parts))


def best(values: Tensor) -> Tensor:
    """[R, V] → [R] the likeliest; ties go to the lowest id; -1 where nothing is above -inf, or with a NaN."""
    return decide(best_keys(values))


def best_keys(values: Tensor, count: int = 1, sums: Tensor | None = None) -> Tensor:
    """[R, V] → [R, parts · count] keys, the greatest `count` of which name a row's likeliest; sums: see `sums_of`."""
    block, warps = _cut(count, sums)
    values, keys = _prepare(values, count, block)
    room, sizes = _room(keys, count, sums)
    given = (values, keys, sums, room, values.shape[1], values.stride(0))
    _best_kernel[len(keys), keys.shape[1] // count](*given, **sizes, BLOCK=block, PDL=PDL, **launching(warps))
    return keys


def _room(keys: Tensor, count: int, sums: Tensor | None) -> tuple[Tensor | None, dict[str, int]]:
    """For candidates of a row's parts and their keys, where several are wanted; and what kernels are told of that."""
    groups = triton.next_power_of_2(count)
    sizes = {"COUNT": count, "GROUPS": groups, "ROOM": CANDIDATES * groups}
    if count == 1 and sums is None:
        return None, sizes
    return torch.empty((keys.numel() // count, 2 * sizes["ROOM"]), dtype=torch.int64, device=keys.device), sizes


def _cut(count: int, sums: Tensor | None) -> tuple[int, int]:
    """Logits of a program, and its warps."""
    return (BLOCK, WARPS) if count == 1 and sums is None else (BLOCK_OF_SEVERAL, WARPS_OF_SEVERAL)


def sums_of(logits: Tensor) -> Tensor:
    """[R, parts] room for each part's exponentials, added up, as shares of its greatest value's."""
    shape = len(logits), triton.cdiv(logits.shape[1], BLOCK_OF_SEVERAL)
    return torch.empty(shape, dtype=torch.float32, device=logits.device)


def sample(logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
    """[R, V] → [R]: the same with words, temperature and noise as the slots have them, behind what is at positions."""
    return decide(sample_keys(logits, slots, positions, keyed))


def sample_keys(
    logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed, count: int = 1, sums: Tensor | None = None
) -> Tensor:
    """[R, V] → [R, parts · count] keys, the greatest of which names a row's sample, the next what would be without."""
    cut = _cut(count, sums)
    logits, keys = _prepare(logits, count, cut[0])
    _sample(logits, (keys, sums, None), slots, positions, keyed, cut)
    return keys


def perturb(logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
    """[R, V] → [R, V] float32: what `sample` takes the likeliest of."""
    logits, keys = _prepare(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _sample(logits, (keys, None, out), slots, positions, keyed, (BLOCK, WARPS))
    return out


def _sample(
    logits: Tensor,
    to: tuple[Tensor, Tensor | None, Tensor | None],
    slots: Tensor,
    positions: Tensor,
    keyed: Keyed,
    cut: tuple[int, int],
) -> None:
    """Into keys and sums, or into what they would be found in."""
    (keys, sums, out), (block, warps) = to, cut
    parts = triton.cdiv(logits.shape[1], block)
    room, sizes = _room(keys, keys.shape[1] // parts, sums)
    columns = (keyed.seeds, keyed.samples, keyed.greedy)
    strides = (keyed.seeds.stride(0), 0 if keyed.temperature is None else keyed.temperature.stride(0))
    assert all(column.stride(0) == strides[0] for column in columns), "the columns of one table"
    _sample_kernel[(len(keys), parts)](
        *(
            logits,
            keys,
            sums,
            room,
            out,
            slots,
            positions,
            *columns,
            keyed.temperature,
            keyed.extra,
            keyed.ids,
            keyed.rows,
        ),
        *(*keyed.tables, logits.shape[1], logits.stride(0), *strides, keyed.ahead, keyed.weight),
        STREAM=keyed.stream,
        NUMBERS=keyed.numbers,
        **sizes,
        BLOCK=block,
        PDL=PDL,
        **launching(warps),
    )


def _prepare(logits: Tensor, count: int = 1, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Rows whose neighbours lie together, and room for their keys, [R, parts · count]."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    keys = triton.cdiv(logits.shape[1], block) * count
    return logits, torch.empty((len(logits), keys), dtype=torch.int64, device=logits.device)


def decide(keys: Tensor) -> Tensor:
    """[R, parts] keys → [R] what they name."""
    picks = torch.empty(len(keys), dtype=torch.int64, device=keys.device)
    parts = keys.shape[1]
    warps = 1 if parts <= FEW else 4
    _decide_kernel[(len(keys),)](keys, picks, parts, PARTS=triton.next_power_of_2(parts), PDL=PDL, **launching(warps))
    return picks
