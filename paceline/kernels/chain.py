"""Drafts as kernels may draw them in one go, a chain or a tree: what is picked, with what, and where it is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from paceline.kernels.ops import Describes, Weight
from paceline.kernels.rounds import Keyed


class Picking(NamedTuple):
    """How tokens are picked where nothing but temperature and noise has a part in it: a row's logits are divided, noise
    is added, and the likeliest is taken, of equals the one that stands first. Columns hold a value for each slot."""

    slots: Tensor  # [R]
    temperature: Tensor | None  # a column; None: the logits have been divided already
    greedy: Tensor  # a column, int64; not 0: without noise
    seeds: Tensor  # columns: what noise is keyed by, beside position, stream and perhaps one more number
    samples: Tensor
    positions: Tensor  # [R] of the tokens that are picked; of a chain, of the first
    stream: int
    extra: Tensor | None  # [R]
    tables: tuple[Tensor, Tensor]  # of logarithms
    weight: float = 1.0  # of the noise

    def processed(self) -> Picking:
        """The same from logits that have been divided already."""
        return self._replace(temperature=None)


Picks = Picking | Keyed  # the latter where kernels look up the slots themselves


class Feeding(NamedTuple):
    """Where the drafts of B rows are fed, one line after the other."""

    slots: Tensor  # [B]
    starts: Tensor  # [B] the first draft's position
    most: Tensor  # [B] how many drafts each may have; the last is fed to nobody
    first: Tensor | None  # [S+1] the lowest position each slot sees; None: all
    page_table: Tensor  # [S+1, P], the last row nobody's
    block_size: int


class Link(NamedTuple):
    """How one draft comes about: a network run over the token before it (None: what is picked from is there already),
    and the head that picks."""

    network: Describes | None
    head: Weight
    bias: Tensor | None = None  # of the head's logits


@dataclass(frozen=True)
class Chain:
    """Drafts for each of B rows, one a link. Each is fed to the next link's network, which gives what the next is
    picked from and, where it has one, the row's next state."""

    links: Sequence[Link]
    feeding: Feeding
    newest: Tensor | None = None  # [B] the tokens the first network is fed
    finals: Tensor | None = None  # [B, H] what the first is picked from, if it has no network
    named: Mapping[str, Tensor] = field(default_factory=dict)  # what else the networks are given, as `Inputs` have it
    # The input that is a row's state, and the boundary that gives the next one: it may be written over what was given.
    state: tuple[str, int] | None = None
    ids: Tensor | None = None  # [V'] the target's id of each logit; None: its own number
    picking: Picks | None = None  # None: the likeliest
    least: float = 0.0  # a row ends before the draft with which its chain's chance, as the network sees it, falls below


MOST_CHILDREN = 16  # of a node of a tree that is drawn in one go


class Level(NamedTuple):
    """A level of trees that all have one shape: the children of P nodes, at most K of each."""

    seats: Tensor  # [P, K, 2] each child's number in the tree, and its row among the W that are fed; -1: none
    paths: Tensor  # [W, depth] of each that is fed the lines of its ancestors and its own, counted from the first


class Branches(NamedTuple):
    """Trees of N nodes that all have one shape."""

    levels: Sequence[Level]
    counts: Tensor  # [N+1] how many nodes a row has that may have so many
    parents: Tensor  # [N]

    @property
    def children(self) -> int:
        """Of a node, at most."""
        return max([level.seats.shape[1] for level in self.levels], default=0)


class Growing(NamedTuple):
    """Trees that grow where drafts are likely: of a level's nodes those get children whose whole paths are likeliest,
    and of all nodes the likeliest are kept, the likeliest first. How likely one is, is seen with the noise that it was
    picked with."""

    levels: int
    width: int  # nodes of a level that get children
    children: int  # of each of them; no fewer than `width`
    nodes: int  # that are kept


@dataclass(frozen=True)
class Sprout:
    """What trees of drafts for each of B rows grow from. The nodes of a level that get children are fed to the network
    side by side, each with its parent's state."""

    network: Describes
    head: Weight
    feeding: Feeding  # the nodes that are fed lie one behind another
    finals: Tensor  # [B, H] what the first level is picked from
    states: Tensor  # [B, h] and what its nodes are fed with
    state: tuple[str, int]  # the input that is a row's state, and the boundary that gives its children's
    longest: int  # positions are below it
    ids: Tensor | None = None  # as a chain's
    picking: Picks | None = None


class Drafts(NamedTuple):
    """What was drawn: tokens [B, k] in target ids, and how many of them each has, [B]. Of trees their parents, [k] or
    [B, k], and how deep they are at most."""

    tokens: Tensor
    counts: Tensor
    parents: Tensor | None = None
    depth: int = 0
