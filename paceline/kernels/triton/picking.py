"""Tokens picked from logits: temperature, keyed noise, and the likeliest, of equals the lowest id.

To the bit what `sampling/noise.py` and `sampling/verify.argmax` make in tensor operations. Exact noise is made for
those tokens alone that may be picked: rough noise tells which. A program has BLOCK neighbours of one row, of many rows
LARGE_BLOCK, and leaves a key; or, where a node gets several children, as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.rounds import Keyed
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.keys import (
    NO_KEY,
    candidates,
    decided,
    finite,
    keys_of,
    leave,
    leave_few,
    put_together,
)
from paceline.kernels.triton.noise import ask_for_tables, bits_of, gumbel, may_win, rough_gumbel, words_of

BLOCK, WARPS = 1024, 4  # logits of a program
# The same where programs would be more than so many, two to a processor: all have room at once then, and so has what is
# launched behind them. Where several of a row are wanted, as many threads have the fewer candidates together.
LARGE_BLOCK, LARGE_WARPS, BESIDE = 4096, 16, 264
FEW = 1024  # keys of a row that one warp looks at
NEIGHBOURS = tl.constexpr(256)  # among which noise is made exactly, if one of them may win
CANDIDATES = 8  # times as many as are wanted: nearly always so few may be among them


@triton.jit
def _sum_up(sum_at, values):
    """The exponentials of all, added up, as shares of the greatest's. They may be known roughly, and otherwise where
    parts are others: it shows in the last bits of how likely drafts are said to be, and nowhere else."""
    tl.store(sum_at, tl.sum(tl.exp(values - finite(tl.max(values, 0))), 0))


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
        leave(keys + at, values, ids, COUNT)
    else:
        wanted = candidates(values, GROUPS)
        if tl.sum(wanted.to(tl.int32), 0) <= ROOM:
            found = put_together(wanted, room + at * 2 * ROOM, keys + at * COUNT, COUNT, ROOM)
            only = part * BLOCK + tl.maximum(found, 0)
            value = tl.load(logits + only, found >= 0, -float("inf")).to(tl.float32)
            few = tl.where(found >= 0, keys_of(value, only), NO_KEY)
            leave_few(keys + at * COUNT, few, room + at * 2 * ROOM, COUNT, ROOM)
        else:
            leave(keys + at * COUNT, values, ids, COUNT)


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
    OLD: tl.constexpr,
    NUMBERS: tl.constexpr,
    COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        ask_for_tables(inverse, logarithm, row * tl.num_programs(1) + part)
    # Who picks, if that is older than the logits' product, is read before that has ended (see `device.py`), and rough
    # noise made meanwhile.
    CACHE: tl.constexpr = ".cg" if OLD else ""
    if not OLD:
        begin(PDL, True)
    at = row
    if rows is not None:
        at = tl.load(rows + row, cache_modifier=CACHE)
    slot = tl.load(slots + at, cache_modifier=CACHE)
    heat = tl.full([], 1.0, tl.float32)
    if temperature is not None:
        heat = tl.load(temperature + slot * floats, cache_modifier=CACHE)
    greedily = tl.load(greedy + slot * ints, cache_modifier=CACHE) != 0
    seed = tl.load(seeds + slot * ints, cache_modifier=CACHE)
    sample = tl.load(samples + slot * ints, cache_modifier=CACHE)
    position = tl.load(positions + at, cache_modifier=CACHE) + ahead
    stream = tl.zeros_like(seed) + STREAM
    if extra is None:
        words = words_of((seed, seed >> 32, sample, position, stream))
    else:
        words = words_of((seed, seed >> 32, sample, position, stream, tl.load(extra + row, cache_modifier=CACHE)))
    place = part * BLOCK + tl.arange(0, BLOCK)
    ids = place
    if names is not None:  # no kernel writes them
        ids = tl.load(names + place, place < vocabulary, 0).to(tl.int32)
    bits, noise = bits_of(words, ids), tl.zeros([BLOCK], tl.float32)
    if out is None:  # noqa: SIM102 (known when it is compiled; the next is not)
        if not greedily:
            noise = weight * rough_gumbel(bits)
    if OLD:
        begin(PDL, True)
    logits += row * stride
    values = tl.load(logits + place, place < vocabulary, -float("inf")).to(tl.float32)
    if NUMBERS:
        ids = place
    to = row * tl.num_programs(1) + part
    if out is not None:
        values = tl.div_rn(values, heat)
        if not greedily:
            values += weight * gumbel(bits, place < vocabulary, inverse, logarithm)
        tl.store(out + row * vocabulary + place, values, place < vocabulary)
    elif COUNT == 1 and sums is None:
        best = tl.full([], NO_KEY, tl.int64)
        if greedily:
            best = tl.max(keys_of(tl.div_rn(values, heat), ids), 0)
        else:
            rough = values * (1.0 / heat) + noise
            top, lane = tl.max(rough, 0), tl.arange(0, BLOCK)
            wanted = may_win(rough, top)
            one = tl.min(tl.where(wanted, lane, BLOCK), 0)
            while one < BLOCK:  # nearly always once: with the neighbours of one that may win, made anew
                first = one // NEIGHBOURS * NEIGHBOURS
                only = part * BLOCK + first + tl.arange(0, NEIGHBOURS)
                name = only
                if names is not None:
                    name = tl.load(names + only, only < vocabulary, 0).to(tl.int32)
                value = tl.load(logits + only, only < vocabulary, -float("inf")).to(tl.float32)
                drawn = bits_of(words, name)
                rivals = may_win(value * (1.0 / heat) + weight * rough_gumbel(drawn), top)
                exact = tl.div_rn(value, heat) + weight * gumbel(drawn, rivals, inverse, logarithm)
                found = keys_of(tl.where(rivals, exact, -float("inf")), only if NUMBERS else name)
                best = tl.maximum(best, tl.max(found, 0))
                one = tl.min(tl.where(wanted & (lane >= first + NEIGHBOURS), lane, BLOCK), 0)
        tl.store(keys + to, best)
    else:
        values = values * (1.0 / heat) + noise
        if sums is not None:
            _sum_up(sums + to, values)
        wanted = candidates(values, GROUPS)
        if tl.sum(wanted.to(tl.int32), 0) <= ROOM:
            found = put_together(wanted, room + to * 2 * ROOM, keys + to * COUNT, COUNT, ROOM)
            only, there = part * BLOCK + tl.maximum(found, 0), found >= 0
            name = only
            if names is not None:
                name = tl.load(names + only, there, 0).to(tl.int32)
            value = tl.div_rn(tl.load(logits + only, there, -float("inf")).to(tl.float32), heat)
            if not greedily:
                value += weight * gumbel(bits_of(words, name), there, inverse, logarithm)
            few = tl.where(there, keys_of(value, only if NUMBERS else name), NO_KEY)
            leave_few(keys + to * COUNT, few, room + to * 2 * ROOM, COUNT, ROOM)
        else:
            values = tl.div_rn(tl.load(logits + place, wanted, -float("inf")).to(tl.float32), heat)
            if not greedily:
                values += weight * tl.where(wanted, gumbel(bits, wanted, inverse, logarithm), 0.0)
            leave(keys + to * COUNT, values, ids, COUNT)


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
    block, warps = _cut(values, count > 1 or sums is not None)
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


def _cut(logits: Tensor, several: bool) -> tuple[int, int]:
    """Logits of a program, and its warps."""
    if len(logits) * triton.cdiv(logits.shape[1], BLOCK) <= BESIDE:
        return BLOCK, WARPS
    return LARGE_BLOCK, LARGE_WARPS if several else WARPS


def sums_of(logits: Tensor) -> Tensor:
    """[R, parts] room for each part's exponentials, added up, as shares of its greatest value's."""
    shape = len(logits), triton.cdiv(logits.shape[1], _cut(logits, True)[0])
    return torch.empty(shape, dtype=torch.float32, device=logits.device)


def sample(logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
    """[R, V] → [R]: the same with words, temperature and noise as the slots have them, behind what is at positions."""
    return decide(sample_keys(logits, slots, positions, keyed))


def sample_keys(
    logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed, count: int = 1, sums: Tensor | None = None
) -> Tensor:
    """[R, V] → [R, parts · count] keys, the greatest of which names a row's sample, the next what would be without."""
    cut = _cut(logits, count > 1 or sums is not None)
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
        OLD=PDL and keyed.old,
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
