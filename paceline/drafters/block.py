"""What drafters share that draft a whole block in one pass: PARD, DFlash.

The drafts of a block do not see one another, so each has a distribution of its own, given the text before the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.models.batch import Nodes


def masks(context: Context, token: int, count: int, sizes: Tensor) -> Nodes:
    """`count` mask tokens for each sequence, of which the first sizes[b] are there."""
    tokens = torch.full((len(context.slot_list), count), token, dtype=torch.int64, device=context.table.device)
    return Nodes(tokens, sizes, None)


def draw_block(context: Context, logits: Tensor, most: Tensor, name: str) -> Proposal:
    """A chain, its token number i drawn from logits[:, i] ([B, k, V], target ids); at most most[b] of them."""
    for step in range(logits.shape[1]):
        context.draw(logits[:, step : step + 1], torch.full_like(context.slots, step - 1)[:, None])
    return context.drawn(name, most=most)
