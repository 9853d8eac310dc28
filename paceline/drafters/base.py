"""What a drafter is, what it is told and what it may ask for.

A drafter sees committed tokens, the states it tapped and, through `Context.draw`, the way tokens are picked.
It never sees stop tokens, sampling parameters, acceptance rules or scheduling, and never imports the engine.

One that says `on_device` works in tensors of fixed shape alone: neither `observe` nor `propose` reads data on the host
or loops over sequences, so rounds can be launched before earlier ones have been read, and a round can be captured.
What it counts on the host it counts in `note`, before the round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.kernels.chain import Drafts, Picks
from paceline.kernels.ops import LayerSpec, Layout
from paceline.kernels.rounds import Kept, Rounds
from paceline.models.base import FINAL, Model
from paceline.models.batch import Batch
from paceline.sampling.verify import Followed, Verdict

if TYPE_CHECKING:
    from paceline.cache.kv import KVCache


@dataclass(frozen=True)
class Taps:
    """What a drafter wants of the target's forward."""

    hidden: tuple[int, ...] = ()  # boundaries 0..L: the residual after m layers, un-normed; FINAL = post-norm
    kv: tuple[int, ...] = ()  # layers whose cached keys and values it reads in place
    node_logits: bool = False  # the target's raw logits at every node


@dataclass(frozen=True)
class Needs:
    """What a drafter will allocate, asked before the cache is sized."""

    layers: tuple[LayerSpec, ...] = ()  # of its own, under the target's pages
    tail_width: int = 0  # tapped values kept of every page's last position
    bytes: int = 0  # anything else; weights it has read already are not to be counted again


@dataclass(frozen=True)
class HostRows:
    """What the host knows of the B sequences of a round that is about to run, those that draft first."""

    table: Slots
    slots: list[int]
    starts: list[int | None]  # the first position of each that is computed; None: only the device knows
    sizes: list[int]  # rows of each: committed tokens, and nodes at most
    num_drafting: int
    judged: bool = True  # the drafter's own proposals will be; not: perhaps another's


@dataclass(frozen=True)
class Before:
    """The tapped states of the position in front of each sequence's first row, for sequences seen the first time."""

    states: Tensor  # [B, W]
    known: Tensor  # [B] bool: they were kept. Not: the sequence was seen before, begins at 0, or nobody tapped then
    positions: Tensor  # [B] of the first row


class Pairs(NamedTuple):
    """The token x_{i+1} with the state f_i in front of it, as EAGLE and MTP read them; stored at x_{i+1}'s place."""

    slots: Tensor  # [M] the null slot where not valid
    tokens: Tensor  # [M] x_{i+1}
    positions: Tensor  # [M] i + 1
    states: Tensor  # [M, W] f_i
    valid: Tensor  # [M] bool


class Known(NamedTuple):
    """What the host knows was kept of one sequence."""

    slot: int
    start: int  # the first row's position; each stands one behind the other
    rows: list[int]  # of the batch


