"""Drafting by lookup: the last few tokens stood earlier in the text, so propose what followed them there.

Three published rules of choosing the place are one search here. Let c be the position a copy would start at; its
*depth* is how many tokens before c equal the tokens at the end of the text:

    tokens    7 1 2 3 4 5 1 2 3          c = 4: depth 3 (1 2 3), copy 4 5 1 …
    position  0 1 2 3 4 5 6 7 8

Each rule limits the depths in its own way; the greatest depth wins, then the earliest place.
This module knows committed tokens, lengths and prompt lengths. It must not know stop tokens (so the cut that the
transformers library makes before an end-of-text token is left out: whoever stops a sequence cuts there anyway),
sampling, or how far a sequence may still grow (its budget says so).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.drafters.base import Context, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.kernels.rounds import Lookup, Rounds
from paceline.params import check_count

RULES = ("vllm", "transformers", "reference")
DEFAULT_MATCH = 2, 4  # the vllm rule, with neither length given: the best measured (bench/results/ngram_lengths.json)
DEFAULT_MAX_MATCH = {"transformers": 2, "reference": 3}


@dataclass(frozen=True)
class NGram:
    """Copy what followed the text's last tokens when they occurred before.

    num_draft_tokens: the most tokens to propose.
    min_match, max_match: how many tokens have to agree, and how many are looked at.
    rule: which place is copied from.
      "vllm"          the longest match of min_match … max_match tokens, the earliest such place in prompt and output.
                      One length missing: equal to the other; both missing: 2 … 4.
      "transformers"  the same with lengths 1 … max_match (2 unless given).
      "reference"     only tokens of the output are looked up, max_match (3 unless given) down to 1: first in the
                      prompt, then in the output, a copy never running from one into the other; and the number of
                      proposed tokens follows each sequence's acceptance.
    """

    num_draft_tokens: int = 5
    min_match: int | None = None
    max_match: int | None = None
    rule: str = "vllm"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise OptionError(f"rule={self.rule!r} is not known; allowed: {', '.join(RULES)}")
        for option in ("num_draft_tokens", "min_match", "max_match"):
            given = getattr(self, option)
            if option == "num_draft_tokens" or given is not None:
                check_count(option, given, 1)
        if self.rule != "vllm" and self.min_match not in (None, 1):
            raise OptionError(f"min_match={self.min_match} is not allowed: rule {self.rule!r} always looks down to 1")
        shortest, longest = self.match_lengths
        if shortest > longest:
            raise OptionError(f"min_match={shortest} is above max_match={longest}")

    @property
    def match_lengths(self) -> tuple[int, int]:
        """The shortest and the longest match, defaults filled in."""
        if self.rule != "vllm":
            return 1, self.max_match or DEFAULT_MAX_MATCH[self.rule]
        if self.min_match is None and self.max_match is None:
            return DEFAULT_MATCH
        given = self.min_match or self.max_match or 0
        return given, self.max_match or given

    def create(self) -> NGramDrafter:
        return NGramDrafter(self)


class NGramDrafter(QuietDrafter):
    """Prompt lookup (Saxena 2023); with rule "reference", inference with reference (Yang et al. 2023).

    Tensor code, which nothing waits for, so it can be part of a captured graph. On a CPU the tokens are the host's own
    and the plain rules search them as bytes: the same places for a tenth of the time.
    """

    name = "ngram"
    on_device = True

    def __init__(self, config: NGram) -> None:
        self.max_nodes = config.num_draft_tokens
        self._min_match, self._max_match = config.match_lengths
        self._reference = config.rule == "reference"
        self._pace = Pace(config.num_draft_tokens) if self._reference else None

    def propose(self, context: Context) -> Proposal:
        nodes = min(self.max_nodes, context.max_nodes)
        if nodes == 0:
            return Proposal.empty(len(context.slot_list), context.slots.device)
        on_host = not context.table.apart and not self._reference
        return self._search(context, nodes) if on_host else self._look_up(context, nodes)

    def _look_up(self, context: Context, nodes: int) -> Proposal:
        if context.table.rounds is not None:
            return self._look_up_at_once(context.table.rounds, context, nodes)
        window = _window(context)  # [B, L]
        lengths = context.lengths  # [B]
        depth = _depths(window, lengths, self._max_match)  # [B, L]
        if self._reference:
            prompts = context.table.prompt_lengths.index_select(0, context.slots)  # [B]
            depth = _limit_to_output(depth, lengths, prompts)
            source, longest = _longest_then_earliest(depth, lengths - 1)  # [B], [B]
            stop = torch.where(source < prompts, prompts, lengths - 1)  # the newest token is never copied
        else:
            source, longest = _longest_then_earliest(depth, lengths)
            stop = lengths
        sizes = torch.minimum(stop - source, context.budgets.clamp(max=nodes))  # [B]
        sizes = torch.where(longest >= self._min_match, sizes, 0)
        if self._pace is not None:
            sizes = self._pace.limit(context, sizes)
        return Proposal.of_chains(_copy(window, source, sizes, nodes), sizes, self.name)

    def _look_up_at_once(self, rounds: Rounds, context: Context, nodes: int) -> Proposal:
        """The same by kernels."""
        pace = None if self._pace is None else self._pace.state(context)
        lookup = Lookup(nodes, self._min_match, self._max_match, self._reference, pace, self.max_nodes)
        tokens, parents, sizes = rounds.look_up(context.slots, context.budgets, lookup, context.table.tables)
        return Proposal(tokens, parents, sizes, chain=True, names=(self.name,))

    def _search(self, context: Context, nodes: int) -> Proposal:
        """`_look_up` on the host, for the rules that take prompt and output as one text."""
        texts = []
        for slot, budget in zip(context.slot_list, context.budget_list):
            length = context.table.length(slot)
            text = context.table.tokens.host[slot, :length]
            source = _find(text.tobytes(), text.itemsize, self._min_match, self._max_match)
            texts.append(text[source : source + min(nodes, budget)].tolist())
        return Proposal.of_texts(texts, context.table.device, self.name)

    def forget(self, slots: list[int]) -> None:
        if self._pace is not None:
            self._pace.forget(slots)

    def reset(self) -> None:
        if self._pace is not None:
            self._pace.reset()


def _find(text: bytes, size: int, shortest: int, longest: int) -> int:
    """Where to copy from, in tokens of `size` bytes; the text's length where nothing matches."""
    count = len(text) // size
    for n in range(min(longest, count - 1), shortest - 1, -1):
        wanted, end = text[-n * size :], len(text) - size  # what is copied begins before the end
        place = text.find(wanted, 0, end)
        while place >= 0 and place % size:  # bytes that agree across two tokens are no match
            place = text.find(wanted, place + 1, end)
        if place >= 0:
            return place // size + n
    return count


