"""Tiles measured on this device, at start-up and by name: no launch ever measures anything.

tune(products, device)      a few tiles for each product and bucket of rows; the fastest go into the table
settle(candidates, spend)   of the fastest of each those with which rounds take least
try_library(products, …)    which of them PyTorch's library does faster, for those who need not be exact
save(path), load(path)      both tables as JSON, for one kind of device and one version of the kernels
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime._async_compile import AsyncCompileMode

from paceline.kernels.triton.arithmetic import LANES
from paceline.kernels.triton.compiling import THREADS
from paceline.kernels.triton.int8 import Matrix, round_rows
from paceline.kernels.triton.library import product as by_library
from paceline.kernels.triton.matmul import MOST_LEFT, Around, Folded, Norm, given_rows, launch, launching_of
from paceline.kernels.triton.tiles import (
    ROOMS,
    Key,
    Shape,
    Tile,
    areas,
    bytes_of,
    choose,
    count_programs,
    depth_of,
    find_tile,
    library,
    measured,
    stages_in,
    suits_packed,
)

log = logging.getLogger(__name__)

FORMAT = 1
BEYOND_CACHE = 160 * 2**20  # bytes of weights read in turn: none is still in the device's cache when it is its turn
MOST_COPIES = 64
without: set[str] = set()  # kinds of tiles that are not to be tried: boxes, turned, lasting
LAUNCHES = 24  # in a measured graph, at least
SHARED = 220 * 1024  # bytes of shared memory that a program may have
AHEAD = 0, 4, 8, 16, 32, 64  # lines of 128 bytes; the most only in a round, where memory may be idle before
SLIGHT = 256  # sums of a tile that two warps have between them
BEST = 4  # tiles of a product that are candidates, of each size
NOTABLE = 0.998  # of the time before: so much faster is no accident
PROCESSORS = ROOMS[0][0]
MOST_COLUMNS = 2**15  # more are a vocabulary's, of whose tiles tall ones do not last: see `matmul.py`
# m, n, k, warps, stages
MANY = (
    (64, 128, 64, 4, 4), (64, 128, 64, 4, 8), (64, 128, 128, 4, 4), (64, 256, 64, 4, 4), (128, 64, 64, 4, 4),
    (128, 64, 64, 4, 8), (128, 64, 128, 4, 4), (128, 64, 128, 8, 4), (128, 128, 64, 4, 4), (128, 128, 64, 8, 4),
    (128, 128, 64, 8, 6), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 64, 64, 8, 4), (256, 128, 64, 8, 4),
)  # fmt: skip


Times = dict[Tile, float]
Operands = tuple[Tensor | Folded, list[Matrix], Tensor, Around]
timed: dict[Key, Times] = {}  # all that `tune` measured, by bucket of rows


def tune(shapes: Iterable[Shape], rows: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """Measure tiles for products of these shapes anew; rows: buckets as `tiles.bucket` names them."""
    for shape, count in itertools.product(dict.fromkeys(shapes), rows):
        times = timed[count, shape, dtype] = _time_all(shape, count, device, dtype)
        measured[count, shape, dtype] = min(times, key=lambda tile: times[tile])


def settle(candidates: dict[Key, list[Tile]], spend: Callable[[], float]) -> None:
    """Choose anew for products that follow one another in what `spend` times.

    What one takes alone does not tell: programs start while others are still there, and crowd where these leave
    little of it.
    """

    def spend_with(chosen: dict[Key, Tile]) -> float:
        measured.update(chosen)
        return spend()

    measured.update(descend(candidates, spend_with))


def candidates_for(keys: Iterable[Key]) -> dict[Key, list[Tile]]:
    """For each what it has, and the fastest that `tune` measured."""
    return {key: list(dict.fromkeys([find_tile(*key), *fastest_in_rooms(timed[key], key[1])])) for key in keys}


def ahead_for(keys: Iterable[Key]) -> dict[Key, list[Tile]]:
    """For each what it has, and the same with more or fewer lines asked for ahead, as far as a row or AHEAD goes: what
    that brings depends on what else is read meanwhile."""
    found = {}
    for key in keys:
        tile, (_, shape, dtype) = find_tile(*key), key
        row = -(-shape.k * (1 if shape.packed else dtype.itemsize) // 128)
        found[key] = list(dict.fromkeys([tile, *(replace(tile, ahead=lines) for lines in AHEAD if lines < 2 * row)]))
    return found


def fastest_in_rooms(times: Times, shape: Shape) -> list[Tile]:
    """The fastest few of each size: those that a processor has room for once, twice, and more often."""
    bounds = [math.inf, *(size for _, size in ROOMS[1:]), 0]
    found: list[Tile] = []
    for most, least in itertools.pairwise(bounds):
        fitting = [tile for tile in times if least < bytes_of(tile.m, tile.n, tile.k, shape) * tile.stages <= most]
        found += sorted(fitting, key=lambda tile: times[tile])[:BEST]
    return sorted(found, key=lambda tile: times[tile])


def descend(
    candidates: dict[Key, list[Tile]], spend: Callable[[dict[Key, Tile]], float], turns: int = 2
) -> dict[Key, Tile]:
    """Tiles that together take least: one product after another takes its best among the others' as they are."""
    chosen = {key: tiles[0] for key, tiles in candidates.items()}
    best = spend(chosen)
    for key, tiles in itertools.chain.from_iterable([candidates.items()] * turns):
        for tile in tiles:
            if tile != chosen[key] and (spent := spend({**chosen, key: tile})) < best * NOTABLE:
                chosen, best = {**chosen, key: tile}, spent
    return chosen


