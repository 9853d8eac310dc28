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

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.ops import Layout, Span


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
    device = table.device
    tokens, paths = (None, None) if nodes is None else nodes
    any_nodes = tokens is not None and any(item.num_nodes for item in work)
    # On a CPU the drafted tokens are at hand; elsewhere the host does not wait for them.
    drafted = tokens.tolist() if tokens is not None and any_nodes and device.type == "cpu" else None
    spans: list[Span] = []
    owner: list[int] = []
    slots: list[int] = []
    lines: list[int] = []
    bases: list[int] = []
    nodes_: list[int] = []  # the row's node; negative: a committed token
    ids_: list[int] = []  # 0 for nodes whose tokens only the device knows
    write: list[int] = []
    for number, item in enumerate(work):
        size, end = item.count + item.num_nodes, item.start + item.count
        spans.append(Span(item.slot, len(lines), size, item.start + size))
        line = range(item.start, item.start + size)
        first_page = item.start // block_size
        pages = table.pages.host[item.slot, first_page : (item.start + size - 1) // block_size + 1].tolist()
        owner += [number] * size
        slots += [item.slot] * size
        lines += line
        bases += [end] * size
        nodes_ += range(-item.count, item.num_nodes)
        ids_ += table.tokens.host[item.slot, item.start : end].tolist()
        ids_ += [0] * item.num_nodes if drafted is None or not item.num_nodes else drafted[number][: item.num_nodes]
        write += [pages[at // block_size - first_page] * block_size + at % block_size for at in line]
    sent = torch.tensor([owner, slots, lines, bases, nodes_, ids_, write], dtype=torch.int64)
    sent = sent if device.type == "cpu" else sent.to(device, non_blocking=True)
    owner_t, slot_t, line_t, base_t, node_t, ids, write_t = sent.unbind()
    positions, path = line_t, None
    if tokens is not None and any_nodes and (drafted is None or paths is not None):
        is_node, index = node_t >= 0, node_t.clamp(min=0)
        sequence = torch.where(is_node, owner_t, 0)  # sequences behind the proposal's have no nodes
        if drafted is None:
            ids = torch.where(is_node, tokens[sequence, index], ids)
        if paths is not None:
            path = torch.where(is_node[:, None], paths[sequence, index], -1)
            positions = torch.where(is_node, base_t - 1 + (path >= 0).sum(1), line_t)
    layout = Layout(
        slots=slot_t,
        positions=positions,
        tree_base=base_t,
        path=path,
        first=None if first is None else first[owner_t],
        write=write_t,
        page_table=table.pages.device,
        block_size=block_size,
        spans=spans,
    )
    return Batch(ids, layout)
