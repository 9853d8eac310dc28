"""What Medusa, Hydra and MLP speculators share: options of static trees, and a head run on states.

Knows networks that read states, and perhaps a token each; must not know any format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Context
from paceline.drafters.checkpoint import chain_length, check_options
from paceline.drafters.static_tree import StaticTree, find_tree
from paceline.errors import OptionError
from paceline.kernels.chain import Chain, Drafts, Feeding, Link, Picks
from paceline.kernels.ops import Describes, Head, Hidden, Inputs, Ops, Weight


@dataclass(frozen=True)
class StaticHeads:
    """A checkpoint of heads that draft a chain or a static tree.

    num_draft_tokens: the length of a chain, at most the checkpoint's heads, which it is by default; of a tree the most
    nodes.
    tree: the name of a published tree, or a list of rank tuples such as [(0,), (1,), (0, 0)]; None: a chain.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    """

    model: str
    num_draft_tokens: int | None = None
    tree: Any = None
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_options(self.num_draft_tokens, self.quantization)
        if self.tree is not None:
            find_tree(self.tree)

    def fit(self, num_heads: int, label: str) -> tuple[StaticTree | None, int]:
        """The tree, or its likelier part (None: a chain), and its nodes; more than so many heads draft is refused."""
        if self.tree is None:
            return None, chain_length(self.num_draft_tokens, num_heads, label)
        tree = find_tree(self.tree)
        if tree.depth > num_heads:
            raise OptionError(f"the tree is {tree.depth} nodes deep, but {label} has {num_heads} heads")
        tree = tree.first(self.num_draft_tokens or len(tree.nodes))
        return tree, len(tree.nodes)


def run_head(ops: Ops, network: Describes, head: Weight, states: Tensor, ids: Tensor | None = None) -> Hidden:
    """Rows of states [T, W], each with its token where the network embeds one: final states, and all rows' logits."""
    rows = torch.arange(states.shape[0], device=states.device)
    return ops.run(network, Inputs(ids, None, {"states": states}), (), (), Head(head, rows))


def newest_tokens(context: Context) -> Tensor:
    """[B] the last committed ones."""
    return context.table.tokens.tensor[context.slots, context.lengths - 1]


def draw_next(context: Context, logits: Tensor | None, step: int) -> Tensor:
    """[B] the next token of a chain, from logits [B, V]; step 0 the first."""
    assert logits is not None
    parents = torch.full_like(context.slots, step - 1)[:, None]
    return context.draw(logits[:, None], parents).tokens[:, 0, 0]


def draw_at_once(
    ops: Ops, context: Context, most: Tensor, steps: Sequence[Link], states: Tensor, boundary: int
) -> Tensor | None:
    """A chain drawn in one call: [B] how many each has; None: it cannot be.

    Each step reads the token before its own and its row's state: states [B, W], then what the step before gave at a
    boundary. No cache is looked at.
    """
    if not ops.chains:
        return None
    table = context.table

    def run(picking: Picks | None) -> Drafts:
        nowhere = Feeding(context.slots, context.lengths, most, None, table.pages.tensor, table.max_length + 1)
        given, own = {"states": states}, ("states", boundary)
        links = steps[: context.max_nodes]
        return ops.chain(Chain(links, nowhere, newest_tokens(context), None, given, own, picking=picking), ())

    return context.draw_chain(run)


__all__ = [
    "StaticHeads",
    "draw_at_once",
    "draw_next",
    "newest_tokens",
    "run_head",
]
