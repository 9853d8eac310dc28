"""Drafting by frequency: propose what most often followed the last tokens, in this sequence or in other answers.

This module knows committed tokens and prompt lengths, and keeps one suffix tree a sequence and one for all
responses. It works on the host. It must not know sampling, stop tokens or how sequences are scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cache.slots import Slots
from paceline.drafters.base import Context, Observation, QuietDrafter
from paceline.drafters.suffix_node import Text
from paceline.drafters.suffix_tree import Draft, Limits, SuffixTree
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.params import check_count


@dataclass(frozen=True)
class Suffix:
    """Propose the most frequent continuation of the text's end, as long as the counts make it likely.

    num_draft_tokens: the most tokens to propose.
    max_tree_depth: the longest run of tokens counted, match and continuation together.
    max_spec_factor: a match of p tokens earns a proposal of at most max_spec_factor · p.
    min_token_prob: stop where the path's probability by counts falls below this.
    max_cached_requests: how many requests' responses are remembered for others, the oldest going first; 0: none.
    max_cached_bytes: how much memory they may take, the oldest going first.
    tree: propose trees instead of chains.
    """

    num_draft_tokens: int = 16
    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_cached_requests: int = 10000
    max_cached_bytes: int = 256 * 2**20
    tree: bool = False

    def __post_init__(self) -> None:
        least = {"num_draft_tokens": 1, "max_tree_depth": 2, "max_cached_requests": 0, "max_cached_bytes": 0}
        for option, lowest in least.items():
            check_count(option, getattr(self, option), lowest)
        if not 0 < self.max_spec_factor < float("inf"):
            raise OptionError(f"max_spec_factor={self.max_spec_factor!r} is not allowed; allowed: a number above 0")
        if not 0 <= self.min_token_prob <= 1:
            raise OptionError(f"min_token_prob={self.min_token_prob!r} is not allowed; allowed: a number from 0 to 1")

    def create(self) -> SuffixDrafter:
        return SuffixDrafter(self)


@dataclass
class Memory:
    """What is kept of one sequence."""

    tree: SuffixTree
    text: Text
    prompt_length: int
    response: Text | None = None  # its part of the tree of all responses, from its first output token on


class SuffixDrafter(QuietDrafter):
    """Suffix decoding (Oliaro et al. 2024).

    A sequence that is preempted and admitted again is forgotten and then seen anew from position 0: its response so
    far counts twice among all responses, as if another request had said the same.
    """

    name = "suffix"
    on_device = False
    told_late = True

    def __init__(self, config: Suffix) -> None:
        self.max_nodes = config.num_draft_tokens
        self.trees = config.tree
        self._max_depth = config.max_tree_depth
        self._limits = Limits(
            config.num_draft_tokens, config.max_spec_factor, config.min_token_prob, branching=config.tree
        )
        self._responses = (
            SuffixTree(config.max_tree_depth, config.max_cached_requests, config.max_cached_bytes)
            if config.max_cached_requests and config.max_cached_bytes
            else None
        )
        self._memories: dict[int, Memory] = {}  # by slot

    def observe(self, seen: Observation) -> None:
        for slot in seen.slot_list:
            self._catch_up(slot, seen.table)

    def propose(self, context: Context) -> Proposal:
        drafts: list[tuple[list[int], list[int]]] = []
        for slot, budget in zip(context.slot_list, context.budget_list):
            draft = self._speculate(slot, budget, context.table)
            drafts.append((draft.tokens, draft.parents))
        return Proposal.of_trees(drafts, context.table.device, self.name)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            memory = self._memories.pop(slot, None)
            if memory is not None and memory.response is not None and self._responses is not None:
                self._responses.end(memory.response)

    def reset(self) -> None:
        self.forget(list(self._memories))

    def _catch_up(self, slot: int, table: Slots) -> Memory:
        """Take in what was committed since the last time; everything, at the first."""
        memory = self._memories.get(slot)
        if memory is None:
            tree = SuffixTree(self._max_depth)
            memory = Memory(tree, tree.begin(), table.prompt_length(slot))
            self._memories[slot] = memory
        known, length = len(memory.text.tokens), table.length(slot)
        tokens = table.tokens.host[slot, known:length].tolist()
        memory.tree.extend(memory.text, tokens)
        output = tokens[max(memory.prompt_length - known, 0) :]
        if output and self._responses is not None:
            if memory.response is None:
                memory.response = self._responses.begin()
            self._responses.extend(memory.response, output)
        return memory

    def _speculate(self, slot: int, budget: int, table: Slots) -> Draft:
        memory = self._catch_up(slot, table)
        limits = replace(self._limits, max_tokens=min(self._limits.max_tokens, budget))
        if limits.max_tokens <= 0:
            return Draft()
        tail = memory.text.tokens[-self._max_depth :]
        own = memory.tree.speculate(tail, limits)
        if self._responses is None:
            return own
        others = self._responses.speculate(tail, limits)
        return own if own.score >= others.score else others
