"""What a round can tell of its tokens: who drafted each, what was proposed, how likely each was."""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.drafters.tree import Proposal
from paceline.engine.sequence import Logprob, Provenance

if TYPE_CHECKING:
    from paceline.engine.round import Round

Table = list[list[int]]
Listed = Table | None  # None: not there


@dataclass
class Drafted:
    """What was proposed for each sampling sequence, on the host."""

    sizes: list[int]  # nodes that could be accepted
    depths: list[int]
    parents: list[Container[int]] | None  # nodes that have children; -1 the root. None: chains
    names: tuple[str, ...]
    origins: Table | None

    @classmethod
    def of(cls, proposal: Proposal) -> Drafted:
        trees = (None, None) if proposal.chain else (proposal.parents, proposal.scratch)
        listed = (None if part is None else part.tolist() for part in (*trees, proposal.origins))
        return cls.read(proposal.names, proposal.size_list, *listed)

    @classmethod
    def read(cls, names: tuple[str, ...], sizes: list[int], above: Listed, scratch: Listed, origins: Listed) -> Drafted:
        """above: the parents of all nodes; None: chains."""
        if above is not None:
            return cls(*_read_trees(sizes, above, scratch), names, origins)
        return cls(sizes, sizes, None, names, origins)

    def provenance(self, row: int, nodes: list[int], number: int) -> tuple[Provenance, ...]:
        """Where these nodes' tokens came from, and the one more, in its sequence's round of that number."""
        if not self.sizes[row]:
            return _provenance((), "plain", number)
        last = nodes[-1] if nodes else -1
        more = last + 1 < self.sizes[row] if self.parents is None else last in self.parents[row]
        kind = "corrected" if more else "bonus"
        if self.origins is None:
            return _provenance(self.names[:1] * len(nodes), kind, number)
        return _provenance(tuple([self.names[self.origins[row][node]] for node in nodes]), kind, number)


@functools.lru_cache(maxsize=4096)
def _provenance(drafters: tuple[str, ...], kind: str, round: int) -> tuple[Provenance, ...]:
    """Made once: sequences that run side by side have the same by the hundred, and nobody changes one."""
    accepted = [Provenance(name, "accepted", round, depth) for depth, name in enumerate(drafters, start=1)]
    return (*accepted, Provenance(None, kind, round, len(drafters) + 1))


def _read_trees(
    sizes: list[int], above: Table, scratch: Table | None
) -> tuple[list[int], list[int], list[Container[int]]]:
    """Sizes, depths and nodes that have children, of trees. Scratch nodes are nobody's proposal."""
    counts, depths = [], []
    parents: list[Container[int]] = []
    for row, (size, hung) in enumerate(zip(sizes, above)):
        real = range(size) if scratch is None else [n for n in range(size) if not scratch[row][n]]
        if not row or scratch is not None or size != sizes[row - 1] or hung != above[row - 1]:  # else as the last
            deep, having = [0] * (size + 1), [hung[node] for node in real]  # behind the nodes the root, which is -1
            for node, parent in zip(real, having):
                deep[node] = deep[parent] + 1
        counts.append(len(real))
        depths.append(max(deep))
        parents.append(having)
    return counts, depths, parents


def read_logprobs(round: Round, number: int, nodes: list[int], kept: list[int], tokenizer: Any) -> None:
    """Of the tokens a decision brought its sequence."""
    sequence = round.plan.sequences[number]
    rows = round.logits_of(number)[[0, *(1 + node for node in nodes)][: len(kept)]]
    sequence.logprobs += logprobs_of(rows, kept, sequence.params.logprobs or 0, tokenizer)


def read_prompt_logprobs(round: Round, tokenizer: Any) -> None:
    """Of the prompt tokens a round computed, where they were asked for."""
    row = round.plan.num_sampling * round.stride or round.batch.places.first_sampled[-1]
    assert round.out.logits is not None
    for sequence, start, count in round.prompt_rows:
        if sequence.finish_reason is None:
            if start == 0:
                sequence.prompt_logprobs = [None]
            following = sequence.tokens[start + 1 : start + 1 + count]
            logits = round.out.logits[row : row + count]
            sequence.prompt_logprobs += logprobs_of(logits, following, sequence.params.prompt_logprobs or 0, tokenizer)
        row += count


def logprobs_of(logits: Tensor, tokens: list[int], count: int, tokenizer: Any) -> list[dict[int, Logprob]]:
    """Raw log-softmax rows [K, V] → for each the chosen token and the `count` likeliest."""
    if not tokens:
        return []
    values = torch.log_softmax(logits.double(), dim=1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    own = values.gather(1, chosen)
    ids = torch.arange(values.shape[1], device=logits.device)
    rank = 1 + ((values > own) | ((values == own) & (ids < chosen))).sum(1)
    ordered = torch.sort(values, dim=1, descending=True, stable=True) if count else (values[:, :0], values[:, :0])
    best = [part[:, :count].tolist() for part in ordered]  # every read waits for the device: few, whatever the count
    result = []
    for token, said, likely, named in zip(tokens, zip(own[:, 0].tolist(), rank.tolist()), *best):
        entries = {token: said}
        for place, (value, other) in enumerate(zip(likely, named), start=1):
            entries.setdefault(other, (value, place))
        result.append({t: Logprob(value, place, _text(tokenizer, t)) for t, (value, place) in entries.items()})
    return result


def _text(tokenizer: Any, token: int) -> str:
    return "" if tokenizer is None else str(tokenizer.decode([token]))
