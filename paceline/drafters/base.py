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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.drafters.observation import Before, Known, Observation, Pairs
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.kernels.chain import Drafts, Picks
from paceline.kernels.ops import LayerSpec
from paceline.models.base import FINAL, Model

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
        self,
        logits: Tensor,
        parents: Tensor,
        count: int = 1,
        likeliest: bool = False,
        ids: Tensor | None = None,
        weight: float = 1.0,
    ) -> Drawn:
        """Pick `count` children of each node parents[b, p] from logits[b, p] ([B, P, V], target ids) and add them.

        The only way to pick a token that was drawn rather than copied: it applies the request's own processors,
        temperature and noise for that node. A parent of PADDING gets none. likeliest: under a rule that asks for the
        distribution of draws, take the likeliest instead of drawing, so that the tree may be pruned. ids [V']: the
        target's id of each logit, for a drafter that knows some of the tokens; None: they are all there, in order.
        weight: of the noise, from 0 to 1, where it is the target's own. A drafter that is seldom wrong counts all of
        it; for one that errs less is better, since the target's logits are spread wider around its own than the noise
        takes them.
        """
        ...

    def draw_chain(self, run: Callable[[Picks | None], Drafts], weight: float = 1.0) -> Tensor | None:
        """Have a chain of max_nodes, or a tree, drawn by kernels that can: run(how tokens are picked) -> drafts.

        [B] how many each has, for `drawn`; `run` keeps them within the budgets. None: nothing was drawn and `run` not
        called, because something besides temperature and noise has a part in the picking, the rule asks for
        distributions, or the device is ahead of the host and has no kernels for a round's small work. Nothing may be
        drawn afterwards.
        """
        ...

    def scores(self) -> Tensor:
        """[B, n] for each node drawn so far the log-probability of its path, as the drafter sees it. Where siblings
        were drawn with the target's noise, with it: of likely tokens those that the noise of this place favours are
        the likelier to come true."""
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

        keep: only the best-scored, at most so many, the best first; their ancestors score no less, so the tree stays
        whole, and a smaller one is the beginning of a larger.
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
    nested = False  # of trees: a smaller budget brings the first nodes of what a larger one brings, or nearly so
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