def _time_all(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Times:
    """Milliseconds of every tile worth measuring."""
    x, weights, out, around = operands(shape, rows, device, dtype)
    times: Times = {}
    rule = made_in(choose(rows, shape, dtype), x, weights[0], around)

    def try_all(tiles: Iterable[Tile]) -> Tile:
        new = [tile for tile in tiles if tile not in times]
        prepare([(x, weights[0], out, around, tile) for tile in new])
        for tile in new:
            with _tolerating():
                if agree(made_in(tile, x, weights[0], around), rule, shape):
                    times[tile] = measure([_call(x, weight, out, around, tile) for weight in weights])
                else:
                    log.warning("left out, its bits are others: %s for %d rows of %s", tile, rows, shape)
        return min(times, key=lambda tile: times[tile])

    best = try_all(tiles_for(rows, shape, dtype))
    if best.ahead or best.boxes:
        try_all(replace(best, ahead=lines) for lines in AHEAD[:-1])
    return times


def agree(made: Tensor, rule: Tensor, shape: Shape) -> bool:
    """Whether a tile gives the bits of the rule's; of a packed weight nearly: it is a drafter's, which changes no text,
    and its widened values go into a tensor core in an order of the tile's own."""
    if shape.packed:
        return torch.allclose(made.float(), rule.float(), rtol=2e-2, atol=2e-2 * float(rule.abs().max()))
    return torch.equal(made, rule)


@contextlib.contextmanager
def _tolerating() -> Iterator[None]:
    """A tile that takes more registers or memory than there are, or that the compiler cannot make, is no tile."""
    try:
        yield
    except triton.runtime.errors.TritonError:
        pass
    except RuntimeError as error:
        if "PassManager" not in str(error):  # the device's own errors are nobody's to hide
            raise


def try_library(shapes: Iterable[Shape], rows: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
    """Measure the library's products of these shapes beside ours, each with its norm and gate; it has none packed."""
    for shape, count in itertools.product(dict.fromkeys(shapes), rows):
        if shape.packed:
            continue
        x, weights, out, around = operands(shape, count, device, dtype)
        tile = find_tile(count, shape, dtype)
        ours = measure([_call(x, weight, out, around, tile) for weight in weights])
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        norm = x.norm if isinstance(x, Folded) else around.norm
        theirs = measure([partial(by_library, given_rows(x), one, None, norm, None, around.gate) for one in dense])
        library[count, shape, dtype] = theirs < ours


def made_in(tile: Tile, x: Tensor | Folded, weight: Matrix, around: Around) -> Tensor:
    """What a product is in this tile: the same as in any that `agree`."""
    rows, width = given_rows(x), weight.shape[0] // (1 if around.gate is None else 2)
    out = torch.empty(len(rows), width, dtype=rows.dtype, device=rows.device)
    launch(x, weight, out, around, tile)
    return out


def tiles_for(rows: int, shape: Shape, dtype: torch.dtype) -> list[Tile]:
    """Those worth measuring: the rule's own first."""
    rule = choose(rows, shape, dtype)
    if dtype == torch.float32:
        return [rule]
    found, least = {rule: None}, 40 if shape.packed else 64  # programs; half the bytes are read by fewer
    for m, n in areas(rows, shape):
        if m > 64 or m * n * 4 < rule.m * rule.n or not least <= count_programs(rows, shape, (m, n)) <= 2048:
            continue
        deeper = (256, 512) if m == 16 else ()  # more of a weight's row at a time, as memory likes it
        depths = {128, depth_of(m, n, shape), *deeper}
        if shape.packed:  # half the bytes, and registers for what is widened, of which a gate's two sums leave few
            depths = {depth_of(m, n, shape), *(() if shape.gate else deeper)}
        for k in depths:
            for _, room in ROOMS:
                tile = Tile(m, n, k, 4, stages_in(room, m, n, k, shape), ahead=4)
                if tile.stages >= 3:
                    found[tile] = found[replace(tile, boxes=True)] = None
                    if m * n <= SLIGHT and not shape.packed:  # more warps all do the same
                        found[replace(tile, warps=2)] = None
                    if m == 16 and shape.packed:
                        found[replace(tile, parts=4)] = None
    found |= dict.fromkeys(turned(rows, shape) if rows <= 64 else many(rows, shape))
    tried = (tile for tile in found if not shape.packed or suits_packed(tile))
    return [tile for tile in tried if tile == rule or not any(getattr(tile, kind) for kind in without)]


def turned(rows: int, shape: Shape) -> Iterator[Tile]:
    """For few rows: a tensor core's 64 are the weight's own, boxes go into it as they come, pipelines are deep."""
    for n, k, (_, room) in itertools.product((64, 128), (64, 128, 256), ROOMS):
        stages, programs = stages_in(room, rows, n, k, shape), count_programs(rows, shape, (rows, n))
        tile = Tile(rows, n, k, 4, stages, boxes=True, turned=True, ahead=4)
        if stages >= 3 and programs >= 64:
            yield tile
        if stages >= 3 and programs > PROCESSORS and room == ROOMS[0][1]:
            yield replace(tile, lasting=True)


def many(rows: int, shape: Shape) -> Iterator[Tile]:
    """For many rows: where sums are the limit. A tile whose weights are the taller side may be the better turned.

    Lasting programs copy ahead over a tile's end, in one flat loop, where a gate's two sums would wait in turn.
    """
    for m, n, k, warps, stages in MANY:
        tile = Tile(m, n // shape.halves, k, warps, stages, boxes=True)
        if bytes_of(m, tile.n, k, shape) * stages > SHARED:
            continue
        several = count_programs(rows, shape, (m, tile.n)) > PROCESSORS
        yield tile
        if shape.n > MOST_COLUMNS:
            continue
        if several and not shape.gate:
            yield replace(tile, lasting=True)
        if tile.n >= 16 * warps:
            yield replace(tile, turned=True)


def operands(shape: Shape, rows: int, device: torch.device, dtype: torch.dtype) -> Operands:
    """Rows and as many weights as no cache holds, with what stands around such a product in a layer."""
    x: Tensor | Folded = torch.randn(rows, shape.k, device=device, dtype=dtype)
    height = shape.n * shape.halves
    copies = min(MOST_COPIES, -(-BEYOND_CACHE // (height * shape.k * (1 if shape.packed else dtype.itemsize))))
    weights = list[Matrix]()
    for _ in range(copies):
        made = torch.randn(height, shape.k, device=device, dtype=dtype) * shape.k**-0.5
        weights.append(round_rows(made) if shape.packed else made)
    norm = Norm(torch.ones(shape.k, device=device), 1e-5) if shape.normed else None
    if norm is not None and rows <= MOST_LEFT:  # whoever made them has left what it takes
        x, norm = Folded(norm, given_rows(x), torch.rand(rows, LANES, device=device)), None
    out = torch.empty(rows, shape.n, device=device, dtype=dtype)
    return x, weights, out, Around(norm=norm, gate="silu" if shape.gate else None)


def prepare(products: Iterable[tuple[Tensor | Folded, Matrix, Tensor, Around, Tile]]) -> None:
    """Compile the kernels of all these products, many at a time. What cannot be compiled fails when it is launched."""
    with ThreadPoolExecutor(THREADS) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for x, weight, out, around, tile in products:
            if around.norm is not None:
                rows = given_rows(x)
                x = Folded(around.norm, rows, torch.empty(len(rows), device=rows.device))
            kernel, grid, given, options = launching_of(x, weight, out, around, tile)
            kernel.warmup(*given, grid=grid, **options)


def measure(calls: Sequence[Callable[[], Any]], repeats: int = 4) -> float:
    """Milliseconds of one call: all of them one behind another in a graph, the fastest of some replays."""
    calls = often(calls)
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph would collect garbage each time
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return float(min(times))


def often(calls: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The calls in turn, each as often as the others: what a graph's own start and end take is shared by many."""
    return [*calls] * -(-LAUNCHES // len(calls))


def _call(x: Tensor | Folded, weight: Matrix, out: Tensor, around: Around, tile: Tile) -> Callable[[], None]:
    return lambda: launch(x, weight, out, around, tile)


def save(path: Path, device: torch.device) -> None:
    """Write the tables, so that the next start need not measure."""
    tiles = [[count, list(shape), str(dtype), asdict(tile)] for (count, shape, dtype), tile in measured.items()]
    faster = [[count, list(shape), str(dtype), value] for (count, shape, dtype), value in library.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    said = json.dumps({"of": _identity(device), "tiles": tiles, "library": faster})
    path.write_text(said.replace("], [", "],\n [") + "\n")  # a line for each


def load(path: Path, device: torch.device) -> bool:
    """Take a table that was written for such a device; whether there was one. Whatever does not fit is left alone."""
    try:
        said = json.loads(path.read_text())
        if said["of"] != _identity(device):
            return False
        tiles = {_key(*key): Tile(**tile) for *key, tile in said["tiles"]}
        faster = {_key(*key): bool(value) for *key, value in said.get("library", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    measured.update(tiles)
    library.update(faster)
    return True


def _key(count: int, shape: Sequence[Any], dtype: str) -> Key:
    return int(count), Shape(*shape), getattr(torch, dtype.removeprefix("torch."))


def _identity(device: torch.device) -> list[Any]:
    return [FORMAT, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, triton.__version__]