def _window(context: Context) -> Tensor:
    """The committed tokens of the context's sequences, [B, L]; columns nobody can have filled are left out."""
    longest = context.table.longest(context.slot_list)
    return context.table.tokens.tensor[:, : max(longest, 1)].index_select(0, context.slots)


def _depths(window: Tensor, lengths: Tensor, max_match: int) -> Tensor:
    """How many tokens before each position equal the last tokens of the text, at most max_match: [B, L] → [B, L].

    A match of n tokens is a match of n - 1 that goes on one token to the left. Positions at or past the length hold
    nothing of meaning.
    """
    width = window.shape[1]
    alive = torch.ones_like(window, dtype=torch.bool)  # [B, L]
    depth = torch.zeros_like(window, dtype=torch.int32)  # [B, L]
    for n in range(1, min(max_match, width - 1) + 1):
        nth_last = window.gather(1, (lengths - n).clamp(min=0)[:, None])  # [B, 1]
        alive[:, n:] &= window[:, : width - n] == nth_last
        alive[:, :n] = False  # no room for n tokens on the left
        depth += alive
    return depth


def _limit_to_output(depth: Tensor, lengths: Tensor, prompts: Tensor) -> Tensor:
    """Depths under the reference rule, [B, L] → [B, L].

    Only output tokens are looked up. A match for a copy that starts in the prompt lies in the prompt; one for a copy
    that starts in the output begins at the last prompt token or later.
    """
    position = torch.arange(depth.shape[1], device=depth.device)  # [L]
    behind = position - prompts[:, None] + 1  # [B, L] how far left a match in the output may reach
    depth = torch.where(behind > 0, torch.minimum(depth, behind), depth)
    return torch.minimum(depth, (lengths - prompts)[:, None])


def _longest_then_earliest(depth: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The earliest of the positions below stop[b] that have the greatest depth, and that depth: [B], [B]."""
    width = depth.shape[1]
    position = torch.arange(width, device=depth.device)  # [L]
    depth = torch.where(position < stop[:, None], depth, 0)
    longest = depth.amax(1)  # [B]
    source = torch.where(depth == longest[:, None], position, width).amin(1)  # [B]
    return source, longest


def _copy(window: Tensor, source: Tensor, sizes: Tensor, nodes: int) -> Tensor:
    """sizes[b] tokens from source[b] on, then zeros: [B, nodes]."""
    index = torch.arange(nodes, device=window.device)  # [N]
    columns = (source[:, None] + index).clamp(max=window.shape[1] - 1)  # [B, N]
    return torch.where(index < sizes[:, None], window.gather(1, columns), 0)


class Pace:
    """How many tokens each sequence gets under the reference rule: up after a proposal accepted whole, else down.

    One number a slot, on the device: +2 after full acceptance, up to the maximum; -1 otherwise, down to 1; unchanged
    when nothing was proposed. What was accepted shows in the growth of the committed length since.
    """

    def __init__(self, max_count: int) -> None:
        self._max = max_count
        self._state: Tensor | None = None  # [3, S+1]: the count, the size last proposed, the length it was proposed at

    def limit(self, context: Context, sizes: Tensor) -> Tensor:
        """Judge the round before, then cut this round's proposals to the new counts: [B] → [B]."""
        state = self.state(context)
        count, size, length = state.index_select(1, context.slots)  # [B] each
        accepted = context.lengths - length - 1  # [B] a round commits its accepted tokens and one more
        moved = torch.where(accepted >= size, count + 2, count - 1).clamp(1, self._max)
        count = torch.where(size > 0, moved, count)
        sizes = torch.minimum(sizes, count)
        state[:, context.slots] = torch.stack([count, sizes, context.lengths])
        return sizes

    def state(self, context: Context) -> Tensor:
        if self._state is None:
            rows = context.table.num_slots + 1
            self._state = torch.zeros(3, rows, dtype=torch.int64, device=context.slots.device)
            self._state[0] = self._max
        return self._state

    def forget(self, slots: list[int]) -> None:
        if self._state is not None:
            for slot in slots:
                self._state[:, slot].fill_(0)
                self._state[0, slot].fill_(self._max)

    @torch.inference_mode()
    def reset(self) -> None:
        """In place: captured rounds go on reading it."""
        if self._state is not None:
            self._state.zero_()
            self._state[0] = self._max
