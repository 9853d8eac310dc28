"""A smaller model of the same kind drafts for a larger one.

It keeps cache layers of its own under the target's pages and slots. It needs tokens only, so whatever it has not read
yet (a prompt, the tokens of the last round) it reads when next asked to propose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters import formats
from paceline.drafters.base import Context, Observation, Stateless, Target
from paceline.drafters.tree import Proposal
from paceline.drafters.vocabulary import VocabularyMap, match
from paceline.errors import OptionError
from paceline.models import loader
from paceline.models.batch import Batch, Work, pack

MAX_ROWS = 512  # rows a single pass over unread tokens may have


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


@dataclass
class _Progress:
    """How far the draft model has read one sequence."""

    read: int  # committed positions whose rows are in its cache
    first: int  # rows below it are not its own (a prefix hit it did not fill) and stay masked
    fed: list[int]  # drafts it fed itself after `read`; rows that came true need not be read again


class DraftModelDrafter(Stateless):
    name = "draft_model"
    on_device = False  # what it still has to read is counted on the host

    def __init__(self, config: DraftModel) -> None:
        self.config = config
        self.max_nodes = config.num_draft_tokens
        self._progress: dict[int, _Progress] = {}

    def attach(self, target: Target, cache: KVCache) -> None:
        if isinstance(self.config.model, str):
            formats.check_loads(self.config.model)
        found = loader.find(self.config.model, self.config.tokenizer)
        formats.check_tensors(found.source.label, found.source.names())
        sizes = (target.model.config.vocab_size, found.config.vocab_size)
        self.vocabulary: VocabularyMap = match(
            target.tokenizer, found.tokenizer, sizes, self.config.cross_vocabulary, target.device
        )
        dtype = loader.find_dtype(self.config.dtype, found.config, target.device)
        learned = found.config.architecture in ("gpt2", "opt")
        self._reach = found.config.max_position if learned else target.max_model_len
        loaded = loader.build(
            found, dtype, target.device, target.kernels, target.max_model_len, self.config.quantization
        )
        self.model = loaded.model
        shape = loaded.config
        self._caches = cache.add_layers(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
        self._cache, self._epoch = cache, cache.new_epoch()

    def observe(self, seen: Observation) -> None:
        for slot, start in zip(seen.slots, seen.starts):
            if slot not in self._progress:
                self._progress[slot] = self._begin(seen.table, slot, start)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._progress.pop(slot, None)

    def propose(self, context: Context) -> Proposal:
        """Read what is unread, then feed itself one draft at a time; a sequence is never fed beyond its own budget."""
        lengths = [context.table.length(slot) for slot in context.slot_list]
        for slot in context.slot_list:
            self._catch_up(context.table, slot)
        room = torch.tensor([max(0, self._reach - length) for length in lengths], dtype=torch.int64)
        context.budgets = torch.minimum(context.budgets, room.to(context.budgets.device))
        budgets = context.budgets.tolist()
        rows = [row for row, budget in enumerate(budgets) if budget]
        if not rows:
            return Proposal.empty(len(budgets), context.slots.device)
        tokens = self._draw(context, self._read(context.only(rows)), rows, parent=-1)
        for step in range(1, max(budgets)):
            rows = [row for row, budget in enumerate(budgets) if budget > step]
            work = [Work(context.slot_list[row], lengths[row] - 1 + step, 0, 1) for row in rows]
            batch = self._pack(work, context.table, tokens[rows])
            tokens = self._draw(context, self._logits(batch, torch.arange(len(work))), rows, parent=step - 1)
        proposal = context.drawn(self.name)
        for slot, drafts, budget in zip(context.slot_list, proposal.tokens.tolist(), budgets):
            self._progress[slot].fed = drafts[: max(budget - 1, 0)]
        return proposal

    def _draw(self, context: Context, logits: Tensor, rows: list[int], parent: int) -> Tensor:
        """Draw for all sequences, those without logits from zeros: their nodes lie beyond their budgets."""
        found = self.vocabulary.to_target(logits)
        if len(rows) < len(context.slot_list):
            found = found.new_zeros(len(context.slot_list), found.shape[1]).index_copy(
                0, torch.tensor(rows, device=found.device), found
            )
        return context.draw(found, torch.full_like(context.slots, parent))

    def _catch_up(self, table: Slots, slot: int) -> None:
        """Rows it fed itself count as read as far as they came true."""
        if slot not in self._progress:  # it was switched on after the sequence began
            self._progress[slot] = self._begin(table, slot, table.length(slot) - 1)
        progress = self._progress[slot]
        before = progress.read
        committed = table.tokens.host[slot, progress.read : table.length(slot) - 1].tolist()
        for ours, true in zip(progress.fed, committed):
            if ours != true:
                break
            progress.read += 1
        progress.fed = []
        self._mark(table, slot, before)

    def _read(self, context: Context) -> Tensor:
        """Read every committed token not read yet, in passes of bounded size; logits after each newest token."""
        share = max(1, MAX_ROWS // len(context.slot_list))
        result: dict[int, Tensor] = {}
        while len(result) < len(context.slot_list):
            work = []
            for slot in context.slot_list:
                progress = self._progress[slot]
                count = min(context.table.length(slot) - progress.read, share)
                if slot not in result:
                    work.append(Work(slot, progress.read, count))
            batch = self._pack(work, context.table, None)
            ends = torch.tensor([item.count for item in work]).cumsum(0) - 1
            logits = self._logits(batch, ends)
            for row, item in enumerate(work):
                self._progress[item.slot].read += item.count
                if self._progress[item.slot].read == context.table.length(item.slot):
                    result[item.slot] = logits[row]
                self._mark(context.table, item.slot, item.start)
        return torch.stack([result[slot] for slot in context.slot_list])

    def _pack(self, work: list[Work], table: Slots, tokens: Tensor | None) -> Batch:
        first = torch.tensor([self._progress[item.slot].first for item in work], dtype=torch.int64)
        nodes = None if tokens is None else (tokens, None)
        batch = pack(work, table, self._cache.pool.block_size, nodes, first.to(self._cache.device))
        batch.ids = self.vocabulary.to_draft(batch.ids)
        return batch

    def _logits(self, batch: Batch, rows: Tensor) -> Tensor:
        found = self.model.forward(batch, self._caches, rows=rows.to(self._cache.device)).logits
        assert found is not None
        return found

    def _mark(self, table: Slots, slot: int, start: int) -> None:
        """Pages it has filled from `start` on are its own, so that a later prefix hit may use them."""
        size, progress = self._cache.pool.block_size, self._progress[slot]
        for number in range(start // size, progress.read // size):
            if number * size >= progress.first:
                self._cache.pool.epochs[int(table.pages.host[slot, number])] = self._epoch

    def _begin(self, table: Slots, slot: int, start: int) -> _Progress:
        """Where to start with a sequence whose first `start` positions it did not see computed.

        Its own pages count as read. Pages nobody else holds it may read again; what is left stays masked.
        """
        pool, pages = self._cache.pool, table.pages.host[slot]
        own = -(-start // pool.block_size)
        if start % pool.block_size == 0:
            while own and pool.epochs[int(pages[own - 1])] == self._epoch:
                own -= 1
        alone = -(-start // pool.block_size)
        while alone and pool.refs(int(pages[alone - 1])) == 1:
            alone -= 1
        if alone < own:
            return _Progress(alone * pool.block_size, alone * pool.block_size, [])
        return _Progress(start, min(own * pool.block_size, start), [])
