"""Chains of drafts and single picks, each in one call of the library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels.chain import Chain, Drafts, Link, Picking
from paceline.kernels.cpu.library import BatchStruct, ChainStruct, LinkStruct, PickingStruct, library
from paceline.kernels.ops import Inputs

if TYPE_CHECKING:
    from paceline.kernels.cpu.native import Layers
    from paceline.kernels.cpu.recording import Recording


def draw(recordings: Sequence[Recording | None], chain: Chain, layers: Layers) -> Drafts:
    """The recordings are those of the links."""
    found = library()
    assert found is not None
    feeding = chain.feeding
    table = feeding.page_table
    slots, starts, ends, first = (tensor.contiguous() for tensor in feeding[:4])
    batch = BatchStruct(len(slots))
    batch.slots, batch.positions, batch.first = slots.data_ptr(), starts.data_ptr(), first.data_ptr()
    batch.page_table, batch.table_width, batch.block_size = table.data_ptr(), table.shape[1], feeding.block_size
    batch.layers = layers.address
    held = _give(batch, recordings, chain, slots)
    tokens = torch.zeros((len(slots), len(chain.links)), dtype=torch.int64, device="cpu")
    counts = torch.empty_like(slots)
    links = (LinkStruct * len(recordings))(*map(_link, recordings, chain.links))
    struct = ChainStruct(links, len(recordings), table.shape[0] - 1)
    struct.ends, struct.least = ends.data_ptr(), chain.least
    struct.tokens, struct.counts = tokens.data_ptr(), counts.data_ptr()
    for name, tensor in (("newest", chain.newest), ("ids", chain.ids), ("finals", chain.finals)):
        if tensor is not None:
            held.append(tensor.contiguous())
            setattr(struct, name, held[-1].data_ptr())
    if chain.picking is not None:
        held.append(_picking(chain.picking))
        struct.picking = ctypes.addressof(held[-1])
    found.paceline_chain(batch, struct)  # what they point at is held until here
    return Drafts(tokens, counts)


def _link(recording: Recording | None, link: Link) -> LinkStruct:
    if recording is None:
        return LinkStruct(None, 0, link.head.data.address)
    return LinkStruct(ctypes.addressof(recording.program), recording.final, link.head.data.address)


def _give(batch: BatchStruct, recordings: Sequence[Recording | None], chain: Chain, slots: Tensor) -> list[Any]:
    """The networks' inputs: what is tapped goes where the states are read from. Answers what must be held."""
    named, held = dict(chain.named), list[Any]()
    runs = [recording for recording in recordings if recording is not None]
    if chain.state is not None and runs:
        name, boundary = chain.state
        start, width = named[name], runs[0].taps[boundary]
        rows, before = start.shape  # the first may read a wider state, or a narrower one, than all give
        state = torch.empty(rows * max(before, width), dtype=torch.float32, device="cpu")
        named[name] = state[: rows * before].view(rows, before).copy_(start)
        wanted = torch.tensor([boundary, 0], dtype=torch.int64, device="cpu")
        batch.taps, batch.tap_offsets = wanted.data_ptr(), wanted.data_ptr() + 8
        batch.num_taps, batch.tap_width, batch.tapped_out = 1, width, state.data_ptr()
        held += [wanted, state]
    if runs and runs[0].asks:
        held.append(runs[0].hand_over(batch, Inputs(slots, None, named)))
    return held


def pick(logits: Tensor, picking: Picking) -> Tensor:
    """[R, V] float32 → [R] tokens; -1 where none can be picked."""
    found = library()
    assert found is not None
    logits = logits.to(torch.float32).contiguous()
    best = torch.empty(len(logits), dtype=torch.int64, device="cpu")
    found.paceline_pick(logits.data_ptr(), *logits.shape, _picking(picking), best.data_ptr())
    return best


def _picking(picking: Picking) -> PickingStruct:
    """Points at tensors that the caller holds."""
    columns = (picking.temperature, picking.noisy, picking.first, picking.second, *picking.tables)
    assert all(column.is_contiguous() for column in columns)
    return PickingStruct(*(column.data_ptr() for column in columns))


__all__ = ["draw", "pick"]
