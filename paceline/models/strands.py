"""A batch cut into what a module without pages or trees can compute: strands.

A strand is rows of one sequence, each the next position of the one before. A tree is several: where it branches, the
second child begins a strand of its own, behind the first's.

    rows 0 … 4 at x_6, n_0, n_1 (both under x_6), n_2 (under n_0), n_3 (under n_1)
    strands  [0 1 3], then [2 4], which looks at the keys of x_6

Strands of equally many rows are computed together, the shorter pasts padded on the left: what every module is used to.
Knows layouts alone, no module. It reads the layout on the host, and so waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.ops import Layout, cache_rows

MOST_KEYS = 1 << 16  # positions gathered for one pass


@dataclass
class Strand:
    rows: list[int]
    past: int  # positions its first row sees before its own
    stage: int  # it looks at keys of strands of lower stages


@dataclass
class Pass:
    """G strands of R rows, computed together; C positions before them."""

    rows: Tensor  # [G, R] rows of the batch
    write: Tensor  # [G, R] where in the cache their keys go
    keys: Tensor  # [G, C+R] rows of the cache, by position, theirs last; 0, which is nobody's, where there is none
    seen: Tensor | None  # [G, C+R] whether there is one; None: everywhere


def cut(layout: Layout, alone: bool = False) -> list[Strand]:
    """All rows but padding, in an order that computes keys before they are looked at; alone: each row a strand."""
    null = layout.page_table.shape[0] - 1
    path = None if layout.path is None else layout.path.tolist()
    first = [0] * len(layout.positions) if layout.first is None else layout.first.tolist()
    columns = (layout.slots, layout.positions, layout.tree_base, layout.lines)
    strands: list[Strand] = []
    found: dict[tuple[int, int], tuple[int, Strand]] = {}  # slot, line → the row there, and its strand
    for row, (slot, position, base, line) in enumerate(zip(*(column.tolist() for column in columns))):
        if slot == null:
            continue
        depth = position - 1 - base
        before = position - 1 if path is None or depth < 0 else base + path[row][depth]
        parent = found.get((slot, before)) if position > first[row] else None
        strand = None if parent is None else parent[1]
        if parent is None or strand is None or alone or strand.rows[-1] != parent[0]:
            stage = 0 if strand is None else strand.stage + 1
            strand = Strand([], max(position - first[row], 0), stage)
            strands.append(strand)
        strand.rows.append(row)
        found[slot, line] = (row, strand)
    return strands


def group(strands: list[Strand], alike: bool = False) -> Iterator[list[Strand]]:
    """Strands to be computed together, stage after stage; alike: only those with equally much before them."""
    kinds: dict[tuple[int, int, int], list[Strand]] = {}
    for strand in strands:
        kinds.setdefault((strand.stage, len(strand.rows), strand.past if alike else 0), []).append(strand)
    for _, members in sorted(kinds.items(), key=lambda item: item[0]):
        members.sort(key=lambda strand: strand.past)
        while members:
            count = max(1, min(len(members), MOST_KEYS // max(1, members[-1].past + len(members[-1].rows))))
            yield members[-count:]
            del members[-count:]


def gather(layout: Layout, strands: list[Strand]) -> Pass:
    """Where these find their keys."""
    device = layout.positions.device
    rows = torch.tensor([strand.rows for strand in strands], dtype=torch.int64).to(device)
    reach = max(strand.past for strand in strands)
    heads = rows[:, 0]
    position = layout.positions[heads][:, None] - reach + torch.arange(reach, device=device)  # [G, C]
    line = position
    if layout.path is not None and layout.path.shape[1]:
        base = layout.tree_base[heads][:, None]
        depth = (position - base).clamp(0, layout.path.shape[1] - 1)
        line = torch.where(position >= base, base + layout.path[heads].gather(1, depth), position)
    seen = position >= (0 if layout.first is None else layout.first[heads][:, None])
    past = torch.where(seen, cache_rows(layout, layout.slots[heads][:, None], line.clamp(min=0)), 0)
    write = layout.write[rows]
    padded = any(strand.past < reach for strand in strands)
    seen = torch.cat([seen, torch.ones_like(write, dtype=torch.bool)], dim=1)
    return Pass(rows, write, torch.cat([past, write], dim=1), seen if padded else None)
