"""Tiny models, a device that is rounds behind, and drafters whose luck is known in advance.

Oracle, hopeless and replay drafters work from the recorded plain output: a random-weight drafter accepts nothing, so
equality with it would prove little. They draft on the device, in tensors alone, so that rounds can be ahead of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline import LLM
from paceline.cache.kv import KVCache
from paceline.drafters.base import FINAL, Context, HostRows, Observation, QuietDrafter, Taps, Target
from paceline.drafters.tree import PADDING, Proposal
from paceline.testing import VOCAB as VOCAB
from paceline.testing import set_apart as set_apart
from paceline.testing import tiny_llm as tiny_llm
from paceline.testing import tiny_model as tiny_model

Recorded = dict[tuple[int, ...], list[int]]  # prompt → the whole plain sequence


def check_books(llm: LLM) -> None:
    """Pages and slots are where the sequences say they are, whoever is in flight."""
    pool, running, table = llm.engine.cache.pool, llm.engine.scheduler.running, llm.engine.table
    pool.check()
    held: Counter[int] = Counter(page for sequence in running for page in sequence.pages)
    assert 0 not in held, "page 0 belongs to nobody"
    assert held == {page: refs for page in range(pool.num_pages + 1) if (refs := pool.refs(page))}
    slots = [sequence.slot for sequence in running]
    if table.windowed is not None:
        table.windowed.check()
        assert sorted(table.windowed.held) == sorted(slots)
    assert len(set(slots)) == len(slots) == table.num_slots - table.num_free and table.null not in slots
    flying = {id(sequence) for round in llm.engine._in_flight for sequence in round.plan.sequences}
    assert {id(sequence) for sequence in running if sequence.ahead} == flying
    for sequence in running:
        assert table.length(sequence.slot) == len(sequence.tokens)
        assert len(sequence.keys) <= sequence.num_computed // pool.block_size, "a page nobody has confirmed is shared"


class Known(QuietDrafter):
    """A drafter that knows what plain decoding says next, by slot, on the device."""

    on_device = True

    def __init__(self, recorded: Recorded, num_draft_tokens: int) -> None:
        self.recorded, self.max_nodes = recorded, num_draft_tokens
        self._known: dict[int, tuple[int, ...]] = {}

    def create(self) -> Known:
        return self

    def attach(self, target: Target, cache: KVCache) -> None:
        self._texts = torch.zeros(target.max_num_seqs + 1, 2 * target.max_model_len, dtype=torch.int64)
        self._known.clear()

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._known.pop(slot, None)

    def reset(self) -> None:
        self._known.clear()

    def note(self, rows: HostRows) -> None:
        for slot in rows.slots:
            if slot not in self._known:
                prompt = rows.table.tokens.host[slot, : rows.table.prompt_length(slot)].tolist()
                text = self.recorded[tuple(prompt)]
                self._texts[slot, : len(text)] = torch.tensor(text, dtype=torch.int64)
                self._known[slot] = tuple(prompt)

    def truth(self, context: Context, count: int) -> Tensor:
        """[B, count] the tokens that plain decoding commits next."""
        place = context.lengths[:, None] + torch.arange(count)
        return self._texts[context.slots[:, None], place]


class Oracle(Known):
    """Always right."""

    name = "oracle"

    def propose(self, context: Context) -> Proposal:
        count = min(self.max_nodes, context.max_nodes)
        return Proposal.of_chains(self.truth(context, count), context.budgets.clamp(max=count), self.name)


class Hopeless(Known):
    """Never right."""

    name = "hopeless"

    def __init__(self, recorded: Recorded, num_draft_tokens: int, trees: bool = False) -> None:
        super().__init__(recorded, num_draft_tokens)
        self.trees = trees

    def propose(self, context: Context) -> Proposal:
        count = min(self.max_nodes, context.max_nodes)
        wrong = (self.truth(context, 1) + 1 + torch.arange(count)) % VOCAB
        sizes = context.budgets.clamp(max=count)
        if not self.trees:
            return Proposal.of_chains(wrong, sizes, self.name)
        parents = torch.where(torch.arange(count) < sizes[:, None], -1, PADDING)
        return Proposal(wrong, parents, sizes, chain=False, names=(self.name,), max_depth=1)


@dataclass
class Histogram:
    lengths: Counter[int] = field(default_factory=Counter)
    branches: Counter[int] = field(default_factory=Counter)


def scramble(*values: Any) -> Tensor:
    """A number made of all of them, the same wherever it is asked for."""
    mixed = torch.as_tensor(0)
    for value in values:
        mixed = ((mixed ^ torch.as_tensor(value)) * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 15)
    return mixed


class Replay(Known):
    """Right up to a random depth, the right branch at a random sibling; counts what was accepted.

    Depth d has siblings (3 of them, fewer filled at random) under the right node of the depth above.
    """

    name = "replay"
    max_depth = 4
    max_siblings = 3

    def __init__(self, recorded: Recorded, seed: int, trees: bool) -> None:
        super().__init__(recorded, self.max_depth * (self.max_siblings if trees else 1))
        self.trees, self.seed, self.histogram = trees, seed, Histogram()

    def note(self, rows: HostRows) -> None:
        super().note(rows)
        self._num_drafting = rows.num_drafting

    def captured_as(self) -> None:
        """Never: the host reads what was accepted."""

    def observe(self, seen: Observation) -> None:
        if seen.verdict is None:
            return
        counts = (seen.verdict.nodes >= 0).sum(1).tolist()
        sizes = [2] * self._num_drafting if seen.table.apart else seen.batch.places.sampled_counts
        for nodes, count, size in zip(seen.verdict.nodes.tolist(), counts, sizes):
            if size > 1:
                self.histogram.lengths[count] += 1
                self.histogram.branches.update(node % self.width for node in nodes[:count])

    @property
    def width(self) -> int:
        return self.max_siblings if self.trees else 1

    def propose(self, context: Context) -> Proposal:
        truth = self.truth(context, self.max_depth)  # [B, D]
        depth = torch.arange(self.max_depth)
        luck = scramble(self.seed, context.lengths[:, None], 1)  # [B, 1]
        right = luck % (self.max_depth + 1)  # so many depths hold the right token
        place = scramble(self.seed, context.lengths[:, None], depth, 2) % self.width  # [B, D] among the siblings
        sibling = torch.arange(self.width)
        shift = 1 + scramble(self.seed, context.lengths[:, None, None], depth[:, None], sibling, 3) % (VOCAB - 1)
        wrong = (truth[:, :, None] + shift) % VOCAB
        true = (sibling == place[:, :, None]) & (depth[:, None] < right[:, :, None])
        tokens = torch.where(true, truth[:, :, None], wrong)  # [B, D, W]
        above = torch.where(depth[:-1] < right, place[:, :-1], 0) + self.width * depth[:-1]  # the next depth's parent
        parents = torch.cat([torch.full_like(above[:, :1], -1), above], dim=1)[:, :, None].expand_as(tokens)
        sizes = context.budgets.clamp(max=self.max_nodes)
        proposal = Proposal(
            tokens.flatten(1), parents.flatten(1), sizes, not self.trees, names=(self.name,), max_depth=self.max_depth
        )
        return proposal.cut(sizes)


class DrawnTree(Known):
    """Draws trees through context.draw, from logits that favour the truth: two children of the root, then two of each
    of the two likeliest; `keep` prunes them to the best."""

    name = "drawn_tree"
    trees = True

    def __init__(self, recorded: Recorded, depth: int = 3, keep: int | None = None) -> None:
        super().__init__(recorded, 2 + 4 * (depth - 1) if keep is None else keep)
        self.depth, self.keep = depth, keep

    def propose(self, context: Context) -> Proposal:
        truth = self.truth(context, self.depth)  # [B, D]
        parents = torch.full_like(context.slots, -1)[:, None]  # [B, P]
        for depth in range(self.depth):
            wave = torch.sin(torch.arange(VOCAB) * (1.0 + depth + context.lengths[:, None]))  # [B, V]
            logits = wave.scatter_add(1, truth[:, depth, None], torch.full_like(wave[:, :1], 2.0))
            logits = logits[:, None].expand(-1, parents.shape[1], -1)
            drawn = context.draw(logits, parents, count=2, likeliest=self.keep is not None)
            parents = drawn.nodes.flatten(1)[:, :2]
        return context.drawn(self.name, chain=False, keep=self.keep)


class Tapping(Replay):
    """A replay drafter that also taps hidden states and keeps every pair it is shown, by the tokens before it."""

    name = "tapping"
    taps = Taps(hidden=(FINAL, 1))

    def __init__(self, recorded: Recorded, seed: int) -> None:
        super().__init__(recorded, seed, trees=True)
        self.pairs: dict[tuple[int, ...], Tensor] = {}  # the text up to and including x_{i+1} → f_i
        self.missing: list[tuple[int, int]] = []  # slot and place of pairs that are marked as not there

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        pairs = seen.pairs()
        if not seen.table.apart and seen.before is None:  # what the host knows of them is the same
            known = seen.known()
            assert [item.slot for item in known] == seen.slot_list
            assert [row for item in known for row in item.rows] == pairs.valid.nonzero().flatten().tolist()
            places = [(item.slot, item.start + 1 + i) for item in known for i in range(len(item.rows))]
            kept = (part[pairs.valid].tolist() for part in (pairs.slots, pairs.positions))
            assert places == list(zip(*kept))
        crossing = len(pairs.slots) - len(seen.slots)
        for number, (slot, token, place, valid) in enumerate(
            zip(*(part.tolist() for part in (pairs.slots, pairs.tokens, pairs.positions, pairs.valid)))
        ):
            if valid:
                text = seen.table.tokens.tensor[slot, : place + 1].tolist()
                assert text[-1] == token
                key = tuple(text)
                assert key not in self.pairs or torch.equal(self.pairs[key], pairs.states[number])
                self.pairs[key] = pairs.states[number].clone()
            elif number < crossing and int(seen.batch.slots[number]) != seen.table.null:
                self.missing.append((slot, place))


class Scratching(Replay):
    """Puts, in front of every tree, the right token as a scratch node: it must never be accepted."""

    name = "scratching"
    taps = Taps(node_logits=True)

    def __init__(self, recorded: Recorded, seed: int) -> None:
        super().__init__(recorded, seed, trees=True)
        self.max_nodes += 1
        self.num_logits: list[int] = []

    def observe(self, seen: Observation) -> None:
        if seen.verdict is not None:
            counts = (seen.verdict.nodes >= 0).sum(1).tolist()
            self.histogram.lengths.update(counts)
            assert 0 not in seen.verdict.nodes.tolist(), "a scratch node was accepted"
            assert seen.logits is not None and len(seen.logits) == len(seen.batch.places.sampled)
            self.num_logits += [len(seen.logits)]

    def propose(self, context: Context) -> Proposal:
        tree = super().propose(context)
        first = torch.zeros_like(tree.tokens[:, :1])
        parents = torch.where(tree.parents >= 0, tree.parents + 1, tree.parents)
        scratch = torch.zeros(len(first), 1 + tree.num_nodes, dtype=torch.bool)
        scratch[:, 0] = True
        sizes = torch.minimum(tree.sizes + 1, context.budgets)
        proposal = Proposal(
            torch.cat([self.truth(context, 1), tree.tokens], dim=1),
            torch.cat([first - 1, parents], dim=1),
            sizes,
            chain=False,
            scratch=scratch,
            names=(self.name,),
        )
        return proposal.cut(sizes)
