"""Matrix products in Triton beside cuBLAS: milliseconds, bytes a second, and whether a row keeps its bits.

    python bench/gpu_kernels.py matmul [--output FILE] [--tune [--fast] [--without KIND]] [--tiles FILE]
                                       [--model NAME] [--rows 1,8,256]

Weights are read in turn, more of them than the device's cache holds, by launches captured in one graph. `fused` is the
product as a layer has it: norm and gate in front and behind, a residual added; `library` is that by PyTorch's, as
exact_kernels=False may have it. --tune measures tiles first and writes them to --tiles, with --fast also which products
are the library's (what --model and --rows leave out stays as it stood there; what gpu_settle.py chose is undone);
without it those of --tiles are taken, if there are any. Weights of an EAGLE-3 head have 8 bits, cuBLAS's beside them
16; those of NAME-floats have 16. Last it says what the host takes for a launch, of each kind of tile.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench import machine, results
from paceline.kernels.triton import library, tuning
from paceline.kernels.triton import matmul as kernels
from paceline.kernels.triton.arithmetic import LANES, group_of
from paceline.kernels.triton.int8 import Matrix
from paceline.kernels.triton.tiles import Shape, Tile, bucket, find_tile

ROWS = 1, 4, 8, 16, 32, 64, 128, 256, 512, 2048
HEAD_ROWS = 256  # nobody wants the logits of more
COUNTS = 1, 8, 16, 17, 64, 128, 300  # rows among which row 0 must stay the same
TRIED = 40  # rows in each of these tiles: what is copied how, and whose rows are the tensor core's
KINDS = (
    Tile(16, 32, 128), Tile(64, 32, 64), Tile(64, 64, 64, boxes=True),
    Tile(16, 64, 128, boxes=True, turned=True), Tile(32, 64, 64, stages=5, boxes=True, turned=True, ahead=8),
    Tile(64, 128, 64, stages=3, boxes=True, turned=True), Tile(128, 64, 64, boxes=True),
    Tile(32, 32, 128, boxes=True, lasting=True), Tile(16, 64, 128, boxes=True, turned=True, lasting=True),
)  # fmt: skip
LAUNCHES = 100  # of each, where the host is measured
BITS = {True: "bits kept", False: "BITS DIFFER", None: "packed"}
ADDED = "out", "down"  # to the residual
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
MODELS = {  # layers, hidden, rows of queries, keys and values, inner, vocabulary
    "llama-8b": (32, 4096, 6144, 14336, 128256),
    "smollm2-135m": (30, 576, 960, 1536, 49152),
    "qwen2.5-1.5b": (28, 1536, 2048, 8960, 151936),
}
HEADS = {"llama-8b": 32000, "smollm2-135m": 16384}  # vocabularies of EAGLE-3 heads
FLOATS = "-floats"  # behind the name of a head whose weights are not packed
OMITTED = "turned", "lasting", "boxes"  # that tuning may do without


class Product(NamedTuple):
    model: str
    name: str
    columns: int
    depth: int
    times: int  # in a step
    packed: bool = False  # a weight of 8 bits

    @property
    def shape(self) -> Shape:
        gate, normed = self.name == "gate_up", self.name in ("qkv", "gate_up")
        return Shape(self.columns // 2 if gate else self.columns, self.depth, gate, normed, self.packed)


def tried() -> list[Tile]:
    return [tile for tile in KINDS if not any(getattr(tile, kind) for kind in tuning.without)]


def products() -> Iterator[Product]:
    for model, (layers, hidden, qkv, inner, vocabulary) in MODELS.items():
        yield Product(model, "qkv", qkv, hidden, layers)
        yield Product(model, "out", hidden, hidden, layers)
        yield Product(model, "gate_up", 2 * inner, hidden, layers)
        yield Product(model, "down", hidden, inner, layers)
        yield Product(model, "head", vocabulary, hidden, 1)
        if model in HEADS:  # no norm stands right before its qkv
            own = [("states", hidden, 3 * hidden), ("pairs", qkv, 2 * hidden), ("head", HEADS[model], hidden)]
            shared = [("out", hidden, hidden), ("gate_up", 2 * inner, hidden), ("down", hidden, inner)]
            for name, columns, depth in own:  # as floats the others are as in the target's layers
                yield Product(f"{model}-eagle3{FLOATS}", name, columns, depth, 1)
            for name, columns, depth in own + shared:
                yield Product(f"{model}-eagle3", name, columns, depth, 1, packed=True)


def group_squares(x: Tensor) -> Tensor:
    """[T, K] → [T, 128] what whoever made rows would have left of their squares."""
    group = group_of(x.shape[1])
    sums = F.pad(x.float() ** 2, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    while sums.shape[2] > 1:
        sums = sums[:, :, 0::2] + sums[:, :, 1::2]
    return F.pad(sums[:, :, 0], (0, LANES - sums.shape[1]))


class Case:
    """One product's weights, and what is launched with them."""

    def __init__(self, given: Product) -> None:
        self.given, self.shape = given, given.shape
        _, self.weights, _, around = tuning.operands(self.shape, 1, DEVICE, DTYPE)
        norm = kernels.Norm(torch.ones(given.depth, device=DEVICE), 1e-5) if self.shape.normed else None
        self.around = kernels.Around(norm=norm, gate=around.gate)
        self.dense = self.weights  # the library's
        if given.packed:
            _, self.dense, _, _ = tuning.operands(self.shape._replace(packed=False), 1, DEVICE, DTYPE)
        self.x = torch.randn(max(ROWS), given.depth, device=DEVICE, dtype=DTYPE)
        self.squares = group_squares(self.x)
        self.residual = torch.randn(max(ROWS), given.columns if given.name in ADDED else 1, device=DEVICE, dtype=DTYPE)

    def rows(self, count: int) -> tuple[Tensor | kernels.Folded, kernels.Norm | None]:
        """So many rows, and the norm in front of them that nobody has begun."""
        x, norm = self.x[:count], self.around.norm
        if norm is None or count > kernels.MOST_LEFT:
            return x, norm
        return kernels.Folded(norm, x, self.squares[:count]), None  # its weight is all ones

    @property
    def plain(self) -> Any:
        return kernels.logits if self.given.name == "head" else kernels.matmul

    def fused(self, rows: int, weight: Matrix) -> Tensor:
        x = self.x[:rows]
        if self.given.name == "head":
            return kernels.logits_bests(x, weight)[0]
        if self.given.name in ADDED:
            behind = kernels.Norm(torch.ones(self.shape.n, device=DEVICE), 1e-5)
            left = kernels.room_behind(x, weight, behind)
            return kernels.matmul(x, weight, residual=self.residual[:rows], left=left)
        given, norm = self.rows(rows)
        return kernels.matmul(given, weight, norm=norm, gate=self.around.gate)

    def by_library(self, rows: int, weight: Tensor) -> Tensor:
        residual = self.residual[:rows] if self.given.name in ADDED else None
        return library.product(self.x[:rows], weight, None, self.around.norm, residual, self.around.gate)

    def compiled(self, rows: int) -> Iterator[tuple[Tensor | kernels.Folded, Matrix, Tensor, kernels.Around, Tile]]:
        """What `measure` launches with so many rows, for compiling all of it at once."""
        x, weight, shape = self.x[:rows], self.weights[0], self.shape
        plain = Shape(self.given.columns, self.given.depth, False, False, self.given.packed)
        head = self.given.name == "head"
        out = x.new_empty(1, 1, dtype=torch.float32 if head else DTYPE).expand(rows, plain.n)
        yield x, weight, out, kernels.Around(), find_tile(rows, plain, DTYPE)
        given, norm = self.rows(rows)
        tile, around = find_tile(rows, shape, DTYPE), kernels.Around(norm=norm, gate=self.around.gate)
        if head:
            tile = kernels.tile_of_logits(rows, given, weight, norm)
            keys = torch.empty(rows, -(-shape.n // tile.n), dtype=torch.int64, device=DEVICE)
            around = kernels.Around(norm=norm, bests=keys)
        if self.given.name in ADDED:
            behind = kernels.Norm(torch.ones(shape.n, device=DEVICE), 1e-5)
            around = kernels.Around(residual=self.residual[:rows], left=kernels.room_behind(x, weight, behind))
        yield given, weight, out[:, : shape.n], around, tile

    def kinds(self) -> Iterator[tuple[Tensor, Matrix, Tensor, kernels.Around, Tile]]:
        """What `keeps_bits` launches besides."""
        out = self.x.new_empty(TRIED, self.shape.n)
        return ((self.x[:TRIED], self.weights[0], out, self.around, tile) for tile in tried())

    def measure(self, rows: int) -> dict[str, Any]:
        x, weight = self.x[:rows], self.weights[0]
        head = self.given.name == "head"
        ours = self.plain
        theirs = (lambda x, w: F.linear(x, w).float()) if head else F.linear
        same = isinstance(weight, Tensor) and torch.equal(ours(x, weight).to(DTYPE), F.linear(x, weight))
        times = {
            "ours_ms": tuning.measure([lambda w=w: ours(x, w) for w in self.weights]),
            "torch_ms": tuning.measure([lambda w=w: theirs(x, w) for w in self.dense]),
            "fused_ms": tuning.measure([lambda w=w: self.fused(rows, w) for w in self.weights]),
        }
        if not head:
            times["library_ms"] = tuning.measure([lambda w=w: self.by_library(rows, w) for w in self.dense])
        read, work = weight.nbytes, 2 * weight.shape.numel() * rows
        return {
            "rows": rows, **times, "ratio": times["ours_ms"] / times["torch_ms"],
            "gb_per_s": read / times["ours_ms"] / 1e6, "tflops": work / times["ours_ms"] / 1e9, "as_torch": same,
            "tile": asdict(find_tile(rows, self.shape, DTYPE)),
        }  # fmt: skip

    def host_us(self) -> list[tuple[Tile, float]]:
        """Microseconds that the host takes to launch a product, while the device is behind."""
        found = []
        for tile in tried():
            self.alone(tile)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(LAUNCHES):
                self.alone(tile)
            found.append((tile, (time.perf_counter() - begin) * 1e6 / LAUNCHES))
        torch.cuda.synchronize()
        return found

    def keeps_bits(self) -> bool:
        """Whether the rows that two counts share are the same, product and fused, and in every kind of tile."""
        weight, most = self.weights[0], max(COUNTS) if self.given.name != "head" else 128
        for make in (lambda count: self.plain(self.x[:count], weight), lambda count: self.fused(count, weight)):
            whole = make(most)
            if not all(torch.equal(make(count), whole[:count]) for count in COUNTS if count < most):
                return False
        made = [self.alone(tile) for tile in tried()]
        return all(torch.equal(one, made[0]) for one in made)

    def alone(self, tile: Tile) -> Tensor:
        """A few rows' product, with norm and gate, in another tile than the table's."""
        out = torch.empty(TRIED, self.shape.n, device=DEVICE, dtype=DTYPE)
        kernels.launch(self.x[:TRIED], self.weights[0], out, self.around, tile)
        return out


def run(output: Path, *others: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--tiles", type=Path, default=output.with_name("gpu_tiles.json"))
    parser.add_argument("--without", action="append", default=[], choices=OMITTED, help="kinds of tiles not to try")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument(
        "--model",
        action="append",
        choices=list(dict.fromkeys(product.model for product in products())),
        help="all of them unless given",
    )
    options = parser.parse_args(others)
    begin, found = time.perf_counter(), [p for p in products() if not options.model or p.model in options.model]
    tuning.without.update(options.without)
    known = tuning.load(options.tiles, DEVICE)
    if options.tune:
        buckets = sorted({bucket(rows) for rows in options.rows})
        tuning.tune([p.shape for p in found if p.name != "head"], buckets, DEVICE, DTYPE)
        few = [count for count in buckets if count <= HEAD_ROWS]
        tuning.tune([p.shape for p in found if p.name == "head"], few, DEVICE, DTYPE)
        if options.fast:
            tuning.try_library([p.shape for p in found if p.name != "head"], buckets, DEVICE, DTYPE)
        tuning.save(options.tiles, DEVICE)
        print(f"tiles measured after {time.perf_counter() - begin:.0f} s: {options.tiles}", flush=True)
    elif known:
        print(f"tiles of {options.tiles}")
    figures, steps = [], dict[tuple[str, int], list[float]]()
    for given in found:
        case = Case(given)
        counts = [rows for rows in options.rows if given.name != "head" or rows <= HEAD_ROWS]
        tuning.prepare([made for rows in counts for made in case.compiled(rows)] + list(case.kinds()))
        kept = None if given.packed else case.keeps_bits()  # a drafter's need not be
        for rows in counts:
            line = {"model": given.model, "product": given.name, **case.measure(rows), "keeps_bits": kept}
            figures.append(line)
            total = steps.setdefault((given.model, rows), [0.0, 0.0])
            total[0] += given.times * line["fused_ms"]
            total[1] += given.times * line["torch_ms"]
            print(
                f"{given.model:13} {given.name:8} {rows:5} rows {line['ours_ms']:8.4f} ms,"
                f" fused {line['fused_ms']:8.4f}, cuBLAS {line['torch_ms']:8.4f}, ratio {line['ratio']:5.2f},"
                f" library fused {line.get('library_ms', 0):8.4f},"
                f" {line['gb_per_s']:6.0f} GB/s, {line['tflops']:5.0f} TFLOPS,"
                f" {'as cuBLAS' if line['as_torch'] else '-':9} {BITS[kept]}",
                flush=True,
            )
        if given is found[0]:
            hosts = case.host_us()
        del case
        gc.collect()
        torch.cuda.empty_cache()
    for (model, rows), (ours, theirs) in steps.items():
        print(f"{model:13} {rows:5} rows: all products of a step {ours:8.3f} ms fused, {theirs:8.3f} ms cuBLAS alone")
    print("on the host, a launch:", *(f"{us:.0f} us in {tile}" for tile, us in hosts), sep="\n  ")
    sums = [{"model": m, "rows": r, "fused_ms": o, "torch_ms": t} for (m, r), (o, t) in steps.items()]
    record = {**machine.record(), "command": "python bench/gpu_kernels.py matmul", "products": figures, "steps": sums}
    results.write(output, record)
    print(f"{time.perf_counter() - begin:.0f} s; {output}")
