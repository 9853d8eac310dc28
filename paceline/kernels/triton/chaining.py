"""A whole chain of drafts without leaving the device: beside each network and its head a launch or two a draft.

Who picks notes the token, and where it is fed to the next network; see `kernels/chain.Chain`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.chain import Chain, Drafts, Feeding
from paceline.kernels.held import hold
from paceline.kernels.ops import Head, Inputs, LayerCache, Layout, Ops, Span
from paceline.kernels.rounds import Keyed
from paceline.kernels.triton import picking
from paceline.kernels.triton.device import PDL, begin, launching
from paceline.kernels.triton.int8 import Matrix
from paceline.kernels.triton.keys import decided
from paceline.kernels.triton.matmul import Bests

_POINTERS = ["keys", "names", "tokens", "places", "slots", "starts", "most", "first", "pages", "out", "counts"]
_NUMBERS = ["parts", "step", "steps", "num_rows", "page_row", "null"]

FEW = 128  # keys of a row that one warp looks at


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _link_kernel(
    keys, names, tokens, places, slots, starts, most, first, pages, out, counts, parts, step, steps, num_rows,
    page_row, null, SIZE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, True)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    if counts is not None:
        tl.store(counts + row, tl.minimum(tl.load(most + row), steps))
    if out is not None:  # what depends on no pick is looked up while keys are on their way
        real = step + 1 < tl.load(most + row)
        slot = tl.where(real, tl.load(slots + row), null)
        line = tl.where(real, tl.load(starts + row) + step, 0)
        lowest = line * 0
        if first is not None:
            lowest = tl.where(real, tl.load(first + slot), 0)
        page = tl.load(pages + slot * page_row + line // SIZE)
    place = tl.maximum(decided(keys + row * parts + part, part < parts), 0)
    token = place
    if names is not None:
        token = tl.load(names + place)
    tl.store(tokens + row * steps + step, token)
    if places is not None:
        tl.store(places + row, place)
    if out is not None:
        tl.store(out + row, token)
        tl.store(out + num_rows + row, slot)
        tl.store(out + 2 * num_rows + row, line)
        tl.store(out + 3 * num_rows + row, tl.where(real, line, 1))
        tl.store(out + 4 * num_rows + row, page * SIZE + line % SIZE)
        tl.store(out + 5 * num_rows + row, lowest)


class _Noted(NamedTuple):
    """Where a pick is noted."""

    tokens: Tensor  # [B, k]
    chosen: Tensor | None  # [B] by number
    counts: Tensor | None  # [B] how many drafts each has, with the last


def draw(
    ops: Ops,
    chain: Chain,
    caches: Sequence[LayerCache],
    bests: Callable[[Tensor, Matrix], tuple[Tensor, Bests]] | None = None,
) -> Drafts:
    """Drafts for each of B rows, one a link, by any kernels whose results stay on the device; bests(finals, head): the
    first one's logits by a product that leaves keys."""
    feeding, steps = chain.feeding, len(chain.links)
    tokens = torch.empty((len(feeding.slots), steps), dtype=torch.int64, device=feeding.slots.device)
    named, taps = dict(chain.named), () if chain.state is None else (chain.state[1],)
    counts = None if chain.least else torch.empty_like(feeding.most)
    fed, own = None if chain.newest is None else Inputs(chain.newest, None, named), list[Tensor]()
    for step, link in enumerate(chain.links):
        greedy, keys = chain.picking is None and link.bias is None, None
        if link.network is not None:
            assert fed is not None
            out = ops.run(link.network, fed, caches, taps, Head(link.head, None, greedy))
            assert out.logits is not None
            logits, keys = out.logits, out.keys
            if chain.state is not None and out.tapped is not None:
                named[chain.state[0]] = out.tapped
        else:
            assert chain.finals is not None, "a chain needs `newest`, or `finals` where its first link has no network"
            if greedy and bests is not None:
                logits, keys = bests(chain.finals, link.head.data)
            else:
                logits = ops.logits(chain.finals, link.head)
        logits = logits if link.bias is None else logits + link.bias
        keys = keys if greedy and keys is not None else _keys(chain, step, logits)
        chosen, last = torch.empty_like(feeding.slots) if chain.least else None, step + 1 == steps
        fed = _pick(chain, step, keys, _Noted(tokens, chosen, counts if last else None), None if last else named)
        if chosen is not None:
            own.append(_chance(chain, logits, chosen))
    return Drafts(tokens, torch.minimum(feeding.most, _likely(own, chain.least)) if counts is None else counts)


def _keys(chain: Chain, step: int, logits: Tensor) -> Tensor:
    keyed, feeding = chain.picking, chain.feeding
    if keyed is None:
        return picking.best_keys(logits)
    assert isinstance(keyed, Keyed)
    keyed = keyed._replace(ahead=step, ids=chain.ids, numbers=True, old=True)
    return picking.sample_keys(logits, feeding.slots, feeding.starts, keyed)


def _pick(chain: Chain, step: int, keys: Tensor, noted: _Noted, named: dict[str, Tensor] | None) -> Inputs | None:
    """Note everyone's pick; what the next network reads, with what is named, if there is one."""
    tokens, chosen, counts = noted
    feeding, (rows, steps), parts = chain.feeding, tokens.shape, keys.shape[1]
    out = None if named is None else torch.empty((6, rows), dtype=torch.int64, device=tokens.device)
    numbers = (parts, step, steps, rows, feeding.page_table.stride(0), len(feeding.page_table) - 1)
    _link_kernel[(rows,)](
        *(keys, chain.ids, tokens, chosen, *feeding[:5], out, counts, *numbers),
        SIZE=feeding.block_size,
        PARTS=triton.next_power_of_2(parts),
        PDL=PDL,
        **launching(1 if parts <= FEW else 4),
    )
    return None if named is None or out is None else Inputs(out[0], _layout(feeding, out), named)


def _layout(feeding: Feeding, out: Tensor) -> Layout:
    _, slots, lines, base, write, first = out.unbind()
    pages, size, rows = feeding.page_table, feeding.block_size, len(slots)
    spans = [Span(row, 1, pages.shape[1] * size) for row in range(rows)]
    return Layout(slots, lines, base, None, first, lines, write, pages, size, spans, hold(_grid(rows, slots.device)))


@functools.lru_cache(maxsize=64)
def _grid(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device)[:, None]


def _chance(chain: Chain, logits: Tensor, chosen: Tensor) -> Tensor:
    """[B] the logarithm of each pick's chance, as the network sees it."""
    keyed = chain.picking
    if isinstance(keyed, Keyed) and keyed.temperature is not None:
        logits = logits / keyed.temperature[chain.feeding.slots][:, None]
    return torch.log_softmax(logits, dim=1).gather(1, chosen[:, None])[:, 0]


def _likely(own: list[Tensor], least: float) -> Tensor:
    """[B] how many drafts come before all of them so far have a chance below `least`."""
    found: Tensor = (torch.stack(own, dim=1).cumsum(1).exp() >= least).cumprod(1).sum(1)
    return found
