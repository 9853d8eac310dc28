"""Lookahead decoding: the target guesses ahead for itself, in rows that ride along with what it has to compute anyway.

A *window* of guesses stands behind the newest token x: levels 0 … N-2, each of W columns. Level l, column c stands at
x's position + l + c; it sees level 0 up to column c, and its own column down to itself. That is a tree:

    level 0    x ── a1 ── a2          every round the target's choices behind the last level become the new last level,
               │    │     │           the others move up by one, and each column, read downwards, is an n-gram that
    level 1    b0   b1    b2          goes into the sequence's pool
               │    │     │
    level 2    c0   c1    c2          (N = 4, W = 3)

The pool's n-grams that begin with x are the *guesses*: they are proposed, merged where they begin alike, and judged as
any tree is. The window's nodes are scratch: they can never be accepted.
This module knows committed tokens, prompt lengths and raw logits. It must not know stop tokens or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Needs, Observation, QuietDrafter, Taps, Target
from paceline.drafters.tree import PADDING, ROOT, Proposal
from paceline.errors import OptionError
from paceline.params import check_count
from paceline.sampling.verify import argmax

POOL = 2048  # n-grams kept of a sequence, at least; the oldest go first
NOBODY = -1  # the key of an n-gram that is not there


@dataclass(frozen=True)
class Lookahead:
    """The target's own guesses, gathered beside its forwards; no weights.

    num_draft_tokens: the most tokens of a guess that are proposed; ngram - 1 unless given.
    window: how many columns are guessed at beside each other.
    ngram: tokens of an n-gram, the one it is found by included.
    guesses: how many n-grams are proposed in a round, the newest first.
    """

    num_draft_tokens: int | None = None
    window: int = 7
    ngram: int = 5
    guesses: int = 7

    def __post_init__(self) -> None:
        for option, least in (("window", 1), ("ngram", 3), ("guesses", 1)):
            check_count(option, getattr(self, option), least)
        if self.num_draft_tokens is not None:
            check_count("num_draft_tokens", self.num_draft_tokens, 1)
            if self.num_draft_tokens >= self.ngram:
                raise OptionError(
                    f"num_draft_tokens={self.num_draft_tokens} is not allowed; an n-gram of {self.ngram} tokens brings "
                    f"{self.ngram - 1} at most"
                )

    def create(self) -> LookaheadDrafter:
        return LookaheadDrafter(self)


class LookaheadDrafter(QuietDrafter):
    """Lookahead decoding (Fu et al. 2024), in tensors of fixed shape.

    The published warm-up builds the window level by level. Here all levels begin with tokens of the prompt, and n-grams
    are gathered from the round on in which the target has written every level below the first.
    """

    name = "lookahead"
    taps = Taps(node_logits=True)
    trees = True
    on_device = True

    def __init__(self, config: Lookahead) -> None:
        self.width, self.ngram, self.guesses = config.window, config.ngram, config.guesses
        self.length = config.num_draft_tokens or config.ngram - 1
        self.num_scratch = self.width * (self.ngram - 1) - 1
        self.max_nodes = self.num_scratch + self.guesses * self.length
        self.max_depth = max(self.length, self.width + self.ngram - 3)
        self.kept = max(POOL, self.width, self.guesses)

    def plan(self, target: Target) -> Needs:
        numbers = (target.max_num_seqs + 1) * (self.kept * (self.ngram + 2) + self.width * (self.ngram - 1))
        return Needs(bytes=8 * numbers)

    def attach(self, target: Target, cache: KVCache) -> None:
        rows, device = target.max_num_seqs + 1, target.device

        def filled(value: int, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=torch.int64, device=device)

        self._window = filled(0, self.ngram - 1, self.width)  # level 0 has no column 0: x stands there
        self._rounds = filled(NOBODY)  # that moved the window; NOBODY: the sequence has none yet
        self._place = filled(NOBODY)  # the node its window began at when last proposed; NOBODY: it was left out
        self._pool = filled(NOBODY, self.kept, self.ngram)  # a key, then what followed it
        self._age = filled(0, self.kept)  # the greater the newer
        self._marks = filled(NOBODY, self.kept)  # by which an n-gram is found again
        self._parents = torch.tensor(window_parents(self.width, self.ngram), dtype=torch.int64).to(device)
        level, column = torch.arange(self.ngram - 1)[:, None], torch.arange(self.width)
        self._depths = (level + column).flatten()[1:].to(device)  # below x

    def propose(self, context: Context) -> Proposal:
        """Guesses first; the window behind them where all of it fits into the budget."""
        self._begin(context)
        slots, budgets = context.slots, context.budgets
        guesses, there = self._guesses(context)  # [B, G, K], [B, G]
        tokens, parents, own = merge(guesses, there)
        own = own & (own.cumsum(1) <= budgets[:, None])
        counts = own.sum(1)
        fits = counts + self.num_scratch <= budgets
        self._place[slots] = torch.where(fits, counts, NOBODY)
        window = self._window[slots].flatten(1)[:, 1:]
        above = self._parents + torch.where(self._parents >= 0, tokens.shape[1], 0)
        kept = torch.cat([own, fits[:, None].expand_as(window)], dim=1)
        tokens = torch.cat([tokens, window], dim=1)
        parents = torch.cat([parents, above.expand_as(window)], dim=1)
        return self._collect(tokens, parents, kept, min(self.max_nodes, context.max_nodes))

    def _collect(self, tokens: Tensor, parents: Tensor, kept: Tensor, width: int) -> Proposal:
        """The nodes that are kept, closed up; those of the window are scratch."""
        nodes = torch.argsort((~kept).to(torch.int8), dim=1, stable=True)[:, :width]  # [B, width]
        sizes = kept.sum(1)
        above = parents.gather(1, nodes)
        moved = torch.where(above >= 0, (kept.cumsum(1) - 1).gather(1, above.clamp(min=0)), above)
        inside = torch.arange(width, device=nodes.device) < sizes[:, None]
        scratch = inside & (nodes >= tokens.shape[1] - self.num_scratch)
        parents = torch.where(inside, moved, PADDING)
        chosen = tokens.gather(1, nodes)
        return Proposal(chosen, parents, sizes, False, scratch=scratch, names=(self.name,), max_depth=self.max_depth)

    def _begin(self, context: Context) -> None:
        """A window of tokens from here and there in the prompt, for sequences that have none."""
        slots, table = context.slots, context.table
        place = torch.arange(self.width * (self.ngram - 1), device=slots.device) * 0x9E3779B1 >> 7
        place = place % table.prompt_lengths[slots][:, None]
        drawn = table.tokens.tensor[slots[:, None], place].view(-1, self.ngram - 1, self.width)
        new = self._rounds[slots] == NOBODY
        self._window[slots] = torch.where(new[:, None, None], drawn, self._window[slots])
        self._rounds[slots] = self._rounds[slots].clamp(min=0)

    def _guesses(self, context: Context) -> tuple[Tensor, Tensor]:
        """What followed the newest token in the pool, newest n-grams first: [B, G, K], and which are there [B, G]."""
        newest = context.table.tokens.tensor[context.slots, context.lengths - 1]
        pool = self._pool.index_select(0, context.slots)  # [B, kept, N]
        age = torch.where(pool[:, :, 0] == newest[:, None], self._age.index_select(0, context.slots), NOBODY)
        found = torch.topk(age, self.guesses, dim=1)
        chosen = pool.gather(1, found.indices[:, :, None].expand(-1, -1, self.ngram))
        return chosen[:, :, 1 : 1 + self.length], found.values > NOBODY

    def observe(self, seen: Observation) -> None:
        """Where the window was computed: gather its n-grams, and move it."""
        places, ids, layout = seen.batch.places, seen.batch.ids, seen.batch.layout
        if seen.verdict is None or seen.logits is None or not places.num_nodes:
            return
        slots = seen.batch.slots[: places.num_sampling]
        window, rounds, place = self._window[slots], self._rounds[slots], self._place[slots]
        numbers = torch.arange(self.num_scratch, device=slots.device)
        columns = torch.cat([torch.zeros_like(place)[:, None], 1 + place[:, None] + numbers], dim=1)
        looked = places.index.gather(1, columns.clamp(0, places.num_nodes))  # [B, 1+M] among the sampled rows
        rows = places.sampled[looked]
        root = rows[:, :1]
        # Another drafter's nodes may have been taken instead: are these the window's tokens at the window's positions?
        same = (ids[rows[:, 1:]] == window.flatten(1)[:, 1:]) & (
            layout.positions[rows[:, 1:]] == layout.positions[root] + self._depths
        )
        there = (place >= 0) & same.all(1)
        chosen = argmax(seen.logits)[looked[:, -self.width :]].clamp(min=0)  # all rows: to pick some copies them
        levels = torch.cat([window, chosen[:, None]], dim=1)  # [B, N, W]
        levels[:, 0, 0] = ids[root[:, 0]]
        self._gather(slots, levels.transpose(1, 2), there & (rounds >= self.ngram - 2))
        self._window[slots] = torch.where(there[:, None, None], levels[:, 1:], window)
        self._rounds[slots] = rounds + there
        self._place[slots] = NOBODY

    def _gather(self, slots: Tensor, grams: Tensor, valid: Tensor) -> None:
        """Put n-grams [B, W, N] in the places of the oldest; one that is there already is only renewed."""
        pool, age, marks = (table.index_select(0, slots) for table in (self._pool, self._age, self._marks))
        own = mark(grams)  # [B, W]
        old = (marks[:, :, None] == own[:, None]).any(2) & valid[:, None]  # [B, kept]
        column = torch.arange(self.width, device=slots.device)
        again = ((own[:, :, None] == own[:, None]) & (column[:, None] < column)).any(2)  # stands in a later column too
        times = age.amax(1, keepdim=True) + 1 + column
        age = torch.where(old, 0, age)
        marks = torch.where(old, NOBODY, marks)
        pool = torch.where(old[:, :, None], NOBODY, pool)
        oldest = torch.topk(age, self.width, dim=1, largest=False).indices
        wide = oldest[:, :, None].expand(-1, -1, self.ngram)
        skip = again | ~valid[:, None]
        grams = torch.where(skip[:, :, None], pool.gather(1, wide), grams)
        self._pool.index_copy_(0, slots, pool.scatter(1, wide, grams))
        self._age.index_copy_(0, slots, age.scatter(1, oldest, torch.where(skip, age.gather(1, oldest), times)))
        own = torch.where(skip, marks.gather(1, oldest), own)
        self._marks.index_copy_(0, slots, marks.scatter(1, oldest, own))

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            for table in (self._rounds, self._place, self._pool, self._marks):
                table[slot].fill_(NOBODY)
            self._age[slot].fill_(0)

    def reset(self) -> None:
        for table in (self._rounds, self._place, self._pool, self._marks):
            table.fill_(NOBODY)
        self._age.zero_()


def mark(grams: Tensor) -> Tensor:
    """[B, W, N] → [B, W] a number for each n-gram, by which it is found again; not negative."""
    found = torch.zeros_like(grams[:, :, 0])
    for place in range(grams.shape[2]):
        found = found * 0x1000193 + grams[:, :, place] + 1  # what overflows is dropped
    return found & 0x7FFFFFFFFFFFFFFF


def window_parents(width: int, ngram: int) -> list[int]:
    """The window as a parents array: level 0 from column 1 on, then level after level."""
    row = list(range(-1, width - 2))  # level 0: each behind the one before
    level = [ROOT, *range(width - 1)]  # level 1 hangs under level 0, its first column under x
    parents = row + level
    for _ in range(ngram - 3):
        parents += range(len(parents) - width, len(parents))
    return parents


def merge(guesses: Tensor, there: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Guesses [B, G, K] as the nodes of one tree: tokens, parents, and which are nodes, all [B, G·K].

    A token that another guess before has behind the same tokens is that guess's node.
    """
    batch, count, length = guesses.shape
    same = (guesses[:, :, None] == guesses[:, None]).cumprod(3).bool() & there[:, None, :, None]  # [B, G, G, K]
    first = torch.where(same, torch.arange(count, device=guesses.device)[:, None], count).amin(2)  # [B, G, K]
    number = torch.arange(count, device=guesses.device)[:, None]
    own = (first == number) & there[:, :, None]
    above = first[:, :, :-1].clamp(max=count - 1) * length + torch.arange(length - 1, device=guesses.device)
    roots = torch.full((batch, count, 1), ROOT, dtype=torch.int64, device=guesses.device)
    return guesses.flatten(1), torch.cat([roots, above], dim=2).flatten(1), own.flatten(1)
