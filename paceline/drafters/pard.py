"""PARD: a draft model that was taught to draft k tokens in one pass, behind k-1 mask tokens.

    read     … x_{n-1}  x_n   M    M          ordinary causal attention, positions in a row
    drafts              d_1  d_2  d_3         each row's own choice

The rows of mask tokens are disposable: the next round reads the committed tokens over them.

    PARD (An et al. 2025, https://arxiv.org/abs/2504.18583)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Needs, Target
from paceline.drafters.block import draw_block, masks
from paceline.drafters.cached import TokenReader
from paceline.drafters.checkpoint import check_packing, packing
from paceline.drafters.draft_model import DraftModel, load
from paceline.drafters.tree import Proposal
from paceline.errors import CheckpointError
from paceline.models import loader
from paceline.models.batch import Batch
from paceline.models.json_file import read_object
from paceline.params import check_count


@dataclass(frozen=True)
class Pard:
    """A PARD drafter: a folder, a hub id, or a transformers model with a `pard_token` in its config.

    pard_token: the mask token's id, where its config does not say it.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats, as
        those of a model that transformers runs are in any case.
    """

    model: Any
    num_draft_tokens: int = 8
    pard_token: int | None = None
    dtype: str = "auto"
    tokenizer: Any = None
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens, 1)
        check_packing(self.quantization)

    def create(self) -> PardDrafter:
        return PardDrafter(self)


class PardDrafter(TokenReader):
    """One pass a round: what is unread, the newest token, and mask tokens behind it."""

    name = "pard"
    keeps_drafts = False  # it feeds itself mask tokens, not drafts

    def __init__(self, config: Pard) -> None:
        self.config, self.max_nodes = config, config.num_draft_tokens

    def plan(self, target: Target) -> Needs:
        given = self.config
        plain = DraftModel(given.model, 1, False, given.dtype, given.tokenizer)
        self.model, self.vocabulary, self._furthest, dtype = load(plain, target, packing(given.quantization, target))
        self._mask = find_mask(given, self.model.config.vocab_size)
        self._specs = tuple(self.model.layer_specs(dtype))
        return Needs(self._specs)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, self._specs, self._furthest)

    def propose(self, context: Context) -> Proposal:
        steps = min(context.max_nodes, self.max_nodes)
        most = torch.minimum(context.budgets, (self._reach - context.lengths).clamp(0, steps))
        logits = self.read_up(context, masks(context, 0, steps - 1, (most - 1).clamp(min=0)))  # [B, k, V]
        translated = self.vocabulary.to_target(logits.flatten(0, 1)).view(*logits.shape[:2], -1)
        return draw_block(context, translated, most, self.name)

    def _translate(self, batch: Batch) -> None:
        """The mask token is none of the target's."""
        batch.ids = torch.where(batch.places.node < 0, self.vocabulary.to_draft(batch.ids), self._mask)


def find_mask(given: Pard, vocabulary: int) -> int:
    """The mask token's id: the user's, else the config's; it has a row in the embedding."""
    found, label = given.pard_token, given.model
    if found is None and isinstance(given.model, str | Path):
        found = read_object(loader.locate(str(given.model)) / "config.json").get("pard_token")
    elif found is None:
        found, label = getattr(given.model.config, "pard_token", None), "the model's config"
    if not isinstance(found, int) or not 0 <= found < vocabulary:
        raise CheckpointError(
            f"{label} gives pard_token={found!r}; a PARD drafter needs one that its vocabulary of {vocabulary} holds"
        )
    return found
