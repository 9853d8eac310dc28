"""Batches as a device's rounds are packed: by a frame, here of just the size that is needed."""

from __future__ import annotations

from paceline.cache.slots import Slots
from paceline.models.batch import Batch, Nodes, Static, Work, pack_rows, places_of
from paceline.models.frame import Frame, FrameInput, Size


def pack_in_frame(work: list[Work], table: Slots, block_size: int, nodes: Nodes, num_sampling: int) -> Batch:
    shape = tuple([(item.count, item.num_nodes) for item in work])
    frame = Frame(Size.exact(shape, num_sampling), table.device)
    reaches = [
        item.count + item.num_nodes + (table.length(item.slot) - 1 if item.start is None else item.start)
        for item in work
    ]
    frame.own_spans = places_of(shape, num_sampling, frame.num_nodes, table.device).spans(reaches)
    starts = [item.start for item in work]
    budgets = [item.num_nodes for item in work]
    frame.fill(
        shape, num_sampling, FrameInput([item.slot for item in work], starts, budgets, [False] * len(work)), table
    )
    return pack_rows(frame, frame.slots, frame.starts, table, block_size, Static([], nodes, newest=True))
