"""What a set of kernels may do of a round beside the forward, each in one or two launches: the small work.

Types alone. Whoever has none of them (`Slots.rounds` is None) does the same in tensor operations, which say what is to
come out: every one of these gives the very same bits. B, N, D, R, S, T, V as in the design.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.kernels.ops import Layout


class Tables(NamedTuple):
    """What every slot has a row of, as `Slots` holds it; the last row is nobody's."""

    tokens: Tensor  # [S+1, L]
    lengths: Tensor  # [S+1]
    prompts: Tensor  # [S+1] how long they are
    limits: Tensor  # [S+1]
    pages: Tensor  # [S+1, P]
    max_length: int

    @property
    def null(self) -> int:
        return len(self.tokens) - 1


class Keyed(NamedTuple):
    """How a row of a slot picks its token: columns of the sampler's tables [S+1], and what they do not say."""

    seeds: Tensor
    samples: Tensor
    greedy: Tensor  # 0: with noise
    temperature: Tensor | None  # None: logits have been divided already
    tables: tuple[Tensor, Tensor]  # of logarithms
    stream: int
    extra: Tensor | None = None  # [R] the key's last part
    ids: Tensor | None = None  # [V'] the token of each logit; None: its own number
    rows: Tensor | None = None  # [R] which of the slots and positions that are given each row has; None: in order
    ahead: int = 1  # noise is that of the place so far behind the positions given
    numbers: bool = False  # a pick is named by its logit's number, whatever `ids` say
    weight: float = 1.0  # of the noise
    old: bool = False  # slots, positions, rows and extra were there before the product that made the logits


class Trees(NamedTuple):
    """A proposal's tensors."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]
    sizes: Tensor  # [B]
    chain: bool
    scratch: Tensor | None = None  # [B, N] bool
    origins: Tensor | None = None  # [B, N]

    @property
    def width(self) -> int:
        """Of what `Rounds.walk` writes: a verdict, the size, and of trees parents and scratch; origins."""
        nodes = self.tokens.shape[1]
        shape = () if self.chain else (self.parents, self.scratch)
        return 2 * nodes + 3 + nodes * sum(part is not None for part in (*shape, self.origins))


class Rows(NamedTuple):
    """Rows of a batch before anybody knows where they lie: what follows from counts alone."""

    owner: Tensor  # [T]
    node: Tensor  # [T]
    offset: Tensor  # [T]
    counts: Tensor  # [B]


class Given(NamedTuple):
    """What else a batch is packed from."""

    starts: Tensor | None  # [B]; None, or below 0 and `newest`: where the newest token stands
    newest: bool = False
    tokens: Tensor | None = None  # [B', N] the nodes'; those behind the B' have none
    sizes: Tensor | None = None  # [B']
    paths: Tensor | None = None  # [B', N, D]
    ends: Tensor | None = None  # [B] rows whose line is at or beyond it are padding
    first: Tensor | None = None  # [B]
    since: Tensor | None = None  # [B] rows whose line is before it are padding
    skipped: int = 0  # lines between the committed tokens and the nodes


class PackedRows(NamedTuple):
    """A batch's tensors, [T] each."""

    ids: Tensor
    slots: Tensor
    positions: Tensor
    base: Tensor
    lines: Tensor
    write: Tensor
    first: Tensor | None
    path: Tensor | None  # [T, D]


class Lookup(NamedTuple):
    """How n-gram drafts are looked up: see `drafters/ngram.py`."""

    nodes: int  # the most of this proposal
    min_match: int
    max_match: int
    reference: bool  # its rule
    pace: Tensor | None = None  # [3, S+1] the count, the size last proposed, the length it was proposed at
    max_nodes: int = 0  # the count's limit


