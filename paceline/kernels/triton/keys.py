"""Keys: integers in the order of values, of equals the lowest id first, that name an id. So the greatest of what any
programs left is the pick, and no order matters."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.noise import may_win

NAN_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # a key above all others: a row with a NaN has no pick
NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below all others
_NOTHING = tl.constexpr(-0x7F800001)  # the upper half of -inf's keys
_LAST = tl.constexpr(0x7FFFFFFF)


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


@triton.jit
def leave(to, values, ids, COUNT: tl.constexpr):
    """The greatest keys, in order."""
    keys = keys_of(values, ids)
    for place in tl.static_range(COUNT):
        best = tl.max(keys, 0)
        tl.store(to + place, best)
        keys = tl.where(keys == best, NO_KEY, keys)


@triton.jit
def candidates(values, GROUPS: tl.constexpr):
    """Which of values, known roughly, may be among the GROUPS greatest: as many groups have one each that is no less
    than the least of the groups' greatest. Neighbours are of different groups, so that none is empty behind a
    vocabulary's end."""
    groups = tl.reshape(values, (values.shape[0] // GROUPS, GROUPS))
    return may_win(values, tl.min(tl.max(groups, 0), 0))


@triton.jit
def put_together(wanted, room, to, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """Where the wanted stand, no more than ROOM of them, side by side, and -1; there is nothing at `to` yet."""
    place = tl.arange(0, wanted.shape[0])
    tl.store(room + tl.cumsum(wanted.to(tl.int32), 0) - 1, place.to(tl.int64), wanted)
    seat = tl.arange(0, ROOM)
    tl.store(to + seat, tl.full([ROOM], NO_KEY, tl.int64), seat < COUNT)
    tl.debug_barrier()
    return tl.load(room + seat, seat < tl.sum(wanted.to(tl.int32), 0), -1).to(tl.int32)


@triton.jit
def leave_few(to, keys, room, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """The greatest, each where as many are greater; of those of NaNs, which are equals, the first. They are put down
    before, and compared as they are read: else a compiler has them made again by all threads that compare them."""
    seat, broken = tl.arange(0, ROOM), keys == NAN_KEY
    keys = tl.where(broken & (seat > tl.min(tl.where(broken, seat, ROOM), 0)), NO_KEY, keys)
    tl.store(room + ROOM + seat, keys)
    tl.debug_barrier()
    mine, others = tl.load(room + ROOM + seat), tl.load(room + ROOM + seat[:, None])
    rank = tl.sum((others > mine[None, :]).to(tl.int32), 0)
    tl.store(to + rank, mine, (rank < COUNT) & (mine > NO_KEY))
