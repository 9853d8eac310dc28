"""The context a drafter proposes in: it hides temperature, processors, noise and acceptance rule behind `draw`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.slots import numbers
from paceline.drafters.base import Drawn
from paceline.drafters.tree import PADDING, Proposal
from paceline.kernels.chain import Drafts, Picks
from paceline.kernels.cpu.chain import pick
from paceline.kernels.held import hold
from paceline.kernels.rounds import Rounds
from paceline.sampling import noise
from paceline.sampling.processors import process
from paceline.sampling.rules import Rule
from paceline.sampling.state import Rows, SamplerState
from paceline.sampling.verify import argmax

NOTHING = -1  # in a path, behind its last token


class Given(NamedTuple):
    """Who drafts, where a frame says it: both [B], on the device. Who does not has the null slot and a budget of 0."""

    slots: Tensor
    budgets: Tensor


class Noise(NamedTuple):
    """What drafts are drawn with, beside their slots' keys and places."""

    stream: int
    extra: Tensor | None
    weight: float


class DraftContext:
    """B decoding sequences, and the n nodes drawn for them so far."""

    def __init__(
        self, slot_list: list[int], budgets: list[int], state: SamplerState, rule: Rule, given: Given | None = None
    ) -> None:
        self.slot_list, self.table, self.spread = slot_list, state.table, state.table.spread
        self.max_nodes = max(budgets, default=0)
        self._asked, self._state, self._rule, self._given = budgets, state, rule, given
        self._sampled = state.any_sampled(slot_list)
        self._untouched = not self._sampled and state.tempered.issuperset(slot_list)  # the likeliest raw logit is drawn
        self._keep_probs = rule.needs_probs and self._sampled
        self._budgets: Tensor | None = None
        self._whole: Proposal | None = None  # made here, and within its budgets
        self._prunable, self._single, self._depth = True, True, 0  # single: one child of one parent at every draw
        self._drafts: Drafts | None = None  # drawn at once
        self._probs: list[Tensor] = []  # [B, P·count, V] a draw
        self._unscored: list[tuple[Tensor, Tensor, Tensor]] = []  # draws: logits [B, P, V], parents, picks

    # Made when first asked for: a drafter that looks things up on the host needs none of them.

    @functools.cached_property
    def slots(self) -> Tensor:
        if self._given is not None:
            return self._given.slots
        if not self.table.apart:
            return numbers(tuple(self.slot_list))
        return torch.tensor(self.slot_list, dtype=torch.int64).to(self.table.device, non_blocking=True)

    @functools.cached_property
    def lengths(self) -> Tensor:
        return self.table.lengths.index_select(0, self.slots)

    @functools.cached_property
    def budgets(self) -> Tensor:
        return self.make_budgets()

    def make_budgets(self) -> Tensor:
        """[B] on the device, afresh."""
        if self.table.rounds is not None:
            found, lengths = self.table.rounds.budgets(self._most(), self.slots, self.table.tables, self.spread)
            self.__dict__.setdefault("lengths", lengths)
            return found
        most = self._most()
        if isinstance(most, int):
            most = torch.full((len(self._asked),), most, dtype=torch.int64, device=self.table.device)
        if not self.table.apart:
            return most
        # The device may be further than the host knew: the last token before a limit is the target's own.
        return torch.minimum(most, (self.table.limits[self.slots] - self.lengths - 1 + self.spread).clamp(min=0))

    def _most(self) -> int | Tensor:
        """What was asked of all, or of each."""
        if self._given is not None:
            return self._given.budgets
        if len(set(self._asked)) == 1:
            return self._asked[0]
        return torch.tensor(self._asked, dtype=torch.int64).to(self.table.device, non_blocking=True)

    def cut(self, proposal: Proposal) -> Proposal:
        """No more nodes than the budgets, whatever the drafter did to those it was shown."""
        if self.table.rounds is None or not proposal.num_nodes:
            return proposal.cut(self.make_budgets())
        if proposal is self._whole:
            return proposal
        room = (self._most(), self.slots, self.table.tables, self.spread)
        sizes, parents = self.table.rounds.cut(*room, proposal.sizes, proposal.parents)
        return replace(proposal, sizes=sizes, above=parents)

    @property
    def budget_list(self) -> list[int]:
        """The budgets as the host knows them; with nothing ahead, the budgets."""
        return list(self._asked)

    @functools.cached_property
    def _tokens(self) -> Tensor:  # [B, n]
        return self._nothing()

    @functools.cached_property
    def _parents(self) -> Tensor:  # [B, n]
        return self._nothing()

    @functools.cached_property
    def _there(self) -> Tensor:  # [B, n] bool: neither the node nor one above it hangs under PADDING
        return self._nothing().bool()

    @functools.cached_property
    def _scored(self) -> Tensor:  # [B, …] of the draws that were scored already
        return self._nothing().float()

    @functools.cached_property
    def _paths(self) -> Tensor:  # [B, n, D] tokens from the root down to each node
        return self._nothing()[:, :, None]

    def _nothing(self) -> Tensor:
        return torch.zeros(len(self.slot_list), 0, dtype=torch.int64, device=self.table.device)

    def only(self, rows: list[int] | None, max_nodes: int, trees: bool = False) -> DraftContext:
        chosen = range(len(self.slot_list)) if rows is None else rows
        slots, limits = [self.slot_list[row] for row in chosen], [min(self._asked[row], max_nodes) for row in chosen]
        if not trees and self._given is None:  # else the budgets see to it
            limits = [min(limit, self.table.room(slot)) for limit, slot in zip(limits, slots)]
        given = self._given if rows is None else None
        if given is not None and max_nodes < self.max_nodes:
            given = given._replace(budgets=given.budgets.clamp(max=max_nodes))
        part = DraftContext(slots, limits, self._state, self._rule, given)
        part.spread = self.spread if trees else 0
        return part

    def draw(
        self,
        logits: Tensor,
        parents: Tensor,
        count: int = 1,
        likeliest: bool = False,
        ids: Tensor | None = None,
        weight: float = 1.0,
    ) -> Drawn:
        """Pick children as the target would, or draw them from the drafter's own distribution: see the protocol."""
        if ids is not None and not self._untouched:
            logits, ids = self._widen(logits, ids), None
        batch, width, vocabulary = logits.shape
        self._single = self._single and width == count == 1
        path = self._path_to(parents)  # [B·P, D]
        slots = self.slots if width == 1 else self.slots.repeat_interleave(width)
        lengths = self.lengths if width == 1 else self.lengths.repeat_interleave(width)
        rows = Rows(slots, self.slot_list, lengths - 1 + (path >= 0).sum(1), path)
        processed = logits.float().reshape(-1, vocabulary)
        if not self._untouched:
            processed = process(processed, rows, self._state)
        chosen = likeliest and self._rule.needs_probs
        scored = processed
        if count == 1:
            picked = self._pick(processed, rows, self._noise(lengths, weight), chosen).clamp(min=0)[:, None]
        elif chosen:
            picked = _largest(processed, count)
        else:
            perturbed = self._perturbed(processed, rows, self._noise(lengths, weight))
            picked = _largest(perturbed, count)
            if self._rule.shares_noise:
                scored = perturbed
        if self._keep_probs:
            self._prunable = self._prunable and chosen
            self._note_probs(processed, picked, batch, chosen)
        self._unscored.append((scored.view(batch, width, -1), parents, picked.view(batch, width, count)))
        tokens = picked if ids is None else ids[picked]
        return self._append(tokens.view(batch, width, count), parents, path)

    def draw_chain(self, run: Callable[[Picks | None], Drafts], weight: float = 1.0) -> Tensor | None:
        """Let the kernels draw it all: see the protocol."""
        tempered, ahead = self._state.tempered.issuperset(self.slot_list), self.table.apart
        if (ahead and self.table.rounds is None) or self._keep_probs or not tempered or not self.max_nodes:
            return None
        assert "_tokens" not in self.__dict__, "a chain is drawn from its beginning"
        picking: Picks | None = None
        if self._sampled:
            keyed_by = self._noise(self.lengths, weight)
            if ahead:
                picking = self._state.keyed(**keyed_by._asdict())
            else:
                picking = self._state.picking(self.slots, self.lengths, *keyed_by)
        self._drafts = run(picking)
        self._tokens = self._drafts.tokens
        return self._drafts.counts

    def _widen(self, logits: Tensor, ids: Tensor) -> Tensor:
        """[B, P, V'] → [B, P, V]: a token the drafter does not know has no chance."""
        shape = (*logits.shape[:2], self._state.vocab_size)
        nothing = torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)
        return nothing.index_copy_(2, ids, logits.float())

    def scores(self) -> Tensor:
        found = self._scored
        for logits, parents, picked in self._unscored:
            own = torch.log_softmax(logits, dim=2).gather(2, picked).nan_to_num(nan=float("-inf"))  # [B, P, count]
            above = found.new_zeros(parents.shape)
            if found.shape[1]:
                above = torch.where(parents >= 0, found.gather(1, parents.clamp(min=0)), 0.0)
            total = torch.where((parents > PADDING)[:, :, None], above[:, :, None] + own, float("-inf"))
            found = torch.cat([found, total.flatten(1)], dim=1)
        self._scored = found
        self._unscored.clear()
        return found

    def likely(self, least: float) -> Tensor:
        found: Tensor = (self.scores().exp() >= least).cumprod(1).sum(1)
        return found + 1 if self._keep_probs else found

    def drawn(
        self,
        name: str,
        *,
        chain: bool = True,
        keep: int | None = None,
        most: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Proposal:
        if order is not None:
            self._stand(order.expand_as(self._tokens))
        if self._drafts is not None and most is self._drafts.counts:  # within the budgets already
            found = Proposal.of_drafts(self._drafts, name)
            if self._drafts.parents is None or self._drafts.parents.dim() > 1:  # else all have those of the whole shape
                self._whole = found
            return found
        chain = chain and self._single and keep is None
        if chain and self.table.rounds is not None and self._tokens.shape[1]:
            return self._drawn_at_once(self.table.rounds, name, self.budgets if most is None else most)
        budgets = self.budgets if most is None else torch.minimum(self.budgets, most)
        if keep is not None:
            self._stand(self._best())
        probs = torch.cat(self._probs, dim=1) if self._probs else None
        if chain:
            return Proposal.of_chains(self._tokens, budgets.clamp(max=self._tokens.shape[1]), name, probs)
        width = self._tokens.shape[1] if keep is None else min(keep, self._tokens.shape[1])
        kept = self._there & (self._there.cumsum(1) <= budgets.clamp(max=width)[:, None])
        everything = Proposal(
            self._tokens, self._parents, kept.sum(1), False, probs, names=(name,), max_depth=self._depth
        )
        return everything.only(kept, width)

    def _stand(self, order: Tensor) -> None:
        """Number anew what was drawn: order [B, n]."""
        numbers, above = torch.argsort(order, dim=1), self._parents
        moved = torch.where(above >= 0, numbers.gather(1, above.clamp(min=0)), above)
        parts = (moved, self._tokens, self._there)
        self._parents, self._tokens, self._there = (part.gather(1, order) for part in parts)
        if self._probs:
            probs = torch.cat(self._probs, dim=1)
            self._probs = [probs.gather(1, order[:, :, None].expand_as(probs))]

    def _drawn_at_once(self, rounds: Rounds, name: str, most: Tensor) -> Proposal:
        """A chain cut to its budgets by kernels; nobody need cut it again."""
        probs = torch.cat(self._probs, dim=1) if self._probs else None
        room = (self._most(), self.slots, self.table.tables, self.spread)
        sizes, parents = rounds.cut(*room, most, hold(_straight(*self._tokens.shape, self._tokens.device)))
        self._whole = Proposal(self._tokens, parents, sizes, True, probs, names=(name,))
        return self._whole

    def _best(self) -> Tensor:
        """[B, n] the nodes, the best score first; no ancestor scores less, and of equals it comes first."""
        if not self._prunable:
            raise ValueError("drawn tokens may not be chosen among afterwards; draw the likeliest to prune a tree")
        scores = self.scores()
        self._there = self._there & (scores > float("-inf"))
        self._scored, order = torch.sort(scores, dim=1, descending=True, stable=True)
        return order

    def _note_probs(self, processed: Tensor, picked: Tensor, batch: int, chosen: bool) -> None:
        """The distribution each child was drawn from, without replacement; a point mass where it was chosen."""
        rest = torch.softmax(processed.double(), dim=1)
        children = []
        for child in range(picked.shape[1]):
            here = picked[:, child, None]
            children.append(torch.zeros_like(rest).scatter(1, here, 1.0).float() if chosen else rest.float())
            rest = rest.scatter(1, here, 0.0)
            rest = rest / rest.sum(1, keepdim=True).clamp(min=1e-300)
        self._probs.append(torch.stack(children, dim=1).view(batch, -1, processed.shape[1]))

    def _pick(self, processed: Tensor, rows: Rows, keyed_by: Noise, chosen: bool) -> Tensor:
        """[R] one token of each row, with noise unless it is chosen; -1: none can be."""
        rounds = self.table.rounds
        if chosen or not self._sampled:
            return argmax(processed, rounds)
        if rounds is not None:
            keyed = self._state.keyed(**keyed_by._asdict(), divided=True)
            return rounds.sample(processed, rows.slots, rows.positions, keyed)
        if not self._state.picks:
            return argmax(self._perturbed(processed, rows, keyed_by))
        return pick(processed, self._state.picking(rows.slots, rows.positions + 1, *keyed_by).processed())

    def _noise(self, lengths: Tensor, weight: float) -> Noise:
        """The target's own noise where the rule shares it, so that both agree more often."""
        assert 0.0 <= weight <= 1.0, "a part of the noise"
        return Noise(noise.SAMPLE, None, weight) if self._rule.shares_noise else Noise(noise.DRAFT, lengths, 1.0)

    def _perturbed(self, processed: Tensor, rows: Rows, keyed_by: Noise) -> Tensor:
        """Gumbel-max scores."""
        if not self._sampled:
            return processed
        if self.table.rounds is not None:
            keyed = self._state.keyed(**keyed_by._asdict(), divided=True)
            return self.table.rounds.perturb(processed, rows.slots, rows.positions, keyed)
        keys = self._state.keys(rows.slots)
        values = noise.gumbel(keys, rows.positions + 1, keyed_by.stream, processed.shape[1], keyed_by.extra)
        return torch.where(self._state.greedy(rows.slots)[:, None], processed, processed + keyed_by.weight * values)

    def _path_to(self, parents: Tensor) -> Tensor:
        """[B·P, D] the drafted tokens down to each parent node."""
        depth = self._paths.shape[2]
        if self._tokens.shape[1] == 0:
            return torch.full((parents.numel(), 0), NOTHING, dtype=torch.int64, device=parents.device)
        path = self._paths.gather(1, parents.clamp(min=0)[:, :, None].expand(-1, -1, depth))
        return torch.where((parents >= 0)[:, :, None], path, NOTHING).flatten(0, 1)

    def _append(self, picked: Tensor, parents: Tensor, path: Tensor) -> Drawn:
        batch, width, count = picked.shape
        before = self._tokens.shape[1]
        above = parents[:, :, None].expand(batch, width, count).flatten(1)
        self._tokens = torch.cat([self._tokens, picked.flatten(1)], dim=1)
        self._parents = torch.cat([self._parents, above], dim=1)
        there = above > PADDING
        if before:
            there = there & ((above < 0) | self._there.gather(1, above.clamp(min=0)))
        self._there = torch.cat([self._there, there], dim=1)
        depth = (path >= 0).sum(1)  # [B·P]
        wide = torch.nn.functional.pad(path, (0, 1), value=NOTHING)[:, None].expand(-1, count, -1)
        here = torch.arange(wide.shape[2], device=wide.device) == depth[:, None]
        new = torch.where(here[:, None], picked.reshape(-1, count, 1), wide).reshape(batch, width * count, -1)
        self._depth = max(new.shape[2], self._paths.shape[2])
        old = torch.nn.functional.pad(self._paths, (0, self._depth - self._paths.shape[2]), value=NOTHING)
        new = torch.nn.functional.pad(new, (0, self._depth - new.shape[2]), value=NOTHING)
        self._paths = torch.cat([old, new], dim=1)
        numbers = torch.arange(before, before + width * count, device=picked.device).view(width, count)
        return Drawn(picked, numbers.expand(batch, width, count))


@functools.lru_cache(maxsize=256)
def _straight(batch: int, nodes: int, device: torch.device) -> Tensor:
    """[B, N] the parents of chains that have all nodes; nobody writes into them."""
    return torch.arange(-1, nodes - 1, device=device).expand(batch, nodes)


def _largest(scores: Tensor, count: int) -> Tensor:
    """[R, count] where the largest of [R, V] stand, the largest first, of equals the lowest; without sorting all."""
    found = torch.topk(scores, min(count, scores.shape[1]), dim=1).indices.sort(dim=1).values
    order = torch.sort(scores.gather(1, found), dim=1, descending=True, stable=True).indices
    return found.gather(1, order)