class Kept(NamedTuple):
    """What became permanent of a batch's rows, [T] each."""

    kept: Tensor  # bool
    slots: Tensor  # nobody's for rows that were not kept
    positions: Tensor  # 0 for those
    following: Tensor  # the committed token behind each
    behind: Tensor  # its position; 0 for rows that were not kept
    base: Tensor  # one more
    write: Tensor  # the cache row of that position
    newest: Tensor  # the slot where that is the sequence's newest token, else nobody's
    tails: Tensor  # the page that ends with this row, else 0
    lowest: Tensor | None = None  # of the positions up to `behind`, the lowest that the slot sees


class Rounds(Protocol):
    """All on the device, shapes from shapes alone: what they do can be captured."""

    def best(self, values: Tensor) -> Tensor:
        """[R, V] → [R]: the likeliest; ties go to the lowest id; -1 where nothing is above -inf, or with a NaN."""
        ...

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
        """The same of logits with temperature and noise as the slots [R] have them, behind the tokens at positions
        [R]: the noise is that of the place behind."""
        ...

    def sample_keys(self, logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
        """The same before it is decided, for `walk`: [R, parts] keys."""
        ...

    def perturb(self, logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
        """[R, V] float32: what `sample` takes the likeliest of."""
        ...

    def walk(self, choices: Tensor, index: Tensor, trees: Trees, slots: Tensor | None, tables: Tables) -> Tensor:
        """Follow choices [R], or keys that name them, down the trees, index [B, 1+N] saying whose they are; commit to
        slots [B], if given.

        [B, W]: the tokens, the nodes, how many were accepted; then what `Trees.width` names.
        """
        ...

    def pack(self, rows: Rows, slots: Tensor, block_size: int, tables: Tables, given: Given) -> PackedRows:
        """The rows of sequences in slots [B]."""
        ...

    def observe(
        self, layout: Layout, rows: Rows, nodes: Tensor | None, tables: Tables, first: Tensor | None = None
    ) -> Kept:
        """Which rows were kept, with accepted nodes [B', D]; None: those of committed tokens alone.

        first [S+1]: the lowest position that each slot sees; None: nobody asks.
        """
        ...

    def moves(self, nodes: Tensor, roots: Tensor, layout: Layout) -> Tensor:
        """[2, B, D] cache rows, from where to where accepted nodes [B, D] below the rows `roots` [B] move."""
        ...

    def budgets(self, asked: int | Tensor, slots: Tensor, tables: Tables, spread: int) -> tuple[Tensor, Tensor]:
        """[B] nodes that slots [B] have room for, no more than asked (of all, or of each); `spread` more for trees.
        And [B] how long they are."""
        ...

    def cut(
        self, asked: int | Tensor, slots: Tensor, tables: Tables, spread: int, sizes: Tensor, parents: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sizes [B] and parents [B, N] of the same trees with no more nodes than that."""
        ...

    def paths(self, parents: Tensor, depth: int) -> Tensor:
        """[B, N] → [B, N, depth]: for each node its ancestors by depth, itself last; -2 beyond. None is deeper."""
        ...

    def look_up(self, slots: Tensor, budgets: Tensor, lookup: Lookup, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Chains copied from where the last tokens of slots [B] stood before: tokens, parents [B, N], sizes [B]."""
        ...

    def count_true(self, slots: Tensor, read: Tensor, fed: Tensor, num_fed: Tensor, tables: Tables) -> None:
        """Move read [S+1] of slots [B] behind those of its own drafts, num_fed [S+1] of fed [S+1, D], that came true
        and are not the newest token; none is left to be counted."""
        ...

    def put(self, places: Tensor, rows: Sequence[Tensor], kept: Sequence[Tensor], known: Tensor, nobody: int) -> None:
        """rows [T, W] each, into the rows of kept [P, W] that places [T] name, which known [P] bool then says; none
        into `nobody`'s."""
        ...

    def take(
        self, slots: Tensor, budgets: Tensor, known: Tensor, kept: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """budgets [B], 0 where known [S+1] bool does not hold; and of each of kept [S+1, W] the rows of slots [B]."""
        ...