@dataclass
class Observation:
    """What just became permanent: T rows, those of the target's batch, of which `kept` are.

    Made for every round; what nobody asks for is not computed.
    """

    table: Slots  # all committed tokens and lengths, the newest token included
    batch: Batch
    verdict: Verdict | Followed | None  # None: prompt chunks alone
    slot_list: list[int]  # of the B sequences
    states: Tensor | None = None  # [T, W] the tapped states, side by side
    before: Before | None = None  # only where a sequence is seen the first time and does not begin at 0
    logits: Tensor | None = None  # [R, V] raw, of the batch's sampled rows
    on_device: bool | None = None  # drafters that are told: those on the device, those on the host; None: all

    @cached_property
    def _at_once(self) -> Kept | None:
        """All that follows, where kernels find it in one launch."""
        return None if self.table.rounds is None else self._find_kept(self.table.rounds, None)

    def _find_kept(self, rounds: Rounds, first: Tensor | None) -> Kept:
        nodes = None if self.verdict is None or not self.batch.places.num_nodes else self.verdict.nodes
        return rounds.observe(self.batch.layout, self.batch.places.rows, nodes, self.table.tables, first)

    @cached_property
    def kept(self) -> Tensor:
        """[T] committed rows, and nodes that were accepted, as far as the sequence goes: a stop may come before."""
        if self._at_once is not None:
            return self._at_once.kept
        places, layout = self.batch.places, self.batch.layout
        real = (layout.slots != self.table.null) & (layout.positions < self.table.lengths[layout.slots] - 1)
        if self.verdict is None or not places.num_nodes:
            return real
        nodes = self.verdict.nodes  # [B, D], -1 beyond
        width = places.num_nodes
        accepted = torch.zeros(len(nodes), width + 1, dtype=torch.bool, device=nodes.device)
        accepted = accepted.scatter(1, torch.where(nodes >= 0, nodes, width), True)[:, :width]
        is_node = places.node >= 0
        sequence = torch.where(is_node, places.owner, 0)
        return real & (~is_node | accepted[sequence, places.node.clamp(min=0)])

    @cached_property
    def slots(self) -> Tensor:
        """[T] the null slot for rows that were not kept."""
        if self._at_once is not None:
            return self._at_once.slots
        return torch.where(self.kept, self.batch.layout.slots, self.table.null)

    @cached_property
    def positions(self) -> Tensor:
        """[T] 0 for rows that were not kept."""
        if self._at_once is not None:
            return self._at_once.positions
        return torch.where(self.kept, self.batch.layout.positions, 0)

    @cached_property
    def following(self) -> Tensor:
        """[T] the committed token behind each kept row; there always is one."""
        if self._at_once is not None:
            return self._at_once.following
        return self.table.tokens.tensor[self.slots, self.positions + 1]

    @cached_property
    def newest(self) -> Tensor:
        """[T] the slot of a kept row in front of its sequence's newest token; the null slot for all others."""
        if self._at_once is not None:
            return self._at_once.newest
        last = self.kept & (self.positions == self.table.lengths[self.slots] - 2)
        return torch.where(last, self.slots, self.table.null)

    @cached_property
    def tails(self) -> Tensor:
        """[T] the page that ends with a kept row; 0 for all others."""
        if self._at_once is not None:
            return self._at_once.tails
        size = self.batch.layout.block_size
        pages = self.table.pages.tensor[self.slots, self.positions // size]
        return torch.where(self.positions % size == size - 1, pages, 0)

    def pair_rows(self, first: Tensor) -> Batch | None:
        """What `pairs` names as rows to be run, where kernels laid them out and none crosses a prefix hit.

        first [S+1]: the lowest position that each slot sees; who asks before anything else was gets it in one launch.
        """
        rounds, layout = self.table.rounds, self.batch.layout
        if rounds is None or self.before is not None:
            return None
        found = self.__dict__.get("_at_once") or self._find_kept(rounds, first)
        self._at_once = found._replace(lowest=None)  # another's slots may see others
        lowest = torch.minimum(first[found.slots], found.behind) if found.lowest is None else found.lowest
        spans = [span._replace(reach=span.reach + 1) for span in layout.spans]  # a row's place is one behind its own
        where = (found.slots, found.behind, found.base, None, lowest, found.behind, found.write)
        rows = Layout(*where, self.table.pages.tensor, layout.block_size, spans, self.batch.places.grid)
        rows.tiles = layout.tiles
        return Batch(found.following, rows, self.batch.places, self.batch.slot_list, found.newest)

    def pairs(self) -> Pairs:
        """Every pair that became whole; after a prefix hit also the one that crosses it, where its state was kept.

        A sequence's first token has no state in front of it. A kept row's pair is whole now, its following token being
        committed; so each pair is seen once, in the round that computed its state.
        """
        assert self.states is not None, "pairs() needs tapped hidden states"
        rows = Pairs(self.slots, self.following, self.positions + 1, self.states, self.kept)
        if self.before is None:
            return rows
        slots = torch.where(self.before.known, self.batch.slots, self.table.null)
        places = torch.where(self.before.known, self.before.positions, 0)
        tokens = self.table.tokens.tensor[slots, places]
        crossing = Pairs(slots, tokens, places, self.before.states.to(self.states.dtype), self.before.known)
        return Pairs(*(torch.cat(parts) for parts in zip(crossing, rows)))

    def known(self) -> list[Known]:
        """What was kept of each sequence, where the host knows it all: without looking at a tensor."""
        assert not self.table.apart
        decided, found = [] if self.verdict is None else self.verdict.read(), []
        for number, (slot, span, (count, _)) in enumerate(
            zip(self.slot_list, self.batch.layout.spans, self.batch.places.shape)
        ):
            start, nodes = span.reach - span.num_rows, decided[number].nodes if number < len(decided) else []
            kept = [*range(count), *(count + node for node in nodes)][: max(0, self.table.length(slot) - 1 - start)]
            found.append(Known(slot, start, [span.row + row for row in kept]))
        return found


class Drawn(NamedTuple):
    """Children that were picked for P parents: tokens in target ids, and their numbers as nodes, all [B, P, count]."""

    tokens: Tensor
    nodes: Tensor


class Context(Protocol):
    """What `propose` works on: B decoding sequences."""

    slot_list: list[int]
    max_nodes: int  # no sequence may get more
    table: Slots

    @property
    def budget_list(self) -> list[int]:
        """The budgets as the host knows them: exact where nothing is ahead, hence for drafters on the host."""
        ...

    @property
    def budgets(self) -> Tensor:
        """[B] the most nodes each may get; the engine cuts what exceeds them. Who proposes chains gets no more than
        there are tokens left; who proposes trees may, for branches: what is deeper than that is drafted in vain."""
        ...

    @property
    def slots(self) -> Tensor:
        """[B] slot_list on the device."""
        ...

    @property
    def lengths(self) -> Tensor:
        """[B] committed lengths, the newest token included."""
        ...

    def only(self, rows: list[int] | None, max_nodes: int, trees: bool = False) -> Context:
        """A fresh context for some of the sequences (None: all), nothing drawn yet, with budgets no larger: those of
        chains, or of trees."""
        ...

    def draw(
        self, logits: Tensor, parents: Tensor, count: int = 1, likeliest: bool = False, ids: Tensor | None = None
    ) -> Drawn:
        """Pick `count` children of each node parents[b, p] from logits[b, p] ([B, P, V], target ids) and add them.

        The only way to pick a token that was drawn rather than copied: it applies the request's own processors,
        temperature and noise for that node. A parent of PADDING gets none. likeliest: under a rule that asks for the
        distribution of draws, take the likeliest instead of drawing, so that the tree may be pruned. ids [V']: the
        target's id of each logit, for a drafter that knows some of the tokens; None: they are all there, in order.
        """
        ...

    def draw_chain(self, run: Callable[[Picks | None], Drafts]) -> Tensor | None:
        """Have a chain of max_nodes, or a tree of one shape, drawn by kernels that can: run(how tokens are picked) ->
        drafts.

        [B] how many each has, for `drawn`; `run` keeps them within the budgets. None: nothing was drawn and `run` not
        called, because something besides temperature and noise has a part in the picking, the rule asks for
        distributions, or the device is ahead of the host and has no kernels for a round's small work. Nothing may be
        drawn afterwards.
        """
        ...

    def scores(self) -> Tensor:
        """[B, n] for each node drawn so far the log-probability of its path, as the drafter sees it."""
        ...

    def likely(self, least: float) -> Tensor:
        """[B] how many drafts of a chain come before the drafter gives all of it so far a chance below `least`.

        Under a rule that asks for the distribution of draws, one more: whether a draft is proposed may depend on those
        before it, never on itself. Else what it would have been unlikely to say would be said too seldom.
        """
        ...

    def drawn(
        self,
        name: str,
        *,
        chain: bool = True,
        keep: int | None = None,
        most: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Proposal:
        """The nodes drawn so far, as a proposal; chain: one child at a time, each of the one before.

        order [n]: which of them stands where, parents before children; None: as they were drawn.

        keep: only the best-scored, at most so many; their ancestors score no less, so the tree stays whole.
        most [B]: cut to so many nodes, below the budgets.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """A running drafter. `name` appears in provenance; the rest is the contract of the design, section 3."""

    name: str
    taps: Taps
    max_nodes: int
    trees: bool  # whether proposals may branch
    on_device: bool  # observe and propose never read data on the host
    learned: bool  # it has weights, which were trained for one target

    def plan(self, target: Target) -> Needs:
        """Read the weights, and say what else there will be to allocate."""
        ...

    def attach(self, target: Target, cache: KVCache) -> None:
        """Once, after `plan`: borrow what it needs, add cache layers."""
        ...

    def note(self, rows: HostRows) -> None:
        """Before each of its rounds: what the host counts. The rest of these is what a captured round replays."""
        ...

    def propose(self, context: Context) -> Proposal: ...

    def observe(self, seen: Observation) -> None:
        """After the target's forward, prompt chunks included."""
        ...

    def forget(self, slots: list[int]) -> None:
        """They are nobody's now. By `fill_`: a number that is assigned to a place is sent, and waits for every round
        in flight."""
        ...

    def reset(self) -> None:
        """Forget all sequences, the ones that are under way included."""
        ...


class DrafterConfig(Protocol):
    """What users write: a frozen dataclass that makes a fresh drafter for each engine."""

    def create(self) -> Drafter: ...


@dataclass(frozen=True)
class Target:
    """What a drafter may borrow from the target."""

    model: Model  # its embedding, its head, its config
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    kernels: str
    origin: str = ""  # the folder or file that its weights came from
    load_format: str = "auto"  # dummy: its weights are random, and a drafter's may be


class QuietDrafter:
    """Empty answers to inherit, for what a drafter has nothing to say to. Who inherits `note` and `observe` is not told
    anything."""

    taps = Taps()
    trees = False
    nested = False  # of trees: a smaller budget brings the first nodes of what a larger one brings
    on_device = False
    told_late = False  # on the host, and `observe` looks at `slot_list` and the host's tables alone
    learned = False

    def create(self) -> Self:
        """So that a drafter may stand where a config does: a fresh copy for each engine, as it is before `plan`."""
        for needed in ("name", "max_nodes", "propose"):
            if not hasattr(self, needed):
                raise OptionError(f"{type(self).__name__} has no {needed}; a drafter has name, max_nodes and propose")
        return copy.deepcopy(self)

    def plan(self, target: Target) -> Needs:
        return Needs(tail_width=sum(target.model.tap_width(tap) for tap in self.taps.hidden))

    def attach(self, target: Target, cache: KVCache) -> None:
        pass

    def note(self, rows: HostRows) -> None:
        pass

    def captured_as(self) -> Hashable | None:
        """What `note` counted that the shape of the coming round depends on; None: it is not to be captured."""
        return ()

    def observe(self, seen: Observation) -> None:
        pass

    def forget(self, slots: list[int]) -> None:
        pass

    def reset(self) -> None:
        pass


def captured_as(drafter: Drafter | None) -> Hashable | None:
    """What its part of a captured round depends on, beside the round's size; None: it is not to be captured, as one
    that does not say."""
    return () if drafter is None else getattr(drafter, "captured_as", lambda: None)()


def is_mixed(drafter: Drafter) -> bool:
    """Whether it drafts on the host, and parts of it on the device: those are told inside of rounds."""
    return getattr(drafter, "mixed", False)


def may_be_told_late(drafter: Drafter) -> bool:
    """Whether rounds without drafts may be ahead of what it was told: it is told inside of them, or looks at nothing
    that a later round writes over."""
    told = getattr(drafter, "observe", None)
    quiet = getattr(told, "__func__", told) is QuietDrafter.observe
    return drafter.on_device or quiet or getattr(drafter, "told_late", False)


def listens(drafter: Drafter | None) -> bool:
    """Whether a drafter has anything of its own to do when it is told of a round."""
    told = (getattr(drafter, name, None) for name in ("note", "observe"))
    quiet = (QuietDrafter.note, QuietDrafter.observe)
    return drafter is not None and any(getattr(one, "__func__", one) is not other for one, other in zip(told, quiet))


__all__ = [
    "FINAL",
    "Before",
    "Context",
    "Drafter",
    "DrafterConfig",
    "Drawn",
    "HostRows",
    "Known",
    "Needs",
    "Observation",
    "Pairs",
    "QuietDrafter",
    "Taps",
    "Target",
    "captured_as",
    "listens",
    "may_be_told_late",
]
