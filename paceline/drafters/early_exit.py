"""Early exit: the target's own first layers draft for it, then its last norm and its head.

No weights and no cache of its own. What the first layers hold of committed positions the target has written; a draft
writes its rows into the same layers, at the lines behind, where the target writes over them when it checks the draft.

    lines       … n-2   n-1    n    n+1          n committed tokens, of which the target has computed n-1
    layer 0       t      d     d     d           t the target's, d a draft's: the newest token, then draft after draft
    …             t      d     d     d
    layer m-1     t      d     d     d
    layer m       t                              the target alone
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Needs, QuietDrafter, Target
from paceline.drafters.cached import CachedDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.kernels.ops import see_windows
from paceline.models.base import Model
from paceline.params import check_count


@dataclass(frozen=True)
class EarlyExit:
    """The target's first layers as its drafter; no weights.

    layers: how many; a quarter of the target's unless given.
    """

    num_draft_tokens: int = 3
    layers: int | None = None

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens, 1)
        if self.layers is not None:
            check_count("layers", self.layers, 1)

    def create(self) -> EarlyExitDrafter:
        return EarlyExitDrafter(self)


class EarlyExitDrafter(CachedDrafter):
    """Self-speculative decoding by early exit (LayerSkip, Elhoushi et al. 2024), for any target."""

    name = "early_exit"
    learned = False
    note = QuietDrafter.note  # nothing in the cache is its own, so there is nothing to keep count of

    def __init__(self, config: EarlyExit) -> None:
        self.config = config
        self.max_nodes = config.num_draft_tokens

    def plan(self, target: Target) -> Needs:
        model: Model = target.model
        most, asked = model.config.num_layers, self.config.layers
        if asked is not None and asked > most:
            raise OptionError(f"early exit after {asked} layers was asked for, but the target has {most}")
        self.model = model.first_layers(asked or max(1, most // 4))
        return Needs()

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, (), target.max_model_len)
        self._caches = cache.layers

    def propose(self, context: Context) -> Proposal:
        """Everyone drafts as long as anyone may; what exceeds a budget is fed to nobody and cut."""
        steps = min(context.max_nodes, self.max_nodes)
        tokens = context.table.tokens.tensor[context.slots, context.lengths - 1]
        for step in range(steps):
            batch = self.step_batch(context, tokens, step, context.budgets)
            if context.table.windowed is not None:
                see_windows(batch.layout, context.table.windowed.table.tensor)
            logits = self.model.forward(batch, self._caches, rows=batch.places.owner).logits
            assert logits is not None
            parents = torch.full_like(context.slots, step - 1)[:, None]
            tokens = context.draw(logits[:, None], parents).tokens[:, 0, 0]
        return context.drawn(self.name)
