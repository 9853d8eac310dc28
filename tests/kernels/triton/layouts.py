"""Random layouts and caches, and what each row sees of them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.ops import Heads, Inputs, LayerCache, Layout, Span, cache_rows
from paceline.kernels.reference import ReferenceForward

PAGE = 4
ROOM = 160  # positions a sequence has pages for
BRANCHES = (-1, -1, 0, 1, 2, 4)  # parents of a tree's nodes; the deepest branch is not the last
ONE = Heads(2, 1, 16)


@dataclass(frozen=True)
class Rows:
    """A sequence's rows: positions start … start + count - 1, or a tree's root at start - 1 and a node per parent."""

    start: int
    count: int = 1
    parents: tuple[int, ...] | None = None  # -1: the root

    @property
    def size(self) -> int:
        return self.count if self.parents is None else 1 + len(self.parents)

    def ancestors(self) -> list[list[int]]:
        """Of the root and of every node, by depth, itself included."""
        found: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents or ()):
            found.append([*found[parent + 1], node])
        return found


def lay(sequences: Sequence[Rows], device: torch.device, seed: int = 0) -> Layout:
    """Sequences one behind another, their pages shuffled; the page table's last row is nobody's."""
    generator = torch.Generator().manual_seed(seed)
    columns = ROOM // PAGE
    pages = 1 + torch.randperm(len(sequences) * columns, generator=generator)
    table = torch.cat([pages.view(-1, columns), torch.zeros(1, columns, dtype=torch.int64)])
    deepest = max((len(path) for rows in sequences if rows.parents for path in rows.ancestors()), default=0)
    slots, positions, bases, lines, paths, spans = [], [], [], [], [], []
    for slot, rows in enumerate(sequences):
        spans.append(Span(len(slots), rows.size, rows.start + rows.size))
        for index, ancestors in enumerate(rows.ancestors() if rows.parents is not None else [[]] * rows.count):
            tree = rows.parents is not None
            slots.append(slot)
            positions.append(rows.start - 1 + len(ancestors) if tree else rows.start + index)
            bases.append(rows.start if tree else rows.start + rows.count)
            lines.append(rows.start - 1 + index if tree else rows.start + index)
            paths.append(ancestors + [-1] * (deepest - len(ancestors)))
    told = [torch.tensor(x, dtype=torch.int64, device=device) for x in (slots, positions, bases, lines)]
    path = torch.tensor(paths, device=device) if deepest else None
    layout = Layout(*told[:3], path, None, told[3], told[3], table.to(device), PAGE, spans)
    layout.write = cache_rows(layout, layout.slots, layout.lines)
    return layout


def fill(layout: Layout, heads: Heads, dtype: torch.dtype, exact: bool) -> tuple[Tensor, LayerCache]:
    """Queries and a cache in the engine's own order; exact: of so few bits that no order of summing matters."""
    generator = torch.Generator().manual_seed(1)
    device = layout.positions.device
    rows = (int(layout.page_table.max()) + 1) * PAGE

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator)
        return (x.mul(2).round().clamp(-3, 3).div(4) if exact else x).to(device, dtype)

    widths = heads.head_dim, heads.value_width
    keys, values = (draw(heads.num_kv_heads, rows, width).transpose(0, 1) for width in widths)
    return draw(len(layout.positions), heads.num_heads * heads.head_dim), (keys, values)


def dense(
    q: Tensor, cache: LayerCache, layout: Layout, heads: Heads, scale: float, **rest: float | int | None
) -> Tensor:
    """What the reference kernels let each row see, looked at in float64; rest: softcap, window."""
    softcap, window = rest.get("softcap"), rest.get("window")
    plan = ReferenceForward(Inputs(None, layout), (), ()).plan(heads, None)
    rows = []
    for row, seen in zip(q.double(), plan.lines):
        seen = seen if window is None else seen[-int(window) :]
        key, value = (part[seen].double().transpose(0, 1) for part in cache)  # [kv heads, positions, width]
        scores = row.view(heads.num_kv_heads, -1, heads.head_dim) @ key.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        rows.append((torch.softmax(scores, -1) @ value).flatten())
    return torch.stack(rows)


def only(layout: Layout, row: int) -> Layout:
    """One row of a layout, alone."""
    names = ("slots", "positions", "tree_base", "path", "first", "lines", "write", "until")
    cut = {name: getattr(layout, name)[row : row + 1] for name in names if getattr(layout, name) is not None}
    return replace(layout, **cut, spans=[Span(0, 1, layout.spans[-1].reach)])


def tiles(module: Any, layout: Layout, rows: int = 7, splits: int = 1) -> Any:
    """Every span in tiles of so many rows, and one with nothing to do."""
    cuts = [
        (span.row + at, min(rows, span.num_rows - at)) for span in layout.spans for at in range(0, span.num_rows, rows)
    ]
    first, count = torch.tensor([*cuts, (0, 0)], device=layout.positions.device).t().contiguous()
    reach = max(span.reach for span in layout.spans)
    return [module.Tiles(first, count, rows, reach, splits)]


def watch(monkeypatch: pytest.MonkeyPatch, module: Any, note: Callable[[dict[str, Any]], Any]) -> None:
    """Show what every launch of attention is given to `note`, in front of it."""
    kernel = module.looking.look

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **given: (note(given), kernel[grid](**given))

    monkeypatch.setattr(module.looking, "look", Watched())
