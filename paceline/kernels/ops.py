"""The operations a model is written in, and what they share: `Weight`, `Layout`, `Heads`, `LayerSpec`.

A model describes its forward once, as calls on a `Forward`. A set of kernels (`Ops`) runs that description: eagerly on
tensors, or by recording it once and handing it to a library that runs the recorded list in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.chain import Branches, Chain, Drafts, Growing, Sprout
    from paceline.kernels.rounds import Rounds

FINAL = -1  # the boundary after the last norm: what the vocabulary head reads

# A layer's parts, each [cache rows, heads, width]; keys and values are the usual two. Only kernels read them: inside a
# head's keys each has its own order.
LayerCache = tuple[Tensor, ...]
Caches = Sequence[LayerCache]
TOGETHER = 16  # a layer has a multiple of so many rows, since kernels may order so many of a head's keys together


@dataclass(frozen=True)
class Part:
    """What a cache layer keeps of one position: so many heads of so many values."""

    heads: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LayerSpec:
    """What a cache layer is made of, and how far back it is looked at (None: all the way)."""

    parts: tuple[Part, ...]
    window: int | None = None

    @classmethod
    def kv(cls, heads: int, width: int, dtype: torch.dtype, window: int | None = None) -> LayerSpec:
        """Keys and values of one shape."""
        return cls((Part(heads, width, dtype),) * 2, window)

    @property
    def row_bytes(self) -> int:
        """Of one position."""
        return sum(part.heads * part.width * part.dtype.itemsize for part in self.parts)


@dataclass
class Weight:
    """A matrix [out, in] as the kernels that made it want it."""

    data: Any
    shape: tuple[int, int]


class Packed(Protocol):
    """A matrix still in a file's quantised blocks."""

    @property
    def kind(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def raw(self) -> Any:
        """[rows, bytes per row]"""
        ...

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...

    def part(self, number: int) -> Packed:
        """One matrix of a stack [count, rows, columns]."""
        ...


@dataclass(frozen=True)
class Heads:
    """How a fused qkv row is cut: query heads, then key heads, then value heads.

    A row of queries alone is described as one with no key heads where it is turned (`rope`), and with those of the
    layer it looks at in `cross_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None  # of value heads, where it is another

    @property
    def value_width(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen by the router's scores, and weighed. Of equals the lower expert is chosen."""

    num_chosen: int
    scoring: str  # one of SCORINGS: what becomes of the router's output before anything else
    normalised: bool  # the weights of the chosen are divided by their sum
    factor: float = 1.0  # and then multiplied by this
    num_groups: int = 1  # so many groups of neighbours; a group counts as much as its best two experts
    kept_groups: int = 1  # only the best groups' experts may be chosen


@dataclass
class Experts:
    """A layer's E experts, each a gated feed-forward: down · (activation(gate · x) * (up · x)).

    The weights are packed as any other, the experts' matrices one under another in their order.
    """

    gate_up: Weight  # [E·2I, H]: gate and up of the first, of the second, …
    down: Weight  # [E·H, I]
    activation: str
    routing: Routing
    bias: Tensor | None = None  # [E] added to the scores to choose by; weights are made of the scores alone


class Span(NamedTuple):
    """The rows of one sequence inside a batch, on the host."""

    row: int  # its first row
    num_rows: int
    reach: int  # none of its rows touches a linear cache position at or beyond this


@dataclass(frozen=True)
class RowTiles:
    """Neighbouring rows of one sequence that may be looked at together, G times; on the device."""

    first: Tensor  # [G] a tile's first row
    count: Tensor  # [G] its rows; 0: nothing to do
    rows: int  # no tile has more
    long: bool = False  # of prompt chunks: hardly any row is a node
    spare: int = 0  # tiles that mostly have nothing to do


@dataclass
class Layout:
    """Where each of T rows finds its keys.

    A sequence's cache is a line of positions cut into pages. Row t sees positions first[t] … positions[t]; those
    below tree_base[t] lie at their own place on the line, and its ancestors among the undecided nodes, by depth, at
    tree_base[t] + path[t, depth]. Without trees (path is None) every position lies at its own place.
    With `until` it sees positions first[t] … until[t] - 1 instead, each at its own place: rows that see one another.

        line      0 … base-1 | base  +1  +2  +3        committed | nodes in proposal order
        a row at node 3 with ancestors 0 and 3:  path = [0, 3]
    """

    slots: Tensor  # [T] row of the page table
    positions: Tensor  # [T]
    tree_base: Tensor  # [T]
    path: Tensor | None  # [T, D]; negative beyond the row's own depth
    first: Tensor | None  # [T] lowest visible position; None: 0
    lines: Tensor  # [T] where on the line this row's own key and value are stored
    write: Tensor  # [T] the same as a row of the cache
    page_table: Tensor  # [S+1, P]
    block_size: int
    spans: list[Span]
    grid: Tensor | None = None  # [B, rows of one] the rows of each sequence, where all have equally many
    until: Tensor | None = None  # [T] only without trees; None: a row sees nothing behind its own position
    tiles: Sequence[RowTiles] | None = None  # of a batch in fixed memory, instead of spans
    windowed: Layout | None = None  # the same under pages that layers with a window have for themselves, if they do


@dataclass
class Hidden:
    """A forward's result: the head's input for every row, the boundaries that were tapped, logits of chosen rows."""

    final: Tensor  # [T, H] after the last norm
    tapped: Tensor | None  # [T, H·taps] in the order asked for
    logits: Tensor | None = None  # [R, V] float32
    best: Tensor | None = None  # [R] the lowest id of the largest logit, -1: none is above -inf; if it cost nothing
    keys: Tensor | None = None  # [R, blocks] what names the best of each block of a row, where kernels leave that


@dataclass(frozen=True)
class Head:
    """Which rows' logits a forward should end with."""

    weight: Weight
    rows: Tensor | None  # [R]; None: all, in their order
    best: bool = True  # whether anybody asks for the likeliest of each


class Forward(Protocol):
    """One forward being described. Values are opaque to the model: tensors [T, …], or places in a recorded list."""

    def embed(self, weight: Weight) -> Any: ...

    def input(self, name: str, width: int) -> Any:
        """A named input of `width` values a row, as it was handed to `run`: a drafter's states, ready embeddings."""
        ...

    def add_positions(self, x: Any, table: Tensor, offset: int) -> Any: ...

    def linear(self, x: Any, weight: Weight, bias: Tensor | None) -> Any:
        """A weight packed in a wider dtype than the rows widens them: routers are float32 in models of 16 bits."""
        ...

    def rms_norm(self, x: Any, weight: Tensor, eps: float, bias: Tensor | None = None) -> Any: ...

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor, eps: float) -> Any: ...

    def activation(self, x: Any, kind: str) -> Any: ...

    def gated(self, x: Any, kind: str) -> Any:
        """activation(first half) · second half."""
        ...

    def experts(self, x: Any, scores: Any, experts: Experts) -> Any:
        """What each row's chosen experts make of it, weighed and summed in ascending order of the experts.

        scores [T, E]: the router's linear of these rows.
        """
        ...

    def add(self, x: Any, y: Any) -> Any: ...

    def multiply(self, x: Any, y: Any) -> Any: ...

    def scale(self, x: Any, factor: float) -> Any: ...

    def concat(self, x: Any, y: Any) -> Any:
        """The values of x, then those of y."""
        ...

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        """A row cut into neighbours of these sizes, which add up to its width."""
        ...

    def head_norm(self, qkv: Any, heads: Heads, query: Tensor, key: Tensor, eps: float) -> Any: ...

    def rope(self, qkv: Any, heads: Heads, cos: Tensor, sin: Tensor) -> Any:
        """Turn queries and keys by the rows' positions; cos and sin are [positions, C].

        The first 2·C values of each head turn, the first C against the second; C is at most D/2.
        """
        ...

    def attention(
        self,
        qkv: Any,
        heads: Heads,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Any:
        """Store keys and values in a cache layer, then let every row look at what it may see.

        A score s is scale · (q · k), scale being D ** -0.5 where it is None; under a softcap c then c · tanh(s / c).
        """
        ...

    def cross_attention(
        self, q: Any, heads: Heads, layer: int, below: str, scale: float | None = None, softcap: float | None = None
    ) -> Any:
        """Queries alone, looking at what a cache layer holds already: nothing is stored.

        Row t sees the positions under below[t], none behind its own, whatever the layout hides of its beginning;
        `below` names an input of whole numbers [T]. They are committed ones: each lies at its own place. A row that
        sees nothing gets zeros.
        """
        ...

    def per_head(self, x: Any, weight: Weight, num_heads: int) -> Any:
        """Each head through a matrix of its own: [T, heads · (kept + A)] → [T, heads · (kept + B)].

        The weight is [heads · B, A], packed from one matrix a head. What a head has before its last A values is kept.
        """
        ...

    def latent_attention(self, q: Any, latent: Any, num_heads: int, rank: int, layer: int, scale: float) -> Any:
        """Store each row's latent [T, W] in a cache layer of one part, then let its heads [T, heads · W] look at them.

        Every head sees the same keys, whose last `rank` values are the values too: [T, heads · rank].
        """
        ...

    def tap(self, boundary: int, x: Any) -> None: ...


@dataclass
class Inputs:
    """T rows: their tokens, where each finds its keys, and whatever else the description asks for by name.

    A network that embeds nothing needs no ids, one without positions and attention no layout.
    """

    ids: Tensor | None  # [T]
    layout: Layout | None
    named: Mapping[str, Tensor] = field(default_factory=dict)  # [T, W]; [T] of int64 for a bound

    @property
    def num_rows(self) -> int:
        if self.ids is not None:
            return self.ids.shape[0]  # len() costs a microsecond
        return self._count_otherwise()

    def _count_otherwise(self) -> int:
        if self.layout is not None:
            return self.layout.positions.shape[0]
        if not self.named:
            raise ValueError("a forward needs token ids, a layout or a named input; it was given none of them")
        return next(iter(self.named.values())).shape[0]

    def find(self, name: str, width: int | None) -> Tensor:
        """The input of that name, its shape checked; width None: a bound, [T] of int64."""
        found = self.named.get(name)
        if found is None:
            given = ", ".join(map(repr, self.named)) or "none"
            raise ValueError(f"the description asks for an input named {name!r}; given: {given}")
        wanted = (self.num_rows,) if width is None else (self.num_rows, width)
        if tuple(found.shape) != wanted or (found.dtype == torch.int64) != (width is None):
            kind = "int64" if width is None else "float"
            raise ValueError(f"input {name!r} must be {kind} of {wanted}, not {found.dtype} of {tuple(found.shape)}")
        return found


class Describes(Protocol):
    """What a model offers its kernels: its forward in their words."""

    def describe(self, f: Forward) -> Any: ...


class Ops(Protocol):
    name: str
    chains: bool  # whether they draw chains in one go
    trees: bool  # and trees, of one shape or grown
    captures: bool  # whether they ask the host for nothing, so that what they do can be captured
    rounds: Rounds | None  # kernels for a round's small work

    def prepare(self, rounds: Iterable[Callable[[], object]]) -> None:
        """Compile what these will launch, where that takes time. Nobody has a slot yet."""
        ...

    def pack(
        self,
        parts: Sequence[Tensor | Packed],
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
        picked: bool = False,
    ) -> Weight:
        """One weight from matrices whose rows are stacked; exact: none is rounded to fewer bits than it has.

        picked: it is for more than linear products (embeddings, experts, heads), which not all kernels do packed.
        """
        ...

    def run(
        self, model: Describes, inputs: Inputs, caches: Sequence[LayerCache], taps: tuple[int, ...], head: Head | None
    ) -> Hidden:
        """caches: the layers the description numbers, its own and then any it borrows; each may have its own shape."""
        ...

    def chain(self, chain: Chain, caches: Sequence[LayerCache]) -> Drafts:
        """A whole chain of drafts, where `chains`."""
        ...

    def tree(self, sprout: Sprout, form: Branches | Growing, caches: Sequence[LayerCache]) -> Drafts:
        """Whole trees of drafts, where `trees`."""
        ...

    def keep(self, caches: Sequence[LayerCache], source: Tensor, target: Tensor) -> None:
        """Move rows [N], or [B, D], of all layers, in every part, to other rows; all are read before any is written.
        Where they are of B sequences, no one's row goes where another's lies."""
        ...

    def embed(self, weight: Weight, ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        """[R, H] → [R, V] float32."""
        ...


def see_windows(layout: Layout, pages: Tensor) -> None:
    """Let layers with a window find their rows under pages [S+1, P] of their own."""
    layout.windowed = windowed = replace(layout, page_table=pages)
    windowed.write = cache_rows(windowed, layout.slots, layout.lines)


def cache_rows(layout: Layout, slots: Tensor, line: Tensor) -> Tensor:
    """Positions on the line of each slot → rows of the cache; slots and line broadcast."""
    pages = layout.page_table[slots, line // layout.block_size]
    return pages * layout.block_size + line % layout.block_size


ACTIVATIONS = ("silu", "gelu_new", "gelu", "relu", "sigmoid")


def activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return torch.nn.functional.silu(x)
    if kind == "relu":
        return torch.relu(x)
    if kind == "sigmoid":
        return torch.sigmoid(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if kind == "gelu_new" else "none")


def unpack(parts: Sequence[Tensor | Packed], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stacked rows as one dense matrix."""
    dense = [part if isinstance(part, Tensor) else part.dequantize() for part in parts]
    return torch.cat([part.to(device, dtype) for part in dense]).contiguous()
