"""What Medusa, Hydra and MLP speculators share: options that are checked alike, and a head run on states.

Knows networks that read states, and perhaps a token each; must not know any format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Context
from paceline.drafters.checkpoint import check_packing
from paceline.drafters.static_tree import StaticTree, find_tree
from paceline.errors import OptionError
from paceline.kernels.ops import Describes, Head, Hidden, Inputs, Ops, Weight
from paceline.params import check_count


def check_options(num_draft_tokens: Any, quantization: str) -> None:
    if num_draft_tokens is not None:
        check_count("num_draft_tokens", num_draft_tokens, 1)
    check_packing(quantization)


@dataclass(frozen=True)
class StaticHeads:
    """A checkpoint of heads that draft a chain or a static tree.

    num_draft_tokens: the length of a chain, at most the checkpoint's heads, which it is by default; of a tree the most
    nodes.
    tree: the name of a published tree, or a list of rank tuples such as [(0,), (1,), (0, 0)]; None: a chain.
    quantization: int8 or int4 packs the weights at load (native kernels), none keeps floats.
    """

    model: str
    num_draft_tokens: int | None = None
    tree: Any = None
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_options(self.num_draft_tokens, self.quantization)
        if self.tree is not None:
            find_tree(self.tree)


def chain_length(asked: int | None, most: int, label: str) -> int:
    """As long as asked for, or as the checkpoint can; more is refused."""
    if asked is not None and asked > most:
        raise OptionError(f"num_draft_tokens={asked} is too many: {label} drafts {most} at most")
    return asked or most


def fitting_tree(tree: StaticTree, asked: int | None, most: int, label: str) -> StaticTree:
    """The tree, or its likelier part; one deeper than there are heads is refused."""
    if tree.depth > most:
        raise OptionError(f"the tree is {tree.depth} nodes deep, but {label} has {most} heads")
    return tree.first(asked or len(tree.nodes))


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


__all__ = [
    "StaticHeads",
    "chain_length",
    "check_options",
    "draw_next",
    "fitting_tree",
    "newest_tokens",
    "run_head",
]
