"""A drafter in EAGLE's manner with random weights: one layer over (token, state before it), a look at a target layer.

It uses all that a learned drafter will: tapped states, pairs read beside the target's rows, a cache layer of its own,
a target layer read in place, drafts fed back with its own states. Every draft can be computed again from its text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters.base import FINAL, Context, Needs, Taps, Target
from paceline.drafters.cached import StateReader
from paceline.drafters.tree import Proposal
from paceline.kernels.ops import Forward, Head, Heads, Hidden, Inputs, LayerSpec
from paceline.models.batch import Batch

HIDDEN, TARGET_LAYER = 32, 1
OWN, CROSS = Heads(2, 1, 8), Heads(4, 2, 8)  # the tiny target has 4 heads, 2 of keys and values, of 8


class Network:
    def __init__(self, target: Target) -> None:
        self.ops, model = target.model.ops, target.model
        self.embedding, self.head = model.embedding, model.head
        generator = torch.Generator().manual_seed(3)

        def weight(rows: int, columns: int) -> Any:
            dense = torch.randn(rows, columns, generator=generator) / columns**0.5
            return self.ops.pack([dense], torch.float32, target.device)

        self.fusion = weight(HIDDEN, 2 * HIDDEN)
        self.qkv = weight((OWN.num_heads + 2 * OWN.num_kv_heads) * OWN.head_dim, HIDDEN)
        self.out = weight(HIDDEN, OWN.num_heads * OWN.head_dim)
        self.query = weight(CROSS.num_heads * CROSS.head_dim, HIDDEN)
        self.cross = weight(HIDDEN, CROSS.num_heads * CROSS.head_dim)

    def describe(self, f: Forward) -> Any:
        x = f.linear(f.concat(f.embed(self.embedding), f.input("states", HIDDEN)), self.fusion, None)
        x = f.add(x, f.linear(f.attention(f.linear(x, self.qkv, None), OWN, 0, None), self.out, None))
        seen = f.cross_attention(f.linear(x, self.query, None), CROSS, 1, "below")
        return f.add(x, f.linear(seen, self.cross, None))

    def run(self, batch: Batch, named: dict[str, Tensor], caches: Any, rows: Tensor | None = None) -> Hidden:
        head = None if rows is None else Head(self.head, rows)
        return self.ops.run(self, Inputs(batch.ids, batch.layout, named), caches, (), head)


class PairReader(StateReader):
    name = "pair_reader"
    taps = Taps(hidden=(FINAL,), kv=(TARGET_LAYER,))
    max_nodes = 3

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], int]] = []  # committed, drafts, first place it may see

    def create(self) -> PairReader:
        return self

    def plan(self, target: Target) -> Needs:
        self.network = Network(target)
        self._spec = LayerSpec.kv(OWN.num_kv_heads, OWN.head_dim, torch.float32)
        return Needs((self._spec,), HIDDEN)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, [self._spec], target.max_model_len)
        self._newest = torch.zeros(target.max_num_seqs + 1, HIDDEN, device=target.device)  # its own last states

    def read_pairs(self, batch: Batch, states: Tensor, table: Slots) -> None:
        slots, positions = batch.layout.slots, batch.layout.positions
        below = torch.minimum(positions, table.lengths[slots] - 1)
        hidden = self.network.run(batch, {"states": states, "below": below}, self._caches).final
        self.keep(batch, table, (hidden,), (self._newest,))

    def propose(self, context: Context) -> Proposal:
        steps, (most, (state,)) = min(context.max_nodes, self.max_nodes), self.recall(context, (self._newest,))
        logits = self.network.ops.logits(state, self.network.head)
        for step in range(1, steps + 1):
            parents = torch.full_like(context.slots, step - 2)[:, None]
            tokens = context.draw(logits[:, None], parents).tokens[:, 0, 0]
            if step == steps:
                break
            batch = self.step_batch(context, tokens, step, most)
            below = torch.where(batch.layout.slots == context.table.null, 0, context.lengths - 1)
            hidden = self.network.run(batch, {"states": state, "below": below}, self._caches, batch.places.owner)
            assert hidden.logits is not None
            state, logits = hidden.final, hidden.logits
        return context.drawn(self.name, most=most)


class Spied(PairReader):
    """Keeps every draft with the text it was made for."""

    def propose(self, context: Context) -> Proposal:
        proposal = super().propose(context)
        table, sizes = context.table, torch.minimum(proposal.sizes, context.budgets)
        for slot, length, drafts, size in zip(
            context.slot_list, context.lengths.tolist(), proposal.tokens.tolist(), sizes.tolist()
        ):
            first = int(self.first[slot])
            self.seen.append((table.tokens.tensor[slot, :length].tolist(), drafts[:size], first))
        return proposal
