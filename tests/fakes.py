"""Tiny models, an engine that is always one round late, and drafters whose luck is known in advance.

Oracle, hopeless and replay drafters work from the recorded plain output: a random-weight drafter accepts nothing, so
equality with it would prove little.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from paceline import LLM
from paceline.drafters.base import FINAL, Context, Observation, Stateless, Taps
from paceline.drafters.tree import Proposal
from paceline.engine.engine import Engine

VOCAB = 97
Recorded = dict[tuple[int, ...], list[int]]  # prompt → the whole plain sequence


@functools.cache
def tiny_model(layers: int = 2, hidden: int = 32, seed: int = 0, vocab: int = VOCAB) -> Any:
    """A random Llama; wide initial weights, so that its choices are far from uniform."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval().float()


def tiny_llm(drafter: Any = None, **options: Any) -> LLM:
    return LLM(tiny_model(), drafter=drafter, **{"kernels": "reference", "max_model_len": 200, **options})


class LateEngine(Engine):
    """A round can be read only when a later one has been launched, or when none could be."""

    def _arrived(self, launched: bool) -> bool:
        return len(self._in_flight) > 1 or not launched


def make_late(llm: LLM) -> LLM:
    llm.engine.__class__ = LateEngine
    return llm


class Known(Stateless):
    """A drafter that knows what plain decoding says next."""

    def __init__(self, recorded: Recorded, num_draft_tokens: int) -> None:
        self.recorded, self.max_nodes = recorded, num_draft_tokens

    def create(self) -> Known:
        return self

    def truth(self, context: Context, slot: int) -> list[int]:
        """The tokens that plain decoding commits next."""
        length, prompt = context.table.length(slot), context.table.prompt_length(slot)
        tokens = context.table.tokens.host[slot, :length].tolist()
        return self.recorded[tuple(tokens[:prompt])][length:]

    def propose(self, context: Context) -> Proposal:
        trees = [self.tree(context, slot, budget) for slot, budget in zip(context.slot_list, context.budgets.tolist())]
        return Proposal.of_trees(trees, context.slots.device, self.name)

    def tree(self, context: Context, slot: int, budget: int) -> tuple[list[int], list[int]]:
        raise NotImplementedError


class Oracle(Known):
    """Always right."""

    name = "oracle"

    def tree(self, context: Context, slot: int, budget: int) -> tuple[list[int], list[int]]:
        tokens = self.truth(context, slot)[:budget]
        return tokens, list(range(-1, len(tokens) - 1))


class Hopeless(Known):
    """Never right."""

    name = "hopeless"

    def __init__(self, recorded: Recorded, num_draft_tokens: int, trees: bool = False) -> None:
        super().__init__(recorded, num_draft_tokens)
        self.trees = trees

    def tree(self, context: Context, slot: int, budget: int) -> tuple[list[int], list[int]]:
        tokens = [(token + 1 + i) % VOCAB for i, token in enumerate(self.truth(context, slot)[:1] * budget)]
        wrong = [token for token in tokens if token != self.truth(context, slot)[0]]
        return wrong, [-1] * len(wrong) if self.trees else list(range(-1, len(wrong) - 1))


@dataclass
class Histogram:
    lengths: Counter[int] = field(default_factory=Counter)
    branches: Counter[int] = field(default_factory=Counter)


