"""Paged attention: prompt chunks, decoding rows, chains and trees in one kernel family (`looking.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.ops import Heads, LayerCache, Layout, Span
from paceline.kernels.triton import looking
from paceline.kernels.triton.device import PDL, launching
from paceline.kernels.triton.interpreter import mend

mend()

# They are part of the arithmetic: a row's bits depend on them, on no other size here. Chunks are of so many positions,
# CHUNK below EDGE and FAR_CHUNK behind it; blocks of as many as BLOCK bytes of a head hold, within BLOCKS.
CHUNK, EDGE, FAR_CHUNK = 128, 4096, 1024
BLOCK, BLOCKS = 1 << 15, (32, CHUNK)

WARPS = 132 * 8  # that an H200 has room for, as many registers as these programs take
ROOM = 224 << 10  # bytes of a multiprocessor's memory for queries and blocks
PAIRS = 64  # (row, head) of a program at most
# How programs are compiled, which changes no bit: those of heads up to 128 values, and of wider ones. Stages are at
# most so many, as far as there is room: with two, every block is waited for in full.
NARROW = {"num_warps": 4, "num_stages": 3}
WIDE = {"num_warps": 8, "num_stages": 4}
LEAST = looking.LEAST.value  # pairs of a program at least: a tensor core's rows
BRIEF = 2  # stages of programs with no more blocks than that
# Of nodes' programs where there are more than run at once: three to a multiprocessor instead of two.
CROWDED = {"num_stages": BRIEF, "maxnreg": 168}
FEW_OWN = 32  # positions of a block at which rows may have keys of their own that stand side by side
ROOM_OWN = 80 << 10  # bytes of such keys and values
ALIKE = 33 * 4  # warps of programs with such, if their rows fit: each reads all that comes before the nodes anew
# Chunks times values of a key: so few are looked at sooner by one program, if it has few pairs; and where rows
# have keys of their own beside one another.
SINGLE, SINGLE_OWN = 256, 128
LONG = 128  # rows of a tile of a longer span; spans of fewer are one tile
MOST_SHARED = 1 << 16  # tiles and heads whose chunks several programs share
# Values a thread reads at once where chunks are merged, and of how many chunks at most: no more than there may be. DEEP
# turns of that are under way at once, if there is room for them.
AHEAD, MOST_AHEAD, DEEP = 64, 8, 3
SMALL = 1 << 31  # values that 32 bits tell apart
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Look:
    """How a layer looks: a score s is scale · (q · k), under a softcap c then c · tanh(s / c)."""

    heads: Heads
    scale: float
    softcap: float | None = None
    window: int | None = None


@dataclass
class Tiles:
    """Which rows go together: neighbours of one sequence. On the device and of fixed size: a graph replays them."""

    first: Tensor  # [G] int64 a tile's first row
    count: Tensor  # [G] int64 its rows; 0: nothing to do
    rows: int  # no tile has more
    reach: int  # no row sees further: the size of what programs leave one another
    splits: int | None = None  # programs that share the chunks of a tile; None: as few as fill the chip
    long: bool = False  # of prompt chunks: hardly any row is a node
    spare: int = 0  # tiles that mostly have nothing to do


class FixedTiles:
    """Tiles of fixed number for a graph: of short spans (at most `rows` rows a tile) and of long ones (prompt chunks).

    They have nothing to do until `send`.
    """

    def __init__(self, short: int, long: int, rows: int, reach: int, device: torch.device) -> None:
        self._numbers = torch.zeros(2, short + long, dtype=torch.int64, device=device)
        first, count = self._numbers
        self.short = Tiles(first[:short], count[:short], rows, reach)
        self.long = Tiles(first[short:], count[short:], LONG, reach, long=True)

    def send(self, spans: Sequence[Span]) -> None:
        """Be the tiles of the host's spans; whatever is left over has nothing to do."""
        cuts = []
        for tiles, cut in zip((self.short, self.long), _cut(spans, self.short.rows)):
            room = len(tiles.first)
            if len(cut) > room:
                raise ValueError(f"{len(spans)} spans need {len(cut)} tiles of {tiles.rows} rows; there are {room}")
            cuts += cut + [(0, 0)] * (room - len(cut))
        numbers = torch.tensor(cuts, dtype=torch.int64).view(-1, 2).t().contiguous()
        if self._numbers.is_cuda:
            numbers = numbers.pin_memory()
        self._numbers.copy_(numbers, non_blocking=True)


