"""Drafting by frequency: propose what most often followed the last tokens, in this sequence or in other answers.

This module knows committed tokens and prompt lengths, and keeps one suffix tree a sequence and one for all
responses. It works on the host. It must not know sampling, stop tokens or how sequences are scheduled.

The trees are the compiled library's where it is there, and else those of suffix_tree.py, which propose the same.
Trees are read into when something is drafted: while nothing is, nobody pays for them. What has piled up by then is read
over the next rounds, the texts that are least behind first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from paceline.cache.slots import Array, Slots
from paceline.drafters.base import Context, Observation, QuietDrafter
from paceline.drafters.suffix_tree import Draft, Limits, SuffixTree
from paceline.drafters.tree import Proposal
from paceline.errors import OptionError
from paceline.kernels.cpu import suffix as native
from paceline.params import check_count

NAME = "suffix"


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


class Tree(Protocol):
    """What a tree of either kind does. What it knows a text by is its own affair."""

    def begin(self) -> Any: ...
    def read(self, text: Any, tokens: Array) -> None: ...
    def end(self, text: Any) -> None: ...


@dataclass
class Memory:
    """What is kept of one sequence."""

    tree: Tree
    text: Any
    prompt_length: int
    known: int = 0  # tokens that were read
    response: Any = None  # its part of the tree of all responses, from its first output token on; None: nothing yet


@dataclass
class Late:
    """The end of a response whose sequence has left before it was read."""

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    text: Any  # of the tree of all responses: what was read before; None: nothing


def _propose(own: list[SuffixTree], others: SuffixTree | None, context: Context, limits: Limits) -> Proposal:
    """Each sequence's better draft: its own tree's, unless that of all responses scores higher."""
    table = context.table
    drafts: list[tuple[list[int], list[int]]] = []
    for tree, slot, budget in zip(own, context.slot_list, context.budget_list):
        limited, draft = replace(limits, max_tokens=min(limits.max_tokens, budget)), Draft()
        if limited.max_tokens > 0:
            length = table.length(slot)
            tail = table.tokens.host[slot, max(0, length - tree.max_depth) : length].tolist()
            drawn = [each.speculate(tail, limited) for each in (tree, others) if each is not None]
            draft = max(drawn, key=lambda each: each.score)  # of equals the first
        drafts.append((draft.tokens, draft.parents))
    return Proposal.of_trees(drafts, table.device, NAME)


def _propose_native(
    own: list[native.NativeTree], others: native.NativeTree | None, context: Context, limits: Limits
) -> Proposal:
    """The same, in one call of the library."""
    table, slots = context.table, context.slot_list
    rows = list(zip(slots, table.known_lengths(slots), context.budget_list))
    drafts = native.speculate(own, others, table.tokens.host, rows, limits, table.device)
    return Proposal(
        drafts.tokens, drafts.parents, drafts.sizes, drafts.chain, names=(NAME,), max_depth=drafts.max_depth
    )


class Kind(NamedTuple):
    """Trees of one kind. How much is read goes by what a token takes: microseconds in Python, tenths of one else."""

    read: int  # tokens that are read in a round at most
    read_each: int  # and so many more for each sequence that drafts
    tree: Callable[..., Tree]
    propose: Callable[[list[Any], Any, Context, Limits], Proposal]


PYTHON = Kind(1024, 8, SuffixTree, _propose)
NATIVE = Kind(4096, 32, native.NativeTree, _propose_native)


def kind_of_trees() -> Kind:
    return PYTHON if native.suffix_library() is None else NATIVE


class SuffixDrafter(QuietDrafter):
    """Suffix decoding (Oliaro et al. 2024).

    A sequence that is preempted and admitted again is forgotten and then seen anew from position 0: its response so
    far counts twice among all responses, as if another request had said the same.
    """

    name = NAME
    on_device = False
    told_late = True

    def __init__(self, config: Suffix) -> None:
        self.max_nodes = config.num_draft_tokens
        self.trees = config.tree
        self._config, self._kind = config, kind_of_trees()
        self._limits = Limits(
            config.num_draft_tokens, config.max_spec_factor, config.min_token_prob, branching=config.tree
        )
        self._responses: Any = (
            self._kind.tree(config.max_tree_depth, config.max_cached_requests, config.max_cached_bytes)
            if config.max_cached_requests and config.max_cached_bytes
            else None
        )
        self._memories: dict[int, Memory] = {}  # by slot
        self._behind: dict[int, Slots] = {}  # slots with something to be read, and where
        self._late: deque[Late] = deque()
        self._num_late = 0  # tokens

    def create(self) -> Self:
        return type(self)(self._config)

    def __deepcopy__(self, memo: object) -> Self:
        """As a part of another drafter that is made afresh: the library's trees cannot be copied."""
        return self.create()

    def observe(self, seen: Observation) -> None:
        self._behind.update(dict.fromkeys(seen.slot_list, seen.table))

    def propose(self, context: Context) -> Proposal:
        left = self._kind.read + self._kind.read_each * len(context.slot_list)
        left -= self._read_late(left // 2)
        self._behind.update(dict.fromkeys(context.slot_list, context.table))
        for count, slot in sorted([(self._num_behind(slot), slot) for slot in self._behind]):
            self._read(slot, min(count, left))
            left -= min(count, left)
        own = [self._memories[slot].tree for slot in context.slot_list]
        return self._kind.propose(own, self._responses, context, self._limits)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            table, memory = self._behind.pop(slot, None), self._memories.pop(slot, None)
            if self._responses is None:
                continue
            response = None if memory is None else memory.response
            if table is not None:
                known = max(0 if memory is None else memory.known, table.prompt_length(slot))
                self._put_off(Late(table.tokens.host[slot, known : table.length(slot)].astype(np.int32), response))
            elif response is not None:
                self._responses.end(response)

    def reset(self) -> None:
        self.forget(list(self._memories | self._behind))

    def _num_behind(self, slot: int) -> int:
        memory = self._memories.get(slot)
        return self._behind[slot].length(slot) - (0 if memory is None else memory.known)

    def _read(self, slot: int, count: int) -> None:
        """Take in so many of the tokens committed since the last time."""
        table, memory = self._behind[slot], self._memories.get(slot)
        if memory is None:
            tree = self._kind.tree(self._config.max_tree_depth)
            memory = self._memories[slot] = Memory(tree, tree.begin(), table.prompt_length(slot))
        tokens = table.tokens.host[slot, memory.known : memory.known + count]
        memory.tree.read(memory.text, tokens)
        output = tokens[max(memory.prompt_length - memory.known, 0) :]
        if len(output) and self._responses is not None:
            if memory.response is None:
                memory.response = self._responses.begin()
            self._responses.read(memory.response, output)
        memory.known += count
        if memory.known >= table.length(slot):
            del self._behind[slot]

    def _put_off(self, late: Late) -> None:
        """Keep the end of a response for when something is drafted, within the limits of the tree it will go to."""
        self._late.append(late)
        self._num_late += len(late.tokens)
        most = self._config.max_cached_bytes // late.tokens.itemsize
        while len(self._late) > self._config.max_cached_requests or self._num_late > most:
            self._end(self._late.popleft())

    def _read_late(self, most: int) -> int:
        """Take in so many tokens of responses that have ended, and how many those were."""
        left = most
        while self._late and left:
            assert self._responses is not None
            late = self._late[0]
            if late.text is None:
                late.text = self._responses.begin()
            now, late.tokens = late.tokens[:left], late.tokens[left:]
            self._responses.read(late.text, now.astype(np.int64))
            self._num_late, left = self._num_late - len(now), left - len(now)
            if not len(late.tokens):
                self._end(self._late.popleft())
        return most - left

    def _end(self, late: Late) -> None:
        self._num_late -= len(late.tokens)
        if late.text is not None and self._responses is not None:
            self._responses.end(late.text)
