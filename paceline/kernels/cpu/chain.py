"""Chains of drafts and single picks, each in one call of the library."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.kernels.chain import Chain, Drafts, Link, Picking
from paceline.kernels.cpu.library import BatchStruct, ChainStruct, KeysStruct, LinkStruct, PickingStruct, library
from paceline.kernels.ops import Inputs

if TYPE_CHECKING:
    from paceline.kernels.cpu.native import Layers
    from paceline.kernels.cpu.recording import Recording


class Linked:
    """Links as the library reads them, and the recordings of their networks. It trusts widths: they are compared here,
    once."""

    def __init__(self, chain: Chain, recordings: Sequence[Recording | None]) -> None:
        self.links, self.state = chain.links, chain.state
        self.runs = [recording for recording in recordings if recording is not None]
        self.starts = recordings[0] is not None  # with a network
        if None in recordings[1:]:
            raise ValueError("a chain's links have networks, all but the first")
        for recording, link in zip(recordings, chain.links):
            _check_head(link, link.head.shape[1] if recording is None else recording.width)
        for before, run in itertools.pairwise(self.runs):
            wanted = dict(before.named)
            if chain.state is not None:
                wanted[chain.state[0]] = before.taps[chain.state[1]]
            if list(run.named.items()) != list(wanted.items()) or run.bounds != before.bounds:
                given = f"{wanted} {before.bounds}"
                raise ValueError(f"a chain's network asks for {run.named} {run.bounds}; given: {given}")
        self.array = (LinkStruct * len(recordings))(*map(_link, recordings, chain.links))

    def fits(self, chain: Chain) -> bool:
        """Whether they are this chain's."""
        return self.links is chain.links and self.state == chain.state


def draw(linked: Linked, chain: Chain, layers: Layers) -> Drafts:
    found = library()
    assert found is not None
    if (chain.newest if linked.starts else chain.finals) is None:
        raise ValueError("a chain needs `newest`, or `finals` where its first link has no network")
    feeding = chain.feeding
    slots, starts, most, table = (
        tensor.contiguous() for tensor in (feeding.slots, feeding.starts, feeding.most, feeding.page_table)
    )
    batch = BatchStruct(len(slots))
    batch.slots, batch.positions, batch.first = slots.data_ptr(), starts.data_ptr(), _address(feeding.first)
    batch.page_table, batch.table_width, batch.block_size = table.data_ptr(), table.shape[1], feeding.block_size
    batch.layers = layers.address
    held = _give(batch, linked.runs, chain, slots)
    tokens = torch.empty((len(slots), len(chain.links)), dtype=torch.int64, device="cpu")
    counts = torch.empty(len(slots), dtype=torch.int64, device="cpu")
    struct = ChainStruct(linked.array, len(chain.links), table.shape[0] - 1)
    struct.most, struct.least = most.data_ptr(), chain.least
    struct.tokens, struct.counts = tokens.data_ptr(), counts.data_ptr()
    for name, tensor in (("newest", chain.newest), ("ids", chain.ids)):
        if tensor is not None:
            held.append(tensor.contiguous())
            setattr(struct, name, held[-1].data_ptr())
    if chain.finals is not None:
        _check_head(chain.links[0], chain.finals.shape[1])
        held.append(chain.finals.to(torch.float32).contiguous())
        struct.finals = held[-1].data_ptr()
    if isinstance(chain.picking, Picking):
        held.append(_picking(chain.picking))
        struct.picking = ctypes.addressof(held[-1])
    found.paceline_chain(batch, struct)  # what they point at is held until here
    return Drafts(tokens, counts)


def _check_head(link: Link, width: int) -> None:
    size, bias = link.head.shape[0], link.bias
    if width != link.head.shape[1]:
        raise ValueError(f"a chain's head reads {link.head.shape[1]} values, but is given {width}")
    if bias is not None and not (bias.shape == (size,) and bias.dtype == torch.float32 and bias.is_contiguous()):
        raise ValueError(f"a head of {size} logits needs a bias of as many, not {tuple(bias.shape)} of {bias.dtype}")


def _link(recording: Recording | None, link: Link) -> LinkStruct:
    head = link.head.data.address, None if link.bias is None else link.bias.data_ptr()
    if recording is None:
        return LinkStruct(None, 0, *head)
    return LinkStruct(ctypes.addressof(recording.program), recording.final, *head)


def _give(batch: BatchStruct, runs: list[Recording], chain: Chain, slots: Tensor) -> list[Any]:
    """The networks' inputs: what is tapped goes where the states are read from. Answers what must be held."""
    named, held = dict(chain.named), list[Any]()
    if chain.state is not None and runs:
        name, boundary = chain.state
        start, width = named[name], runs[0].taps[boundary]
        rows, before = start.shape
        state = start = start.to(torch.float32).contiguous()
        if before < width:  # the first may read a narrower state than all give
            state = torch.empty(rows * width, dtype=torch.float32, device="cpu")
            start = state[: rows * before].view(rows, before).copy_(start)
        named[name] = start
        wanted, _ = tap_places((boundary,), (width,))
        batch.taps, batch.tap_offsets = wanted.data_ptr(), wanted.data_ptr() + 8
        batch.num_taps, batch.tap_width, batch.tapped_out = 1, width, state.data_ptr()
        held += [wanted, state]
    if runs and runs[0].asks:
        held.append(runs[0].hand_over(batch, Inputs(slots, None, named)))
    return held


@functools.lru_cache(maxsize=64)
def tap_places(taps: tuple[int, ...], widths: tuple[int, ...]) -> tuple[Tensor, int]:
    """[2, taps] the boundaries, and where in a row of tapped states each begins; how wide that row is."""
    *offsets, width = itertools.accumulate(widths, initial=0)
    return torch.tensor([taps, offsets], dtype=torch.int64, device="cpu"), width


def pick(logits: Tensor, picking: Picking) -> Tensor:
    """[R, V] → [R] tokens; -1 where none can be picked."""
    found = library()
    assert found is not None
    logits = logits.to(torch.float32).contiguous()
    best = torch.empty(len(logits), dtype=torch.int64, device="cpu")
    found.paceline_pick(logits.data_ptr(), *logits.shape, _picking(picking), best.data_ptr())
    return best


def _picking(picking: Picking) -> PickingStruct:
    """Points at tensors that the caller holds."""
    slots, temperature, greedy, seeds, samples, positions, stream, extra, tables, weight = picking
    columns = map(_address, (slots, seeds, samples, positions, extra))
    keys = KeysStruct(*columns, *(_address(table, torch.float64) for table in tables), stream)
    return PickingStruct(_address(temperature, torch.float32), _address(greedy), keys, weight)


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.int64) -> int | None:
    """Where the library reads it: values of that dtype, one behind the other."""
    assert tensor is None or (tensor.dtype == dtype and tensor.is_contiguous())
    return None if tensor is None else tensor.data_ptr()


__all__ = ["Linked", "draw", "pick", "tap_places"]
