"""Attention's device code. One arithmetic for every row, whatever is computed with it:

Positions are cut into blocks, and blocks into chunks, at absolute positions: small chunks below an edge, so that short
texts fill the chip, larger ones behind it, so that long texts are not mostly merging. A chunk begins afresh (m = -inf,
total and acc 0); its blocks follow in ascending order: m is the largest score so far, p = 2^(score - m) rounded to the
queries' dtype, total and acc are chained products of p with ones and with the values, scaled by 2^(old m - m) before
each block. Chunks are merged in ascending order (`merge`), by whichever program comes last where several share them.
Sums are left to `tl.dot`, which chains over k in ascending order in tiles of every size: `tl.sum` follows the layout. A
position that a row does not see adds an exact zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.kernels.triton.chunks import chunks_below, first_block, items, nth, one_kind
from paceline.kernels.triton.device import begin
from paceline.kernels.triton.merging import gather, leave, merge, turn, write
from paceline.kernels.triton.scoring import bend, queries, rise, score, soften
from paceline.kernels.triton.seeing import (
    ask,
    bounds,
    fetch,
    members,
    own_rows,
    row_of,
    rows_seen_by,
    whereabouts,
    within,
)

COLUMNS = tl.constexpr(8)  # of ones, all of which hold the same sum: the narrowest product, and waits for no wider one
NOWHERE = tl.constexpr(1 << 30)  # behind every position
ADDED = tl.constexpr(16)  # products that a tensor core adds at a time
LEAST = tl.constexpr(16)  # pairs of a program at least: a tensor core's rows


@triton.jit
def own_edge(nodes_at, block, BLOCK: tl.constexpr, FEW_OWN: tl.constexpr):
    """From which position of a block on rows look at keys of their own: where a tensor core's sum ends, so that all
    sums are those of the block looked at as a whole."""
    edge = tl.maximum(nodes_at // ADDED * ADDED, block * BLOCK)
    return tl.minimum(edge, block * BLOCK + BLOCK - FEW_OWN)


@triton.jit
def wait_for_all(first, PDL: tl.constexpr):
    """Programs with nothing to do leave their place to others. The first waits all the same: the next kernel waits for
    this one alone, and so for all that came before."""
    if first:
        begin(PDL)


# Read value by value, and parts of larger tensors: one kernel serves them wherever they begin.
_LOOSE = ["slots", "ends", "firsts", "bases", "path", "table", "tile_first", "tile_count"]


@triton.jit(
    do_not_specialize=["subs", "splits", "chunks", "tile_rows", "depth", "path_stride", "table_stride"],
    do_not_specialize_on_alignment=_LOOSE,
)
def look(
    q_at, k_at, v_at, out_at, partial, stats, arrivals,
    slots, ends, firsts, bases, path, table, tile_first, tile_count,
    q_stride, k_stride, k_head, v_stride, v_head, table_stride, path_stride, depth,
    factor, inner, subs, splits, chunks, tile_rows,
    HEADS: tl.constexpr, GROUP: tl.constexpr, MAIN_AT: tl.constexpr, MAIN: tl.constexpr, TAIL_AT: tl.constexpr,
    TAIL: tl.constexpr, WIDE: tl.constexpr, MAIN_PAD: tl.constexpr, TAIL_PAD: tl.constexpr, WIDE_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr, EDGE: tl.constexpr, FAR: tl.constexpr,
    M: tl.constexpr, FEW: tl.constexpr, AHEAD: tl.constexpr, DEEP: tl.constexpr,
    END: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
    OWN: tl.constexpr,  # rows of a program whose chunks with keys of their own have programs of their own; 0: none
    ABREAST: tl.constexpr,  # rows of a program, a power of two, whose own keys stand side by side; 0: in turn
    FEW_OWN: tl.constexpr,  # positions in a block at which a row may have keys of its own, then
    SPLIT: tl.constexpr,  # chunks are left for another program, unless they are few; else merged here
    SINGLE: tl.constexpr,  # so many chunks are few: one program has them sooner than several; 0: it does not
    LATENT: tl.constexpr, SMALL: tl.constexpr,
    OLD: tl.constexpr,  # what rows see was written before the last product: it is read before the last kernel ends
    FETCHED: tl.constexpr,  # positions whose keys and values are asked for meanwhile
    PDL: tl.constexpr,
):  # fmt: skip
    """A program: M neighbours among a tile's (row, query head) pairs of one kv head, against a share of the chunks.

    In a tree rows share the chunks in front of the first node. With OWN the others are looked at by programs of one
    row each (`alone`), which have the same pairs and keep that row's; otherwise by this one: what comes before the
    nodes for all rows, and behind it all rows' own keys in one product, of which each keeps its own (ABREAST; what is
    no number reaches all of them, as in a chain); or row after row.
    """
    if not OLD:
        begin(PDL)
    head, split = tl.program_id(1), tl.program_id(2)
    programs = subs * (splits + OWN if OWN > 0 else 1)  # of a tile and head, of the same split where nodes have none
    tile, number = tl.program_id(0) // programs, tl.program_id(0) % programs
    CACHE: tl.constexpr = ".cg" if OLD else ""  # a processor's own cache is up to date only once it has waited
    count = tl.load(tile_count + tile, cache_modifier=CACHE)
    first = tl.load(tile_first + tile, cache_modifier=CACHE)
    sub, alone = number, False
    if OWN > 0:
        alone, split = number >= subs * splits, number % splits
        lone_row = number - subs * splits
        sub = tl.where(alone, lone_row // OWN, number // splits)
        row_begin = sub // ((GROUP + M - 1) // M) * OWN
        lone_row = row_begin + tl.where(alone, lone_row % OWN, 0)
        idle = lone_row >= count
        split = tl.where(alone, 0, split)
    elif ABREAST > 0:
        row_begin = sub // ((GROUP + M - 1) // M) * ABREAST
        idle = row_begin >= count
    else:
        row_begin = sub * M // GROUP
        idle = sub * M >= count * GROUP
    first_of_all = (tl.program_id(0) == 0) & (head == 0) & (tl.program_id(2) == 0)
    if idle:
        if OLD:
            wait_for_all(first_of_all, PDL)
        return
    ROWS: tl.constexpr = OWN + ABREAST  # whole ones that a program has; one of them is 0
    row, part, ok = members(sub, tl.arange(0, M), count, GROUP, M, ROWS)
    t = first + row
    of = head * GROUP + part  # the query head
    at = t * HEADS + of
    left = tl.where(tile_rows > 0, tile * tile_rows, first)  # where the tile's partial results lie
    left_at = (left + row) * HEADS + of
    lowest, last = bounds(ends, firsts, t, ok, END, FIRST, WINDOW, OLD)
    slot = tl.load(slots + t, mask=ok, other=NOWHERE, cache_modifier=CACHE)
    owner = tl.min(slot)  # nobody's rows, whose slot is the last, stand at position 0: no program looks there for them
    hi = tl.maximum(tl.max(last), -1)
    lo = tl.minimum(tl.min(tl.where(slot == owner, lowest, NOWHERE)), tl.maximum(hi, 0))  # or it sees nothing
    inner_lo, inner_hi = tl.max(tl.where(ok, lowest, 0)), tl.min(tl.where(ok, last, NOWHERE))
    end = (hi + BLOCK) // BLOCK  # of the blocks that some row sees
    shared = end  # of the blocks whose keys lie at the same places for all rows
    lowest_chunk, end_chunk = chunks_below(lo // BLOCK + 1, PER, EDGE, FAR) - 1, chunks_below(end, PER, EDGE, FAR)
    own_chunk = end_chunk  # the first that programs of one row look at
    if TREE:
        base = tl.load(bases + t, mask=ok, other=NOWHERE, cache_modifier=CACHE).to(tl.int32)
        shared = tl.minimum(end, tl.min(tl.where(last >= base, base, NOWHERE)) // BLOCK)
        if OWN > 0:
            found = tl.maximum(chunks_below(shared + 1, PER, EDGE, FAR) - 1, lowest_chunk)
            own_chunk = tl.where(shared < end, found, end_chunk)
            shared = tl.minimum(end, first_block(own_chunk, PER, EDGE, FAR))
    num_chunks = tl.maximum(own_chunk - lowest_chunk, 1)
    busy = tl.minimum(splits, num_chunks)  # programs that share them
    if SINGLE > 0:
        busy = tl.where(num_chunks <= SINGLE, 1, busy)
    own_busy = tl.minimum(1, end_chunk - own_chunk)  # and of each row
    chunk0, sharing, mine = lowest_chunk, busy, ok
    if OWN > 0:
        chunk0, sharing = tl.where(alone, own_chunk, lowest_chunk), tl.where(alone, own_busy, busy)
        mine = ok & ((row == lone_row) | (number < subs * splits))
    if split >= sharing:  # never the first of all: it has the first part of what is shared, and so waits further down
        return
    chunk0 += split  # and every `sharing`-th behind it
    if SPLIT and OWN == 0 and WINDOW == 0:
        chunk0, sharing, end = one_kind(
            chunk0, sharing, end, split, lowest_chunk, end_chunk - lowest_chunk, busy, PER, EDGE, FAR
        )
        shared = tl.minimum(shared, end)
    table += owner * table_stride
    k_at += head.to(tl.int64) * k_head
    v_at += head.to(tl.int64) * v_head
    # This program's blocks are items; those that are shared come first.
    far0 = chunk0 + (tl.maximum(EDGE // PER - chunk0, 0) + sharing - 1) // sharing * sharing
    skipped = tl.maximum(lo // BLOCK - first_block(chunk0, PER, EDGE, FAR), 0)
    num_shared = items(shared, chunk0, far0, sharing, PER, EDGE, FAR)
    num_items = items(end, chunk0, far0, sharing, PER, EDGE, FAR)
    if OWN > 0:
        num_items = tl.where(alone, num_items, num_shared)
    n = tl.arange(0, BLOCK)
    block, _, _ = nth(skipped, chunk0, far0, sharing, PER, EDGE, FAR)
    page = tl.load(table + within(block * BLOCK + n, lo, hi) // PAGE, cache_modifier=CACHE)
    if OWN > 0:
        lone = first + lone_row
        lone_lowest, lone_last = bounds(ends, firsts, lone, alone, END, FIRST, WINDOW, OLD)
        lone_base = tl.load(bases + lone, cache_modifier=CACHE).to(tl.int32)
        own_at, there = own_rows(
            path, table, lone, lone_lowest, lone_last, lone_base, block * BLOCK + n, depth, path_stride,
            PAGE, SMALL, OLD,
        )  # fmt: skip
    elif ABREAST > 0:
        first_own = tl.maximum(skipped, num_shared)
        nodes_at = tl.min(tl.where(last >= base, base, NOWHERE))
        c = tl.arange(0, ABREAST * FEW_OWN)
        whose, lone = row_begin + c // FEW_OWN, first + row_begin + c // FEW_OWN
        lone_lowest, lone_last = bounds(ends, firsts, lone, whose < count, END, FIRST, WINDOW, OLD)
        lone_base = tl.load(bases + lone, mask=whose < count, other=NOWHERE, cache_modifier=CACHE).to(tl.int32)
        own_block, _, _ = nth(first_own, chunk0, far0, sharing, PER, EDGE, FAR)
        own_at, own_there = own_rows(
            path, table, lone, lone_lowest, lone_last, lone_base,
            own_edge(nodes_at, own_block, BLOCK, FEW_OWN) + c % FEW_OWN, depth, path_stride, PAGE, SMALL, OLD,
        )  # fmt: skip

    if OLD:
        if FETCHED > 0:
            behind = tl.minimum(chunk0 + (SINGLE or 1) * sharing, chunks_below(end, PER, EDGE, FAR))
            for chunk in range(chunk0, behind, sharing):
                asked = within(first_block(chunk, PER, EDGE, FAR) * BLOCK + tl.arange(0, FETCHED), lo, hi)
                asked = row_of(tl.load(table + asked // PAGE, cache_modifier=CACHE), asked, PAGE, SMALL)
                ask(k_at, asked, k_stride, MAIN + TAIL)
                if not LATENT:
                    ask(v_at, asked, v_stride, WIDE)
        begin(PDL)

    single: tl.constexpr = False
    if SINGLE > 0 and OWN == 0:
        single = busy == 1
    # Few queries are read beside each block: keys, which are as new, would wait for them. A mask that follows from the
    # block keeps a compiler from reading them before all.
    DTYPE: tl.constexpr = q_at.dtype.element_ty
    q_row, kept_q = q_at + t * q_stride + of * (MAIN + TAIL), None
    if M > LEAST:
        kept_q = queries(None, q_row, ok, MAIN_AT, MAIN, MAIN_PAD, TAIL_AT, TAIL, TAIL_PAD)
    ones = tl.full((BLOCK, COLUMNS), 1.0, tl.float32).to(DTYPE)
    m, seen_m = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), float("-inf"), tl.float32)
    sums, seen_total = tl.zeros((M, COLUMNS), tl.float32), tl.zeros((M,), tl.float32)
    acc, seen = tl.zeros((M, WIDE_PAD), tl.float32), tl.zeros((M, WIDE_PAD), tl.float32)
    for item in range(skipped, num_shared):
        block, chunk, inside = nth(item, chunk0, far0, sharing, PER, EDGE, FAR)
        p_at = block * BLOCK + n
        rows = row_of(page, within(p_at, lo, hi), PAGE, SMALL)
        q, q_tail = queries(kept_q, q_row, ok & (item >= 0), MAIN_AT, MAIN, MAIN_PAD, TAIL_AT, TAIL, TAIL_PAD)
        k = fetch(k_at + MAIN_AT, rows, k_stride, None, MAIN, MAIN_PAD)
        s = score(q, q_tail, k, k_at + TAIL_AT, rows, k_stride, None, TAIL, TAIL_PAD)
        if LATENT:
            v = k
        else:
            v = fetch(v_at, rows, v_stride, None, WIDE, WIDE_PAD)
        # Read one block ahead, so that keys and values wait for no page. What is kept for it must be what was read:
        # anything made of that Triton makes where it is used.
        follower, _, _ = nth(item + 1, chunk0, far0, sharing, PER, EDGE, FAR)
        page = tl.load(table + within(follower * BLOCK + n, lo, hi) // PAGE)
        s = bend(s, inner, CAPPED)
        if (block * BLOCK < inner_lo) | (block * BLOCK + BLOCK - 1 > inner_hi):
            s = tl.where((p_at >= lowest[:, None]) & (p_at <= last[:, None]), s, float("-inf"))
        if (inside == 0) & (item > 0):
            m, sums, acc, seen_m, seen_total, seen = turn(
                partial, stats, left_at, chunk - sharing, chunks, ok, m, sums, acc, seen_m, seen_total, seen,
                single, WIDE, SPLIT, WINDOW,
            )  # fmt: skip
        p, m, alpha = soften(s, m, factor)
        p = p.to(q.dtype)
        sums = tl.dot(p, ones, sums * alpha[:, None], input_precision="ieee")
        acc = tl.dot(p, v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
    if OWN > 0:
        # Where programs of all rows merge their chunks, theirs is left in front of these.
        shift = 0 if SPLIT else 1 - own_chunk
        for item in range(tl.where(alone, skipped, num_items), num_items):
            block, chunk, inside = nth(item, chunk0, far0, sharing, PER, EDGE, FAR)
            p_at = block * BLOCK + n
            if (inside == 0) & (item > 0):
                m, sums, acc, seen_m, seen_total, seen = turn(
                    partial, stats, left_at, chunk - sharing + shift, chunks, mine, m, sums, acc, seen_m, seen_total,
                    seen, False, WIDE, True, WINDOW if SPLIT else 0,
                )  # fmt: skip
            q, q_tail = queries(kept_q, q_row, ok & (item >= 0), MAIN_AT, MAIN, MAIN_PAD, TAIL_AT, TAIL, TAIL_PAD)
            k = fetch(k_at + MAIN_AT, own_at, k_stride, there, MAIN, MAIN_PAD)
            if LATENT:
                v = k
            else:
                v = fetch(v_at, own_at, v_stride, there, WIDE, WIDE_PAD)
            s = bend(score(q, q_tail, k, k_at + TAIL_AT, own_at, k_stride, there, TAIL, TAIL_PAD), inner, CAPPED)
            s = tl.where(there[None, :], s, float("-inf"))
            follower, _, _ = nth(item + 1, chunk0, far0, sharing, PER, EDGE, FAR)
            own_at, there = own_rows(
                path, table, lone, lone_lowest, lone_last, lone_base, follower * BLOCK + n, depth, path_stride,
                PAGE, SMALL,
            )  # fmt: skip
            p, m, alpha = soften(s, m, factor)
            p = p.to(q.dtype)
            sums = tl.dot(p, ones, sums * alpha[:, None], input_precision="ieee")
            acc = tl.dot(p, v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
    elif TREE:
        TURNED: tl.constexpr = not LATENT  # there keys are values, too
        if ABREAST > 0:
            own_ones = tl.full((ABREAST * FEW_OWN, COLUMNS), 1.0, tl.float32).to(DTYPE)
        else:
            row_end = tl.minimum((sub * M + M - 1) // GROUP + 1, count)
        for item in tl.range(tl.maximum(skipped, num_shared), num_items, num_stages=1):
            block, chunk, inside = nth(item, chunk0, far0, sharing, PER, EDGE, FAR)
            p_at = block * BLOCK + n
            if (inside == 0) & (item > 0):
                m, sums, acc, seen_m, seen_total, seen = turn(
                    partial, stats, left_at, chunk - sharing, chunks, ok, m, sums, acc, seen_m, seen_total, seen,
                    single, WIDE, SPLIT, WINDOW,
                )  # fmt: skip
            if ABREAST > 0:
                edge = own_edge(nodes_at, block, BLOCK, FEW_OWN)
                line, there = within(p_at, lo, hi), (p_at >= lo) & (p_at < edge)
                if item > first_own:  # seldom: nodes on both sides of a block's end
                    page = tl.load(table + line // PAGE)
                    own_at, own_there = own_rows(
                        path, table, lone, lone_lowest, lone_last, lone_base, edge + c % FEW_OWN, depth, path_stride,
                        PAGE, SMALL,
                    )  # fmt: skip
                rows = row_of(page, line, PAGE, SMALL)
                # Where all lies before any is read: threads tell one another where, and would wait with what is read.
                k_from, k_there, v_from, v_there = whereabouts(
                    k_at + MAIN_AT, v_at, rows, there, k_stride, v_stride, MAIN, WIDE, MAIN_PAD, WIDE_PAD, TURNED
                )
                own_k_from, own_k_there, own_v_from, own_v_there = whereabouts(
                    k_at + MAIN_AT, v_at, own_at, own_there, k_stride, v_stride, MAIN, WIDE, MAIN_PAD, WIDE_PAD, TURNED
                )
                q, q_tail = queries(kept_q, q_row, ok & (item >= 0), MAIN_AT, MAIN, MAIN_PAD, TAIL_AT, TAIL, TAIL_PAD)
                k, own_k = tl.load(k_from, k_there, 0.0), tl.load(own_k_from, own_k_there, 0.0)
                if LATENT:
                    v, own_v = k, own_k
                else:
                    v, own_v = tl.load(v_from, v_there, 0.0), tl.load(own_v_from, own_v_there, 0.0)
                s = score(q, q_tail, k, k_at + TAIL_AT, rows, k_stride, there, TAIL, TAIL_PAD, TURNED)
                s = bend(s, inner, CAPPED)
                s = tl.where(there & (p_at >= lowest[:, None]) & (p_at <= last[:, None]), s, float("-inf"))
                own = score(q, q_tail, own_k, k_at + TAIL_AT, own_at, k_stride, own_there, TAIL, TAIL_PAD, TURNED)
                own = tl.where((row[:, None] == whose) & own_there, bend(own, inner, CAPPED), float("-inf"))
                if s.shape == own.shape:  # warps wait for one another once
                    top = tl.max(tl.maximum(s, own), 1)
                else:
                    top = tl.maximum(tl.max(s, 1), tl.max(own, 1))
                new, safe = rise(top, m, factor)
                p = tl.exp2(tl.fma(s, factor, -safe[:, None])).to(q.dtype)
                own_p = tl.exp2(tl.fma(own, factor, -safe[:, None])).to(q.dtype)
                alpha = tl.exp2(m - safe)[:, None]
                sums = tl.dot(p, ones, sums * alpha, input_precision="ieee")
                sums = tl.dot(own_p, own_ones, sums, input_precision="ieee")
                acc = tl.dot(p, v.to(q.dtype), acc * alpha, input_precision="ieee")
                acc = tl.dot(own_p, own_v.to(q.dtype), acc, input_precision="ieee")
                m = new
            else:
                q, q_tail = queries(kept_q, q_row, ok & (item >= 0), MAIN_AT, MAIN, MAIN_PAD, TAIL_AT, TAIL, TAIL_PAD)
                s = tl.full((M, BLOCK), float("-inf"), tl.float32)
                for r in tl.range(row_begin, row_end, num_stages=1):
                    rows, there = rows_seen_by(
                        ends, firsts, bases, path, table, first + r, r < count, p_at, depth, path_stride,
                        PAGE, SMALL, END, FIRST, WINDOW,
                    )  # fmt: skip
                    k = fetch(k_at + MAIN_AT, rows, k_stride, there, MAIN, MAIN_PAD, TURNED)
                    own = score(q, q_tail, k, k_at + TAIL_AT, rows, k_stride, there, TAIL, TAIL_PAD, TURNED)
                    own = bend(own, inner, CAPPED)
                    s = tl.where((row == r)[:, None] & there[None, :], own, s)
                p, m, alpha = soften(s, m, factor)
                p = p.to(q.dtype)
                sums = tl.dot(p, ones, sums * alpha[:, None], input_precision="ieee")
                acc *= alpha[:, None]
                for r in tl.range(row_begin, row_end, num_stages=1):
                    rows, there = rows_seen_by(
                        ends, firsts, bases, path, table, first + r, r < count, p_at, depth, path_stride,
                        PAGE, SMALL, END, FIRST, WINDOW,
                    )  # fmt: skip
                    if LATENT:
                        v = fetch(k_at + MAIN_AT, rows, k_stride, there, MAIN, MAIN_PAD)
                    else:
                        v = fetch(v_at, rows, v_stride, there, WIDE, WIDE_PAD)
                    acc = tl.dot(tl.where((row == r)[:, None], p, 0.0), v.to(q.dtype), acc, input_precision="ieee")
    if SPLIT and SINGLE > 0 and OWN == 0:  # noqa: SIM102 (known when it is compiled; the next is not)
        if single:
            seen_m, seen_total, seen = merge(seen_m, seen_total, seen, m, tl.max(sums, 1), acc)
            write(out_at, at, ok, seen_total, seen, WIDE)
            return
    if SPLIT or OWN > 0:
        if SPLIT:
            if skipped < num_items:
                _, chunk, _ = nth(num_items - 1, chunk0, far0, sharing, PER, EDGE, FAR)
                leave(partial, stats, left_at, chunk, chunks, mine, m, tl.max(sums, 1), acc, WIDE, WINDOW)
        elif alone:
            _, chunk, _ = nth(num_items - 1, chunk0, far0, sharing, PER, EDGE, FAR)
            leave(partial, stats, left_at, chunk + shift, chunks, mine, m, tl.max(sums, 1), acc, WIDE, 0)
        else:
            seen_m, seen_total, seen = merge(seen_m, seen_total, seen, m, tl.max(sums, 1), acc)
            leave(partial, stats, left_at, 0, chunks, ok, seen_m, seen_total, seen, WIDE, 0)
        tl.debug_barrier()  # all threads have left theirs before one of them says so
        arrival = arrivals + (tile * subs + sub) * tl.num_programs(1) + head
        expected = busy
        if OWN > 0:
            expected += own_busy * tl.minimum(count - row_begin, OWN).to(tl.int32)
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == expected - 1:
            tl.store(arrival, 0)
            few_row, few_part, few = members(sub, tl.arange(0, FEW), count, GROUP, M, ROWS)  # no more are there
            few_of = head * GROUP + few_part
            begin_at, end_at = lowest_chunk, end_chunk
            if not SPLIT:
                begin_at, end_at = 0, 1 + end_chunk - own_chunk
            gather(
                out_at, (first + few_row) * HEADS + few_of, partial, stats, (left + few_row) * HEADS + few_of,
                begin_at, end_at, chunks, few, WIDE, WIDE_PAD, AHEAD, DEEP, WINDOW if SPLIT else 0,
            )  # fmt: skip
    else:
        seen_m, seen_total, seen = merge(seen_m, seen_total, seen, m, tl.max(sums, 1), acc)
        write(out_at, at, ok, seen_total, seen, WIDE)
