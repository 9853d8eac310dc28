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


def draw(recordings: Sequence[Recording | None], chain: Chain, layers: Layers) -> Drafts:
    """The recordings are those of the links."""
    found = library()
    assert found is not None
    _check(recordings, chain)
    feeding = chain.feeding
    slots, starts, ends, first, table = (tensor.contiguous() for tensor in feeding[:5])
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
            held.append((tensor.to(torch.float32) if name == "finals" else tensor).contiguous())
            setattr(struct, name, held[-1].data_ptr())
    if chain.picking is not None:
        held.append(_picking(chain.picking))
        struct.picking = ctypes.addressof(held[-1])
    found.paceline_chain(batch, struct)  # what they point at is held until here
    return Drafts(tokens, counts)


def _check(recordings: Sequence[Recording | None], chain: Chain) -> None:
    """The library trusts widths: what each head reads is there, and each network gives the state the next one reads."""
    first, *others = recordings
    if (chain.finals if first is None else chain.newest) is None or None in others:
        raise ValueError("a chain needs `newest`, or `finals` where its first link has no network; all others have one")
    for recording, link in zip(recordings, chain.links):
        width = recording.width if recording is not None else chain.finals.shape[1] if chain.finals is not None else 0
        if width != link.head.shape[1]:
            raise ValueError(f"a chain's head reads {link.head.shape[1]} values, but is given {width}")
        bias, size = link.bias, link.head.shape[0]
        if bias is not None and not (bias.shape == (size,) and bias.dtype == torch.float32 and bias.is_contiguous()):
            raise ValueError(
                f"a head of {size} logits needs a bias of as many, not {tuple(bias.shape)} of {bias.dtype}"
            )
    runs = [recording for recording in recordings if recording is not None]
    for before, run in itertools.pairwise(runs):
        wanted = dict(before.named)
        if chain.state is not None:
            wanted[chain.state[0]] = before.taps[chain.state[1]]
        if list(run.named.items()) != list(wanted.items()) or run.bounds != before.bounds:
            raise ValueError(f"a chain's network asks for {run.named} {run.bounds}; given: {wanted} {before.bounds}")


def _link(recording: Recording | None, link: Link) -> LinkStruct:
    head = link.head.data.address, None if link.bias is None else link.bias.data_ptr()
    if recording is None:
        return LinkStruct(None, 0, *head)
    return LinkStruct(ctypes.addressof(recording.program), recording.final, *head)


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
    slots, temperature, greedy, seeds, samples, positions, stream, extra, tables = picking
    columns = map(_address, (slots, seeds, samples, positions, extra))
    keys = KeysStruct(*columns, *(_address(table, torch.float64) for table in tables), stream)
    return PickingStruct(_address(temperature, torch.float32), _address(greedy), keys)


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.int64) -> int | None:
    """Where the library reads it: values of that dtype, one behind the other."""
    assert tensor is None or (tensor.dtype == dtype and tensor.is_contiguous())
    return None if tensor is None else tensor.data_ptr()


__all__ = ["draw", "pick", "tap_places"]
