"""The base of drafters that read tokens and feed themselves one draft at a time: draft models, GLIDE.

Rows it fed itself and that came true need not be read again, where they are what reading would have made them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Target
from paceline.drafters.cached import TokenReader
from paceline.drafters.vocabulary import VocabularyMap
from paceline.kernels.chain import Chain, Drafts, Link, Picks
from paceline.kernels.ops import LayerSpec
from paceline.models.batch import Batch


class ChainReader(TokenReader):
    """Subclasses load `model` and `vocabulary` in `plan`, and `open` in `attach`."""

    vocabulary: VocabularyMap

    def __init__(self, depth: int) -> None:
        self.max_nodes = self.depth = depth  # drafts one behind the other, at most

    def open(self, target: Target, cache: KVCache, specs: tuple[LayerSpec, ...], reach: int) -> None:
        self.open_cache(target, cache, specs, reach)
        self.depth = min(self.depth, target.max_model_len)  # as far as any draft can reach
        self._links = tuple([Link(self.model if step else None, self.model.head) for step in range(self.depth)])
        rows = target.max_num_seqs + 1
        # What it fed itself from `read` on, [S+1, k], and how much of it, [S+1].
        self._fed = torch.zeros(rows, self.depth, dtype=torch.int64, device=target.device)
        self._num_fed = torch.zeros(rows, dtype=torch.int64, device=target.device)

    def draft_chain(self, context: Context) -> Tensor:
        """Draw a chain, and no logits of it are wanted: [B] how many each may have."""
        most, counts = self.begin(context), None
        if self.model.ops.chains and self.vocabulary.same:
            counts = context.draw_chain(lambda picking: self._draw_at_once(context, most, picking))
        if counts is None:
            self.draw_steps(context, most)
            return most
        return counts

    def draw_steps(self, context: Context, most: Tensor) -> tuple[Tensor, Tensor]:
        """One draft after the other: everyone drafts as long as anyone may; what exceeds a budget is fed to nobody.

        The tokens [B, D]; the logits each was drawn from, in target ids [B, D, V].
        """
        logits = [self.vocabulary.to_target(self.read_up(context))]
        tokens = [self._draw(context, logits[0], parent=-1)]
        for step in range(1, min(context.max_nodes, self.depth)):
            logits.append(self.vocabulary.to_target(self.feed(context, tokens[-1], step, most)))
            tokens.append(self._draw(context, logits[-1], parent=step - 1))
        drawn = torch.stack(tokens, dim=1)
        self._note_fed(context, drawn, most)
        return drawn, torch.stack(logits, dim=1)

    def _draw_at_once(self, context: Context, most: Tensor, picking: Picks | None) -> Drafts:
        """By kernels that draw a chain in one call, once what is unread was read."""
        finals = self.read_finals(context)
        steps = min(context.max_nodes, self.depth)
        links = self._links[:steps]  # all of a tuple is the tuple itself
        given = self.chain_inputs(context)
        chain = Chain(links, self.feeding(context, most), finals=finals, named=given, picking=picking)
        drafts = self.model.ops.chain(chain, self._caches)
        self._note_fed(context, drafts.tokens, most)
        return drafts

    def chain_inputs(self, context: Context) -> dict[str, Tensor]:
        """What its network is given beside tokens, [B, …], the same for every draft."""
        return {}

    def begin(self, context: Context) -> Tensor:
        """Note which drafts came true; [B] what each may have now: the budgets, as far as positions go."""
        if self.keeps_drafts:
            self._count_true(context)
        return torch.minimum(context.budgets, (self._reach - context.lengths).clamp(0, self.depth))

    def _note_fed(self, context: Context, tokens: Tensor, most: Tensor) -> None:
        self._fed[context.slots, : tokens.shape[1]] = tokens
        self._num_fed[context.slots] = (most - 1).clamp(min=0)

    def forget(self, slots: list[int]) -> None:
        super().forget(slots)
        for slot in slots:
            self._num_fed[slot].fill_(0)

    def reset(self) -> None:
        super().reset()
        self._num_fed.zero_()

    def _count_true(self, context: Context) -> None:
        """Drafts it fed itself count as read as far as they came true; the newest token is fed again in any case."""
        if (rounds := context.table.rounds) is not None:
            rounds.count_true(context.slots, self.read, self._fed, self._num_fed, context.table.tables)
            return
        slots, read = context.slots, self.read[context.slots]
        place = torch.arange(self.depth, device=read.device)
        position = read[:, None] + place
        committed = context.table.tokens.tensor[slots[:, None], position.clamp(max=context.table.max_length)]
        same = (committed == self._fed[slots]) & (place < self._num_fed[slots][:, None])
        same = same & (position < context.lengths[:, None] - 1)
        self.read[slots] = read + same.cumprod(1).sum(1)
        self._num_fed.index_fill_(0, slots, 0)

    def _draw(self, context: Context, logits: Tensor, parent: int) -> Tensor:
        parents = torch.full_like(context.slots, parent)[:, None]
        return context.draw(logits[:, None], parents).tokens[:, 0, 0]

    def _translate(self, batch: Batch) -> None:
        batch.ids = self.vocabulary.to_draft(batch.ids)