class Replay(Known):
    """Right up to a random depth, the right branch at a random sibling; counts what was accepted."""

    name = "replay"
    max_depth = 4
    max_siblings = 3

    def __init__(self, recorded: Recorded, seed: int, trees: bool) -> None:
        super().__init__(recorded, self.max_depth * (self.max_siblings if trees else 1))
        self.trees, self.random, self.histogram = trees, random.Random(seed), Histogram()
        self._planted: dict[int, tuple[int, list[int]]] = {}  # slot → committed length, branch of each right node

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._planted.pop(slot, None)

    def observe(self, seen: Observation) -> None:
        for slot in seen.slots:
            if slot in self._planted:
                before, branches = self._planted.pop(slot)
                accepted = seen.table.length(slot) - before - 1
                self.histogram.lengths[accepted] += 1
                self.histogram.branches.update(branches[:accepted])

    def tree(self, context: Context, slot: int, budget: int) -> tuple[list[int], list[int]]:
        truth = self.truth(context, slot)
        right = self.random.randint(0, self.max_depth)  # this many depths hold the right token
        tokens: list[int] = []
        parents: list[int] = []
        branches: list[int] = []
        parent = -1
        for depth, token in enumerate(truth[: self.max_depth]):
            siblings = self.random.randint(1, self.max_siblings) if self.trees else 1
            place = self.random.randrange(siblings) if depth < right else siblings
            wrong = self.random.sample([t for t in range(VOCAB) if t != token], siblings)
            here = [token if i == place else wrong[i] for i in range(siblings)]
            following = len(tokens) + (place if depth < right else 0)
            tokens += here
            parents += [parent] * siblings
            if depth < right and following < budget:
                branches.append(place)
            parent = following
        self._planted[slot] = (context.table.length(slot), branches)
        return tokens[:budget], parents[:budget]


class DrawnTree(Known):
    """Draws two children at every level through context.draw, from logits that favour the truth."""

    name = "drawn_tree"
    trees = True

    def __init__(self, recorded: Recorded, depth: int = 3) -> None:
        super().__init__(recorded, 2 * depth)
        self.depth = depth

    def propose(self, context: Context) -> Proposal:
        truths = [self.truth(context, slot) for slot in context.slot_list]
        for depth in range(self.depth):
            logits = torch.zeros(len(truths), VOCAB)
            for row, truth in enumerate(truths):
                logits[row] = torch.sin(torch.arange(VOCAB) * (1.0 + depth + len(truth)))
                if depth < len(truth):
                    logits[row, truth[depth]] += 2.0
            context.draw(logits, torch.full_like(context.slots, 2 * depth - 2 if depth else -1), count=2)
        return context.drawn(self.name, chain=False)


class Tapping(Replay):
    """A replay drafter that also taps hidden states and keeps every pair it is shown, by absolute position."""

    name = "tapping"
    taps = Taps(hidden=(FINAL, 1))

    def __init__(self, recorded: Recorded, seed: int) -> None:
        super().__init__(recorded, seed, trees=True)
        self.pairs: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}  # (slot, position) → following token, state
        self.carried: dict[tuple[int, int], torch.Tensor] = {}  # (slot, start) → state before a prefix hit

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        tokens, positions, states = seen.shifted()
        slots, _ = seen.rows()
        for row in range(len(tokens)):
            self.pairs[int(slots[row]), int(positions[row])] = (int(tokens[row]), states[row].clone())
        assert seen.before is not None
        for row, (slot, start) in enumerate(zip(seen.slots, seen.starts)):
            if start:
                self.carried[slot, start] = seen.before[row].clone()


class Scratching(Replay):
    """Adds, in front of every tree, the right token as a scratch node: it must never be accepted."""

    name = "scratching"
    taps = Taps(node_logits=True)

    def __init__(self, recorded: Recorded, seed: int) -> None:
        super().__init__(recorded, seed, trees=True)
        self.max_nodes += 1
        self.num_logits: list[int] = []

    def observe(self, seen: Observation) -> None:
        super().observe(seen)
        assert seen.node_logits is not None
        self.num_logits += [len(logits) for logits in seen.node_logits]

    def propose(self, context: Context) -> Proposal:
        trees = []
        for slot, budget in zip(context.slot_list, context.budgets.tolist()):
            tokens, parents = self.tree(context, slot, budget - 1)
            trees.append(([self.truth(context, slot)[0], *tokens], [-1, *(p + 1 if p >= 0 else -1 for p in parents)]))
        proposal = Proposal.of_trees(trees, context.slots.device, self.name)
        proposal.scratch = torch.zeros_like(proposal.tokens, dtype=torch.bool)
        proposal.scratch[:, 0] = True
        proposal.chain = False
        return proposal