def tiles_of(spans: Sequence[Span], device: torch.device) -> list[Tiles]:
    """The host's spans as tiles, sent at once: short spans as they are, long ones cut."""
    rows = max((span.num_rows for span in spans if 0 < span.num_rows < LONG), default=1)
    short, long = _cut(spans, rows)
    fixed = FixedTiles(len(short), len(long), rows, max((span.reach for span in spans), default=0), device)
    fixed.send(spans)
    return [tiles for tiles in (fixed.short, fixed.long) if len(tiles.first)]


def _cut(spans: Sequence[Span], rows: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First row and rows of every tile, of short spans and of long ones, whose last rows see most and so come first."""
    short, long = [], []
    for row, num_rows, _ in spans:
        if num_rows < LONG:
            short += [(row + at, min(rows, num_rows - at)) for at in range(0, num_rows, rows)]
        else:
            long += [(row + at, min(LONG, num_rows - at)) for at in reversed(range(0, num_rows, LONG))]
    return short, long


def chunks_of(reach: int, far: int) -> int:
    """How many chunks so many positions are cut into, those behind EDGE of `far`."""
    return max(1, -(-min(reach, EDGE) // CHUNK) + -(-max(reach - EDGE, 0) // far))


def splits_of(tiles: Tiles, programs: int, num_warps: int) -> int:
    """By how many programs each of a tile's is shared, so that few tiles fill the chip too. More than it has room for
    would run one behind another, and all that chunks come to goes through memory."""
    if len(tiles.first) * programs > MOST_SHARED:
        return 1
    busy = max(1, len(tiles.first) - tiles.spare) * programs
    return max(1, WARPS // num_warps // busy if tiles.splits is None else tiles.splits)


def attend(
    q: Tensor, cache: LayerCache, layout: Layout, tiles: Iterable[Tiles], look: Look, last: Tensor | None = None
) -> Tensor:
    """q [T, heads·D] → [T, heads·Dv]: rows of the tiles look at what the layout lets them see; others stay undefined.

    last [T]: row t sees the positions up to last[t], none hidden and each at its own place, whatever the layout says of
    them (cross attention). A row that sees nothing gets zeros.
    A layer of one part is a latent one: every head looks at the same keys, whose last Dv values are the values.
    """
    heads = look.heads
    if q.shape[1] != heads.num_heads * heads.head_dim or q.stride(1) != 1:
        raise ValueError(f"queries must be rows of {heads.num_heads} · {heads.head_dim} values, not {tuple(q.shape)}")
    if not look.scale > 0:
        raise ValueError(f"a layer's scale must be above 0, not {look.scale}")
    out = q.new_empty(q.shape[0], heads.num_heads * heads.value_width)
    for some in tiles:
        seen = {**_seen(layout, look, last), "OLD": PDL and last is None}
        _launch(q, cache, out, some, seen, _shape(look, len(cache) == 1))
    return out


def _launch(
    q: Tensor, layer: LayerCache, out: Tensor, tiles: Tiles, seen: dict[str, Any], shape: dict[str, Any]
) -> None:
    keys, values = layer[0], layer[-1]
    kv_heads = shape["HEADS"] // shape["GROUP"]
    m, block, options = _config(tiles, shape, seen["TREE"], q.element_size())
    pairs = tiles.rows * shape["GROUP"]
    own = abreast = 0
    subs = -(-pairs // m)
    if seen["TREE"] and not tiles.long:
        abreast = _abreast(tiles, m, min(FEW_OWN, block), seen["depth"], shape, q.element_size())
        own = 0 if abreast else max(1, m // shape["GROUP"])  # rows of a program, or one that several have a part of
        parts = -(-shape["GROUP"] // m)
        if own and len(tiles.first) * -(-tiles.rows // own) * parts * kv_heads > MOST_SHARED:
            own = 0
        if own or abreast:
            subs = -(-tiles.rows // (own or abreast)) * parts
    window = seen["WINDOW"]
    far = CHUNK if 0 < window <= EDGE else FAR_CHUNK  # a window sees few chunks: all are small
    chunks = chunks_of(tiles.reach, far)
    if window:  # a tile's rows are neighbours, and so see that many chunks in a row at most
        chunks = min(chunks, -(-(window + tiles.rows) // CHUNK) + 1)
    splits = min(chunks, splits_of(tiles, subs * kv_heads, options["num_warps"]))
    if own and splits == 1:  # all that the rows share is one, and few chunks hold nodes
        chunks = min(chunks, seen["depth"] // CHUNK + 2) + 1
    if splits == chunks and tiles.reach <= EDGE and CHUNK // block <= BRIEF:
        options["num_stages"] = BRIEF
    warps = len(tiles.first) * subs * (splits + own) * kv_heads * options["num_warps"]
    if own and warps > WARPS and options["num_warps"] == NARROW["num_warps"]:
        options |= CROWDED
    gathered = splits > 1 or own > 0
    own_pairs = min(pairs, (own or abreast) * shape["GROUP"] or pairs)
    few = min(m, _power(own_pairs)) if gathered else m  # one kernel for all where nothing is gathered
    ahead = min(MOST_AHEAD, _power(chunks), AHEAD * 32 * options["num_warps"] // (few * shape["WIDE_PAD"]))
    ahead = max(2, ahead) if gathered else 2
    # Programs leave a place for each row of each tile; for each row, if those are fewer.
    room = len(tiles.first) * tiles.rows
    partial = stats = arrivals = out  # where nothing is left for another program
    if gathered:
        size, arrivals = min(room, q.shape[0]) * shape["HEADS"] * chunks, _arrivals(q.device)
        partial = out.new_empty(size * shape["WIDE"], dtype=torch.float32)
        stats = out.new_empty(size * 2, dtype=torch.float32)
    programs = (subs * (splits + own), 1) if own else (subs, splits)
    looking.look[(len(tiles.first) * programs[0], kv_heads, programs[1])](
        q_at=q, k_at=keys, v_at=values, out_at=out, partial=partial, stats=stats, arrivals=arrivals,
        tile_first=tiles.first, tile_count=tiles.count,
        q_stride=q.stride(0), k_stride=keys.stride(0), k_head=keys.stride(1),
        v_stride=values.stride(0), v_head=values.stride(1),
        subs=subs, splits=splits, chunks=chunks, tile_rows=tiles.rows if room < q.shape[0] else 0,
        BLOCK=block, PER=CHUNK // block, EDGE=EDGE // block, FAR=far // block,
        M=m, FEW=few, OWN=own, ABREAST=abreast, FEW_OWN=min(FEW_OWN, block),
        AHEAD=ahead,
        DEEP=_deep(ahead * few * (shape["WIDE_PAD"] + 2)) if gathered else 1,
        FETCHED=CHUNK if m <= 32 and q.element_size() == 2 else 0,
        SPLIT=splits > 1,
        SINGLE=(SINGLE_OWN if abreast else SINGLE) // shape["MAIN_PAD"] if m <= LEAST else 0,
        SMALL=all(len(part) * part.stride(0) < SMALL for part in layer), PDL=PDL,
        **seen, **shape, **options,
    )  # fmt: skip


@cache
def _arrivals(device: torch.device) -> Tensor:
    """How many of the programs that share a tile are done: 0 before and after every launch, so made once."""
    return torch.zeros(MOST_SHARED, dtype=torch.int32, device=device)


def _seen(layout: Layout, look: Look, last: Tensor | None) -> dict[str, Any]:
    """The kernels' arguments that say what rows see and where it lies."""
    if last is not None:
        layout = replace(layout, positions=last, first=None, path=None, until=None)
    ends = layout.positions if layout.until is None else layout.until
    path = layout.path if layout.path is not None and layout.path.shape[1] else None
    table = layout.page_table
    return {
        "slots": layout.slots,
        "ends": ends,
        "END": int(layout.until is not None),
        "firsts": ends if layout.first is None else layout.first,
        "FIRST": layout.first is not None,
        "WINDOW": 0 if look.window is None else look.window,
        "bases": layout.tree_base,
        "path": ends if path is None else path,
        "path_stride": 0 if path is None else path.stride(0),
        "depth": 0 if path is None else path.shape[1],
        "TREE": path is not None,
        "table": table,
        "table_stride": table.stride(0),
        "PAGE": layout.block_size,
    }


def _shape(look: Look, latent: bool) -> dict[str, Any]:
    """The kernels' arguments that say what a layer is like.

    A head's keys meet its query in two pieces: a power of two of values, then what is left. In a latent layer the first
    piece is what the values are too.
    """
    heads, wide = look.heads, look.heads.value_width
    main = wide if latent else 1 << (heads.head_dim.bit_length() - 1)
    tail = heads.head_dim - main
    cap = look.softcap
    return {
        "HEADS": heads.num_heads,
        "GROUP": heads.num_heads // heads.num_kv_heads,
        "MAIN": main,
        "TAIL": tail,
        "MAIN_AT": tail if latent else 0,
        "TAIL_AT": 0 if latent else main,
        "WIDE": wide,
        "MAIN_PAD": _padded(main),
        "TAIL_PAD": _padded(tail),
        "WIDE_PAD": _padded(wide),
        "LATENT": latent,
        "CAPPED": cap is not None,
        "factor": (look.scale if cap is None else cap) * LOG2E,
        "inner": 0.0 if cap is None else 2 * LOG2E * look.scale / cap,
    }


def _abreast(tiles: Tiles, m: int, positions: int, depth: int, shape: dict[str, Any], size: int) -> int:
    """How many rows a program has whose own keys stand side by side: as few as leave few programs, for what all read is
    read as often as there are programs. 0: their keys cannot stand so."""
    group, kv_heads = shape["GROUP"], shape["HEADS"] // shape["GROUP"]
    room = positions * _position(shape, size)  # of one row
    fitting = [rows for rows in (1, 2, 4, 8, 16) if rows <= max(1, m // group) and rows * room <= ROOM_OWN]
    if depth + looking.ADDED.value - 1 > positions or not fitting:
        return 0
    each = len(tiles.first) * -(-group // m) * kv_heads * _way(shape, size)["num_warps"]
    return next((rows for rows in fitting if -(-tiles.rows // rows) * each <= ALIKE), fitting[-1])


def _deep(values: int) -> int:
    """How many turns of so many values, of 32 bits each, are under way at once where chunks are merged: all but one of
    them are copied ahead."""
    return DEEP if (DEEP - 1) * values * 4 <= ROOM else 1


def _leaves_room(tiles: Tiles, shape: dict[str, Any]) -> bool:
    """Whether the chip has room for twice as many programs as there are with few pairs each: they end sooner."""
    programs = len(tiles.first) * -(-tiles.rows * shape["GROUP"] // LEAST) * (shape["HEADS"] // shape["GROUP"])
    return bool(2 * programs * NARROW["num_warps"] <= WARPS)


def _power(count: int) -> int:
    """Of two, and no less than so many."""
    return 1 << (count - 1).bit_length()


def _padded(width: int) -> int:
    """No dimension of a product is shorter than 16, and all are powers of two."""
    return max(16, _power(width) if width else 0)


def _keys(shape: dict[str, Any]) -> int:
    """Values of a key, as it is read."""
    return int(shape["MAIN_PAD"] + (shape["TAIL_PAD"] if shape["TAIL"] else 0))


def _position(shape: dict[str, Any], size: int) -> int:
    """Bytes of a position: its key and its value."""
    return (_keys(shape) + (0 if shape["LATENT"] else int(shape["WIDE_PAD"]))) * size


def _wide(shape: dict[str, Any], size: int) -> int:
    """Values of a head, as if they had 16 bits."""
    return int(max(shape["WIDE_PAD"], shape["MAIN_PAD"])) * size // 2


def _way(shape: dict[str, Any], size: int) -> dict[str, int]:
    """How it is compiled."""
    return NARROW if _wide(shape, size) <= 128 else WIDE


def _config(tiles: Tiles, shape: dict[str, Any], tree: bool, size: int) -> tuple[int, int, dict[str, Any]]:
    """The (row, head) pairs of a program, the positions of a block, how it is compiled; size: bytes of a value."""
    wide = _wide(shape, size)
    # A node's program has all pairs of its neighbours too, so there are few. What a wide head comes to fills the
    # registers, and float32 is multiplied without tensor cores.
    few = wide > 256 or size > 2 or (tree and not tiles.long) or _leaves_room(tiles, shape)
    # Rows of a tree that have no programs of their own take twice the registers.
    m = min(LEAST if few else PAIRS // 2 if tree else PAIRS, _padded(tiles.rows * shape["GROUP"]))
    way = _way(shape, size)
    position = _position(shape, size)
    block = max(BLOCKS[0], min(BLOCKS[1], 1 << ((BLOCK // position).bit_length() - 1)))
    left = ROOM - m * (_keys(shape) * size + shape["WIDE_PAD"] * 4)  # queries, and what a chunk came to on its way out
    return m, block, launching(way["num_warps"], min(way["num_stages"], left // (block * position)))
