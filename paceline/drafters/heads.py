"""What Medusa, Hydra and MLP speculators share: options that are checked alike, and a head run on states.

Knows networks that read states, and perhaps a token each; must not know any format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Context, Target
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.static_tree import StaticTree
from paceline.errors import OptionError
from paceline.kernels.ops import Describes, Head, Hidden, Inputs, Ops, Weight
from paceline.kernels.quantise import METHODS, check_quantization
from paceline.models.weights import Weights

FLOATS = "none"  # the packing that packs nothing


def check_options(num_draft_tokens: Any, quantization: Any) -> None:
    if num_draft_tokens is not None and (type(num_draft_tokens) is not int or num_draft_tokens < 1):
        raise OptionError(f"num_draft_tokens={num_draft_tokens!r} is not allowed; allowed: 1 or more")
    if quantization not in METHODS and quantization != FLOATS:
        raise OptionError(f"quantization={quantization!r} is not known; allowed: {', '.join(METHODS)}, {FLOATS}")


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


def open_weights(checkpoint: Checkpoint, target: Target, quantization: str) -> Weights:
    """Packed as asked for where the native kernels run; else floats."""
    packed = None if quantization == FLOATS else quantization
    check_quantization(packed)
    return checkpoint.weights(target, packed)


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
    "FLOATS",
    "chain_length",
    "check_options",
    "draw_next",
    "fitting_tree",
    "newest_tokens",
    "open_weights",
    "run_head",
]
