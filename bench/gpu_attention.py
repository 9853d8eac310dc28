"""Paged attention on a GPU: what a layer's look costs beside reading its cache, and whether every row keeps its bits.

    python bench/gpu_attention.py [--output bench/results/gpu_attention.json]
    python bench/gpu_attention.py --sweep [prompt] [decode] [tree]

Times are of 20 layers in a CUDA graph, each with a cache of its own (as far as 4 GB go), divided by 20. --sweep: of
other settings of `attention.py`, fastest first, and nothing else; what is not named in SWEEPS is as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.bench import machine
from paceline.kernels.ops import Heads, LayerCache, Layout, Span, cache_rows
from paceline.kernels.triton import attention
from paceline.kernels.triton.attention import Look, Tiles, attend, tiles_of

RESULTS = Path(__file__).parent / "results" / "gpu_attention.json"
PAGE, LAYERS, MOST_BYTES = 16, 20, 4e9
BANDWIDTH = 4.2e12  # bytes a second, as an H200 reads
SHAPES = {"Llama-8B": Heads(32, 8, 128), "SmolLM2": Heads(9, 3, 64)}
LATENT = Heads(128, 1, 576, 512)  # DeepSeek-V3: one cached row for all heads
TREE = (-1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11, 13, 16, 16, 17, 19, 20, 20, 22, 24, 24, 26, 27)


@dataclass(frozen=True)
class Rows:
    """Of one sequence: positions start …; or the root at start - 1 and a node for each parent (-1: the root)."""

    start: int
    count: int = 1
    parents: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return 1 + len(self.parents) if self.parents else self.count

    @property
    def reach(self) -> int:
        return self.start + self.size


CASES: dict[str, list[Rows]] = {
    **{f"decode, {batch} x 600": [Rows(599)] * batch for batch in (1, 16, 64, 256)},
    **{f"decode, 1 x {length}": [Rows(length - 1)] for length in (8192, 32768)},
    "verify 8 rows, 1 x 600": [Rows(592, 8)],
    "tree of 16 rows, 1 x 300": [Rows(300, parents=TREE[:15])],
    "tree of 32 rows, 1 x 300": [Rows(300, parents=TREE)],
    "tree of 32 rows, 1 x 600": [Rows(600, parents=TREE)],
    "trees of 16 rows, 16 x 600": [Rows(600, parents=TREE[:15])] * 16,
    "trees of 32 rows, 16 x 600": [Rows(600, parents=TREE)] * 16,
    "prefill, 512 rows": [Rows(0, 512)],
    "prefill, 2048 rows": [Rows(0, 2048)],
    "prefill, 512 rows behind 32256": [Rows(32256, 512)],
}


def compiled(num_warps: int, num_stages: int, pairs: int = 64) -> dict[str, Any]:
    return {"PAIRS": pairs, "NARROW": {"num_warps": num_warps, "num_stages": num_stages}}


def chunks(near: int, edge: int, far: int, block: int = 64) -> dict[str, Any]:
    """Part of the arithmetic: one choice for all. A block is of so many positions of 128 values."""
    return {"CHUNK": near, "EDGE": edge, "FAR_CHUNK": far, "BLOCK": 512 * block, "BLOCKS": (32, near)}


# What is measured, and with which settings of `attention.py`.
SWEEPS: dict[str, tuple[list[str], list[dict[str, Any]]]] = {
    "prompt": (
        ["prefill, 512 rows", "prefill, 2048 rows", "prefill, 512 rows behind 32256"],
        [
            {},
            *(compiled(*way) for way in ((8, 3, 128), (8, 4, 128), (4, 4, 64), (4, 2, 64), (8, 3, 64))),
            chunks(256, 4096, 1024),
            chunks(256, 4096, 1024, 128),
        ],
    ),
    "decode": (
        ["decode, 1 x 600", "decode, 16 x 600", "decode, 1 x 8192", "decode, 1 x 32768", "verify 8 rows, 1 x 600"],
        [
            {},
            *(compiled(*way) for way in ((4, 2), (4, 4), (2, 3), (2, 4), (8, 3))),
            *({"AHEAD": values} for values in (16, 32, 128)),
            {"MOST_AHEAD": 32},
            *({"WARPS": 132 * warps} for warps in (4, 12, 16)),
            chunks(128, 1024, 512),
            chunks(256, 4096, 1024),
            chunks(64, 4096, 512),
            chunks(128, 4096, 512, 128),
            chunks(512, 4096, 1024, 128),
        ],
    ),
    "tree": (
        [
            *("tree of 16 rows, 1 x 300", "tree of 32 rows, 1 x 300", "tree of 32 rows, 1 x 600"),
            *("trees of 16 rows, 16 x 600", "trees of 32 rows, 16 x 600"),
        ],
        [
            {},
            *({"ALIKE": warps, "SINGLE_OWN": single} for warps in (1056, 528, 264, 132) for single in (0, 128, 256)),
        ],
    ),
}
SWEPT = {"tree": ("SmolLM2", "Llama-8B")}  # else Llama-8B's alone


def lay(sequences: Sequence[Rows]) -> Layout:
    """Sequences one behind another, their pages shuffled."""
    columns = -(-max(rows.reach for rows in sequences) // PAGE)
    pages = 1 + torch.randperm(len(sequences) * columns, device="cuda").view(-1, columns)
    table = torch.cat([pages, torch.zeros_like(pages[:1])])
    depth = 0
    slots, positions, bases, lines, paths, spans = [], [], [], [], [], []
    for slot, rows in enumerate(sequences):
        spans.append(Span(len(slots), rows.size, rows.reach))
        first = rows.start - 1 if rows.parents else rows.start
        found: list[list[int]] = [[]]
        for node, parent in enumerate(rows.parents):
            found.append([*found[parent + 1], node])
        for index in range(rows.size):
            slots.append(slot)
            positions.append(first + (len(found[index]) if rows.parents else index))
            bases.append(rows.start if rows.parents else rows.reach)
            lines.append(first + index)
            paths.append(found[index] if rows.parents else [])
            depth = max(depth, len(paths[-1]))
    told = [torch.tensor(x, dtype=torch.int64, device="cuda") for x in (slots, positions, bases, lines)]
    path = torch.tensor([p + [-1] * (depth - len(p)) for p in paths], device="cuda") if depth else None
    layout = Layout(*told[:3], path, None, told[3], told[3], table, PAGE, spans)
    layout.write = cache_rows(layout, layout.slots, layout.lines)
    return layout


def make_caches(layout: Layout, heads: Heads, count: int) -> list[LayerCache]:
    """Keys and values; one part for both where the layer is a latent one."""
    shape = heads.num_kv_heads, (int(layout.page_table.max()) + 1) * PAGE, heads.head_dim
    parts = range(2 if heads.value_dim is None else 1)
    return [
        tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for _ in parts)
        for _ in range(count)
    ]


def timed(launch: Callable[[int], object]) -> float:
    """Microseconds a layer, of LAYERS in a graph: the median of 15 replays."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            launch(layer)
    times = []
    for _ in range(18):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / LAYERS)
    return statistics.median(times[3:])


