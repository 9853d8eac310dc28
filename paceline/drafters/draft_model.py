"""A smaller model of the same kind drafts for a larger one.

It needs tokens only, so whatever it has not read yet (a prompt, the tokens of the last round) it reads when next asked
to propose. Where the device is ahead of the host, it does so in fixed shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters import formats
from paceline.drafters.base import Context, Needs, Target
from paceline.drafters.cached import CachedDrafter
from paceline.drafters.tree import Proposal
from paceline.drafters.vocabulary import VocabularyMap, match
from paceline.errors import OptionError
from paceline.models import loader
from paceline.models.batch import Batch


@dataclass(frozen=True)
class DraftModel:
    """Any supported causal model as the drafter.

    cross_vocabulary: draft with a model that has another tokenizer, through the tokens both vocabularies share.
    quantization: int8 or int4 packs its float weights at load, whatever the target's are (native kernels).
    """

    model: Any
    num_draft_tokens: int = 5
    cross_vocabulary: bool = False
    dtype: str = "auto"
    tokenizer: Any = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_draft_tokens, int) or self.num_draft_tokens < 1:
            raise OptionError(f"num_draft_tokens={self.num_draft_tokens!r} is not allowed; allowed: 1 or more")

    def create(self) -> DraftModelDrafter:
        return DraftModelDrafter(self)


class DraftModelDrafter(CachedDrafter):
    """Reads what is unread, then feeds itself one draft at a time. Rows it fed itself and that came true are read."""

    name = "draft_model"

    def __init__(self, config: DraftModel) -> None:
        self.config = config
        self.max_nodes = config.num_draft_tokens

    def plan(self, target: Target) -> Needs:
        if isinstance(self.config.model, str):
            formats.check_loads(self.config.model)
        found = loader.find(self.config.model, self.config.tokenizer)
        formats.check_tensors(found.source.label, found.source.names())
        sizes = (target.model.config.vocab_size, found.config.vocab_size)
        self.vocabulary: VocabularyMap = match(
            target.tokenizer, found.tokenizer, sizes, self.config.cross_vocabulary, target.device
        )
        dtype = loader.find_dtype(self.config.dtype, found.config, target.device)
        reach = found.config.max_position if found.config.learned_positions else target.max_model_len
        self._furthest = min(reach, target.max_model_len)
        quantization = self.config.quantization
        loaded = loader.build(found, dtype, target.device, target.kernels, target.max_model_len, quantization)
        self.model = loaded.model
        self._specs = tuple(loaded.model.layer_specs(dtype))
        return Needs(self._specs)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, self._specs, self._furthest)
        rows = target.max_num_seqs + 1
        # What it fed itself from `read` on, [S+1, k], and how much of it, [S+1].
        self._fed = torch.zeros(rows, self.max_nodes, dtype=torch.int64, device=target.device)
        self._num_fed = torch.zeros(rows, dtype=torch.int64, device=target.device)

    def propose(self, context: Context) -> Proposal:
        """Everyone drafts as long as anyone may; what exceeds a budget is fed to nobody and cut."""
        steps = min(context.max_nodes, self.max_nodes)
        self._count_true(context)
        most = torch.minimum(context.budgets, (self._reach - context.lengths).clamp(0, steps))  # [B]
        drawn = self._draw(context, self.read_up(context), parent=-1)
        tokens = [drawn]
        for step in range(1, steps):
            drawn = self._draw(context, self.feed(context, drawn, step, most), parent=step - 1)
            tokens.append(drawn)
        self._fed[context.slots, :steps] = torch.stack(tokens, dim=1)
        self._num_fed[context.slots] = (most - 1).clamp(min=0)
        return context.drawn(self.name, most=most)

    def forget(self, slots: list[int]) -> None:
        super().forget(slots)
        for slot in slots:
            self._num_fed[slot] = 0

    def reset(self) -> None:
        super().reset()
        self._num_fed.zero_()

    def _count_true(self, context: Context) -> None:
        """Drafts it fed itself count as read as far as they came true; the newest token is fed again in any case."""
        slots, read = context.slots, self.read[context.slots]
        place = torch.arange(self.max_nodes, device=read.device)
        position = read[:, None] + place
        committed = context.table.tokens.tensor[slots[:, None], position.clamp(max=context.table.max_length)]
        same = (committed == self._fed[slots]) & (place < self._num_fed[slots][:, None])
        same = same & (position < context.lengths[:, None] - 1)
        self.read[slots] = read + same.cumprod(1).sum(1)
        self._num_fed.index_fill_(0, slots, 0)

    def _draw(self, context: Context, logits: Tensor, parent: int) -> Tensor:
        parents = torch.full_like(context.slots, parent)[:, None]
        return context.draw(self.vocabulary.to_target(logits)[:, None], parents).tokens[:, 0, 0]

    def _translate(self, batch: Batch) -> None:
        batch.ids = self.vocabulary.to_draft(batch.ids)
