"""Paged attention on a GPU: what a layer's look costs beside reading its cache, and whether every row keeps its bits.

    python bench/gpu_attention.py [--output bench/results/gpu_attention.json] [--sweep]

Times are of 20 layers in a CUDA graph, each with a cache of its own (as far as 4 GB go), divided by 20. --sweep: the
same for other sizes of blocks and chunks, which are constants of the arithmetic, and of a prompt's programs.
"""

from __future__ import annotations

import argparse
import json
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
from paceline.kernels.triton.attention import Look, Tiles, attend, chunks_of, tiles_of

RESULTS = Path(__file__).parent / "results" / "gpu_attention.json"
PAGE, LAYERS, MOST_BYTES = 16, 20, 4e9
BANDWIDTH = 4.2e12  # bytes a second, as an H200 reads
SHAPES = {"Llama-8B": Heads(32, 8, 128), "SmolLM2": Heads(9, 3, 64)}
LATENT = Heads(128, 1, 576, 512)  # DeepSeek-V3: one cached row for all heads
TREE = (-1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 7, 8, 10, 10, 11, 13, 16, 16, 17, 19, 20, 20, 22, 24, 24, 26, 27)
SWEEP = ((64, 128), (64, 256), (64, 512), (128, 256), (128, 512), (32, 128))


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
    "decode, 1 x 32768": [Rows(32767)],
    "verify 8 rows, 1 x 600": [Rows(592, 8)],
    "tree of 32 rows, 1 x 600": [Rows(600, parents=TREE)],
    "prefill, 512 rows": [Rows(0, 512)],
    "prefill, 2048 rows": [Rows(0, 2048)],
}


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
    if len(sequences) == 1 and sequences[0].start == 0:
        kv = torch.randn(2, 1, heads.num_kv_heads, len(q), heads.head_dim, device="cuda", dtype=torch.bfloat16)
        queries = q.view(1, len(q), heads.num_heads, -1).transpose(1, 2).contiguous()
        figures["torch_microseconds"] = timed(
            lambda _: F.scaled_dot_product_attention(queries, kv[0], kv[1], is_causal=True, enable_gqa=True)
        )
        products = 2 * heads.num_heads * heads.head_dim * len(q) * (len(q) + 1)
        figures["teraflops"] = products / figures["microseconds"] / 1e6
    return figures


def one_tile(layout: Layout, row: int, rows: int, splits: int) -> list[Tiles]:
    first, count = torch.tensor([[row], [rows]], device="cuda")
    return [Tiles(first, count, rows, chunks_of(max(span.reach for span in layout.spans)), splits)]


def check(heads: Heads) -> dict[str, Any]:
    """Rows of a chunk that had other bits alone, in other tiles, with other splits or as a branch; how far off all are.

    The tree's nodes 0, 2, 4, … are the chunk's rows, the nodes between are somebody else.
    """
    start, count = 1490, 48
    look = Look(heads, heads.head_dim**-0.5)
    chunk = lay([Rows(start, count)])
    parents = tuple(-1 if node < 2 else node - 2 for node in range(2 * count))
    tree = lay([Rows(start, parents=parents)])
    (keys, values), (tree_keys, tree_values) = make_caches(chunk, heads, 1)[0], make_caches(tree, heads, 1)[0]
    line = torch.arange(start + count, device="cuda")
    slot = torch.zeros_like(line)
    here = cache_rows(chunk, slot, line)
    there = cache_rows(tree, slot, torch.where(line < start, line, start + 2 * (line - start)))
    tree_keys[there], tree_values[there] = keys[here], values[here]
    q = torch.randn(count, heads.num_heads * heads.head_dim, device="cuda", dtype=torch.bfloat16)
    tree_q = torch.randn(len(tree.slots), q.shape[1], device="cuda", dtype=torch.bfloat16)
    tree_q[1::2] = q
    cache, tree_cache = (keys, values), (tree_keys, tree_values)
    whole = attend(q, cache, chunk, one_tile(chunk, 0, count, 1), look)
    others = {f"{splits} splits": attend(q, cache, chunk, one_tile(chunk, 0, count, splits), look) for splits in (2, 5)}
    for rows, splits in ((1, 1), (1, 3), (4, 1), (8, 2), (16, 1)):
        parts = [one_tile(chunk, row, rows, splits) for row in range(0, count, rows)]
        each = [attend(q, cache, chunk, part, look)[i * rows : (i + 1) * rows] for i, part in enumerate(parts)]
        others[f"tiles of {rows}, {splits} splits"] = torch.cat(each)
    for splits in (1, 3):
        found = attend(tree_q, tree_cache, tree, one_tile(tree, 0, 1 + 2 * count, splits), look)
        others[f"nodes of a tree, {splits} splits"] = found[1::2]
    return {
        "rows": count,
        "rows_with_other_bits": {name: int((found != whole).any(1).sum()) for name, found in others.items()},
        "largest_error": float((whole.double() - exactly(q, keys[here], values[here], heads)).abs().max()),
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
    told = f"{name:9} {case:26} {figures['microseconds']:8.1f} us  read {figures['read_microseconds']:7.1f} us"
    if "torch_microseconds" in figures:
        told += f"  torch {figures['torch_microseconds']:.1f} us  {figures['teraflops']:.0f} TFLOP/s"
    print(told, flush=True)


def run(output: Path, *others: str) -> None:
    """Check, measure, write; others: --sweep."""
    checks, times = {}, {}
    for name, heads in SHAPES.items():
        checks[name] = check(heads)
        print(name, json.dumps(checks[name]), flush=True)
        times[name] = {case: measure(heads, sequences) for case, sequences in CASES.items()}
        for case, figures in times[name].items():
            show(name, case, figures)
    times["latent"] = {case: measure(LATENT, CASES[case]) for case in CASES if case.startswith(("decode", "verify"))}
    for case, figures in times["latent"].items():
        show("latent", case, figures)
    data = {"kind": "gpu_attention", **machine.record(), "checks": checks, "times": times}
    if "--sweep" in others:
        data["sweep"] = sweep()
    output.write_text(json.dumps(data, indent=1) + "\n")
    print("written to", output.name)


def sweep() -> dict[str, Any]:
    """The cases that blocks, chunks and programs matter to, for other sizes of them."""
    usual, found = (attention.BLOCK, attention.CHUNK), {}
    chosen = (
        "decode, 1 x 600",
        "decode, 64 x 600",
        "decode, 1 x 32768",
        "verify 8 rows, 1 x 600",
        "prefill, 2048 rows",
    )
    for block, chunk in SWEEP:
        attention.BLOCK, attention.CHUNK = block, chunk
        for name, heads in SHAPES.items():
            for case in chosen:
                figures = found[f"{block}/{chunk} {name} {case}"] = measure(heads, CASES[case])
                show(f"{block}/{chunk}", f"{name} {case}", figures)
    attention.BLOCK, attention.CHUNK = usual
    usual_prompt, attention.PROMPT = attention.PROMPT, (64, 4, 3)
    for name, heads in SHAPES.items():
        for case in ("prefill, 512 rows", "prefill, 2048 rows"):
            figures = found[f"64 pairs {name} {case}"] = measure(heads, CASES[case])
            show("64 pairs", f"{name} {case}", figures)
    attention.PROMPT = usual_prompt
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What attention costs on a GPU, and whether rows keep their bits.")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--sweep", action="store_true", help="other sizes of blocks and chunks too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    run(options.output, *(["--sweep"] if options.sweep else []))


if __name__ == "__main__":
    main()