def measure(heads: Heads, sequences: list[Rows]) -> dict[str, Any]:
    layout, look = lay(sequences), Look(heads, heads.head_dim**-0.5)
    values = heads.num_kv_heads * heads.head_dim * (2 if heads.value_dim is None else 1)  # a position
    num_bytes = sum(rows.reach for rows in sequences) * values * 2
    caches = make_caches(layout, heads, int(max(1, min(LAYERS, MOST_BYTES // num_bytes))))
    q = torch.randn(len(layout.slots), heads.num_heads * heads.head_dim, device="cuda", dtype=torch.bfloat16)
    tiles = tiles_of(layout.spans, q.device)
    figures: dict[str, Any] = {
        "microseconds": timed(lambda layer: attend(q, caches[layer % len(caches)], layout, tiles, look)),
        "read_microseconds": num_bytes / BANDWIDTH * 1e6,
    }
    figures["gigabytes_per_second"] = num_bytes / figures["microseconds"] / 1e3
    if sequences[0].count > 8:
        seen = sum(range(sequences[0].start + 1, sequences[0].reach + 1))
        figures["teraflops"] = 4 * heads.num_heads * heads.head_dim * seen / figures["microseconds"] / 1e6
    return figures


def measure_torch(heads: Heads, rows: int) -> float:
    """Microseconds of PyTorch's own attention to a prompt's first rows, its keys in one piece."""
    kv = torch.randn(2, 1, heads.num_kv_heads, rows, heads.head_dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, heads.num_heads, rows, heads.head_dim, device="cuda", dtype=torch.bfloat16)
    return timed(lambda _: F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=True, enable_gqa=True))


def one_tile(layout: Layout, row: int, rows: int, splits: int) -> list[Tiles]:
    first, count = torch.tensor([[row], [rows]], device="cuda")
    return [Tiles(first, count, rows, max(span.reach for span in layout.spans), splits)]


def check(heads: Heads) -> dict[str, Any]:
    """Rows of a chunk that had other bits alone, in other tiles, with other splits or as nodes; how far off all are."""
    start, count = 5490, 48  # behind the edge where chunks grow
    look = Look(heads, heads.head_dim**-0.5)
    chunk = lay([Rows(start, count)])
    cache = make_caches(chunk, heads, 1)[0]
    line = torch.arange(start + count, device="cuda")
    slot = torch.zeros_like(line)
    here = cache_rows(chunk, slot, line)
    q = torch.randn(count, heads.num_heads * heads.head_dim, device="cuda", dtype=torch.bfloat16)
    whole = attend(q, cache, chunk, one_tile(chunk, 0, count, 1), look)

    def as_nodes(begin: int, splits: int) -> Tensor:
        """The rows from `begin` on as nodes 0, 2, 4, … of a tree; the nodes between are somebody else."""
        first, nodes = start + begin, 2 * (count - begin)
        tree = lay([Rows(first, parents=tuple(-1 if node < 2 else node - 2 for node in range(nodes)))])
        tree_cache = make_caches(tree, heads, 1)[0]
        there = cache_rows(tree, slot, torch.where(line < first, line, first + 2 * (line - first)))
        for part, tree_part in zip(cache, tree_cache):
            tree_part[there] = part[here]
        tree_q = torch.randn(1 + nodes, q.shape[1], device="cuda", dtype=torch.bfloat16)
        tree_q[1::2] = q[begin:]
        found = attend(tree_q, tree_cache, tree, one_tile(tree, 0, 1 + nodes, splits), look)
        return torch.cat([whole[:begin], found[1::2]])

    others = {f"{splits} splits": attend(q, cache, chunk, one_tile(chunk, 0, count, splits), look) for splits in (2, 5)}
    for rows, splits in ((1, 1), (1, 3), (4, 1), (8, 2), (16, 1)):
        parts = [one_tile(chunk, row, rows, splits) for row in range(0, count, rows)]
        each = [attend(q, cache, chunk, part, look)[i * rows : (i + 1) * rows] for i, part in enumerate(parts)]
        others[f"tiles of {rows}, {splits} splits"] = torch.cat(each)
    others |= {f"nodes of a tree, {splits} splits": as_nodes(0, splits) for splits in (1, 3)}
    usual, attention.ALIKE = attention.ALIKE, 1
    try:
        others |= {f"nodes in a crowd, from {begin} on": as_nodes(begin, 1) for begin in range(count - 16, count)}
    finally:
        attention.ALIKE = usual
    keys, values = (part[here] for part in cache)
    return {
        "rows": count,
        "rows_with_other_bits": {name: int((found != whole).any(1).sum()) for name, found in others.items()},
        "largest_error": float((whole.double() - exactly(q, keys, values, heads)).abs().max()),
    }


def exactly(q: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
    """The last rows of a text in float64; keys and values [positions, kv heads, D]."""
    group = heads.num_heads // heads.num_kv_heads
    k, v = (part.double().repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
    scores = q.double().view(len(q), heads.num_heads, -1).transpose(0, 1) @ k.transpose(1, 2) * heads.head_dim**-0.5
    positions = torch.arange(len(keys), device=q.device)
    scores = scores.masked_fill(positions > positions[-len(q) :, None], -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1).flatten(1)


def show(name: str, case: str, figures: dict[str, Any]) -> None:
    told = f"{name:9} {case:30} {figures['microseconds']:8.1f} us  read {figures['read_microseconds']:7.1f} us"
    if "torch_microseconds" in figures:
        told += f"  torch {figures['torch_microseconds']:.1f} us"
    if "teraflops" in figures:
        told += f"  {figures['teraflops']:.0f} TFLOP/s"
    print(told, flush=True)


def run(output: Path) -> None:
    """Check, measure, write."""
    checks, times = {}, {}
    for name, heads in SHAPES.items():
        checks[name] = check(heads)
        print(name, json.dumps(checks[name]), flush=True)
        times[name] = {case: measure(heads, sequences) for case, sequences in CASES.items()}
        for case, figures in times[name].items():
            if case.startswith("prefill") and CASES[case][0].start == 0:
                figures["torch_microseconds"] = measure_torch(heads, CASES[case][0].count)
            show(name, case, figures)
    times["latent"] = {case: measure(LATENT, CASES[case]) for case in CASES if case.startswith(("decode", "verify"))}
    for case, figures in times["latent"].items():
        show("latent", case, figures)
    data = {"kind": "gpu_attention", **machine.record(), "checks": checks, "times": times}
    output.write_text(json.dumps(data, indent=1) + "\n")
    print("written to", output.name)


def sweep(shape: str, cases: list[str], settings: list[dict[str, Any]]) -> None:
    """Every case with every setting, fastest first."""
    heads = SHAPES[shape]
    for case in cases:
        found: list[tuple[float, str]] = []
        for setting in settings:
            usual = {name: getattr(attention, name) for name in setting}
            try:
                for name, value in setting.items():
                    setattr(attention, name, value)
                figures = measure(heads, CASES[case])
                told = f"{figures['teraflops']:4.0f} TFLOP/s" if "teraflops" in figures else ""
                found.append((figures["microseconds"], f"{told}  {setting or 'as it is'}"))
            except Exception as error:  # more than the chip has: the others are still worth knowing
                found.append((math.inf, f"{setting} {type(error).__name__}: {str(error)[:80]}"))
            finally:
                for name, value in usual.items():
                    setattr(attention, name, value)
        print(f"{shape}, {case}", flush=True)
        for microseconds, told in sorted(found):
            print(f"{microseconds:10.1f} us  {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What attention costs on a GPU, and whether rows keep their bits.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--sweep", nargs="*", choices=list(SWEEPS), help="other settings, of these; all unless named")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
    elif options.sweep is None:
        run(options.output)
    else:
        for name in options.sweep or SWEEPS:
            for shape in SWEPT.get(name, ("Llama-8B",)):
                sweep(shape, *SWEEPS[name])


if __name__ == "__main__":
    main()
