"""One forward's tensors, and `pack`, the only place where offsets are computed.

A batch is rows of tokens, sequence after sequence. Each sequence contributes the committed tokens it has not computed
yet (a prompt chunk, or the newest token alone) and then the nodes of its draft tree.

    sequence with 7 committed tokens, 6 computed, nodes 0, 1 (siblings) and 2 (under 0):

    row            r     r+1   r+2   r+3
    token          x_6   n_0   n_1   n_2
    position       6     7     7     8
    line           6     7     8     9        where its key lies: committed rows at their position, nodes in order
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.ops import Layout, Span, cache_rows


@dataclass(frozen=True)
class Work:
    """One sequence's share of a round: `count` committed tokens from `start` on, then up to `num_nodes` nodes."""

    slot: int
    start: int
    count: int
    num_nodes: int = 0


@dataclass
class Batch:
    ids: Tensor  # [T]
    layout: Layout
    adapters: Tensor | None = None  # [T] room for an adapter id per token

    @property
    def positions(self) -> Tensor:
        return self.layout.positions


def pack(
    work: list[Work],
    table: Slots,
    block_size: int,
    nodes: tuple[Tensor, Tensor | None] | None = None,
    first: Tensor | None = None,
) -> Batch:
    """Work → tensors.

    `nodes` are (tokens [B, N], paths [B, N, D] or None for chains), rows in the order of `work`;
    `first` [B] is the lowest position each sequence may see.
    """
    device = table.tokens.device.device
    counts = np.array([item.count for item in work])
    extra = np.array([item.num_nodes for item in work])
    starts = np.array([item.start for item in work])
    slots = np.array([item.slot for item in work])
    sizes = counts + extra
    rows = np.cumsum(sizes) - sizes
    sequence = np.repeat(np.arange(len(work)), sizes)
    offset = np.arange(int(sizes.sum())) - rows[sequence]
    line = starts[sequence] + offset
    base = (starts + counts)[sequence]
    node = offset - counts[sequence]  # negative: a committed token
    host = np.stack([sequence, slots[sequence], line, base, node])
    owner_t, slots_t, line_t, base_t, node_t = torch.from_numpy(host).to(device, non_blocking=True)
    spans = [Span(item.slot, int(row), int(size), item.start + int(size)) for item, row, size in zip(work, rows, sizes)]
    is_node = node_t >= 0
    index = node_t.clamp(min=0)
    ids = table.tokens.device[slots_t, torch.where(is_node, 0, line_t)]
    positions, path = line_t, None
    if nodes is not None and int(extra.sum()):
        tokens, paths = nodes
        sequence_t = torch.where(is_node, owner_t, 0)  # sequences behind the proposal's have no nodes
        ids = torch.where(is_node, tokens[sequence_t, index], ids)
        if paths is not None:
            path = torch.where(is_node[:, None], paths[sequence_t, index], -1)
            depth = (path >= 0).sum(1)
            positions = torch.where(is_node, base_t - 1 + depth, line_t)
    layout = Layout(
        slots=slots_t,
        positions=positions,
        tree_base=base_t,
        path=path,
        first=None if first is None else first[owner_t],
        write=torch.empty(0),
        page_table=table.pages.device,
        block_size=block_size,
        spans=spans,
    )
    layout.write = cache_rows(layout, slots_t, line_t)
    return Batch(ids, layout)
