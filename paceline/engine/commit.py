"""What a verdict does to sequences: appended tokens, stops, moved cache rows, logprobs, provenance."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.round import Round
from paceline.engine.runner import Runner
from paceline.engine.sequence import Logprob, Provenance, Sequence
from paceline.sampling.verify import Decision


def append_tokens(sequence: Sequence, tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """Append until something ends the sequence; what comes after a stop was never there. Returns the tokens kept."""
    kept: list[int] = []
    for token in tokens:
        if token < 0:
            sequence.finish_reason = "error"
            sequence.error = (
                f"no token can be sampled at position {len(sequence.tokens)}: the sampling parameters rule out every "
                "token there, or the model produced NaN"
            )
            break
        kept.append(token)
        sequence.tokens.append(token)
        _look_for_end(sequence, token, end_ids)
        if sequence.finish_reason is not None:
            break
    if sequence.finish_reason is not None:
        sequence.detokenizer.finish()
    return kept


def _look_for_end(sequence: Sequence, token: int, end_ids: frozenset[int]) -> None:
    params = sequence.params
    chosen = token in (params.stop_token_ids or ())
    if chosen or (token in end_ids and not params.ignore_eos):
        sequence.finish_reason, sequence.stop_reason = "stop", token if chosen else None
        if params.include_stop_str_in_output:
            sequence.detokenizer.push(token, check_stops=False)
        return
    found = sequence.detokenizer.push(token, check_stops=sequence.num_output >= params.min_tokens)
    if found is not None:
        sequence.finish_reason, sequence.stop_reason = "stop", found
    elif sequence.room <= 0:
        sequence.finish_reason = "length"


def keep_accepted(round: Round, decisions: list[Decision], runner: Runner) -> None:
    """Move the rows of accepted tree nodes to their positions. A chain's are there already."""
    if round.proposal.chain:
        return
    cache = runner.cache
    size = cache.pool.block_size
    source: list[int] = []
    target: list[int] = []
    for sequence, work, decision in zip(round.sequences, round.work, decisions):
        for depth, node in enumerate(decision.nodes):
            if node != depth:
                base = work.start + work.count
                for line, into in ((base + node, source), (base + depth, target)):
                    into.append(sequence.pages[line // size] * size + line % size)
    if source:
        rows = torch.from_numpy(np.array([source, target])).to(cache.device, non_blocking=True)
        runner.model.ops.keep(cache.layers, rows[0], rows[1])


def shape_of(round: Round) -> tuple[list[int], list[set[int]], list[list[int]] | None]:
    """For each sampling sequence: the depth it proposed, the nodes that have children (-1 the root), their origins."""
    if round.proposal.chain:
        parents_of = [set(range(-1, size - 1)) for size in round.sizes]
        depths = list(round.sizes)
    else:
        parents = round.proposal.parents.tolist()
        scratch = round.proposal.scratch.tolist() if round.proposal.scratch is not None else None
        depths, parents_of = [], []
        for row, size in enumerate(round.sizes[: round.num_sampling]):
            real = [n for n in range(size) if scratch is None or not scratch[row][n]]
            depth = {-1: 0}
            for node in real:
                depth[node] = depth[parents[row][node]] + 1
            depths.append(max(depth.values()))
            parents_of.append({parents[row][node] for node in real})
    origins = None if round.proposal.origins is None else round.proposal.origins.tolist()
    return depths, parents_of, origins


def provenance_of(
    names: tuple[str, ...], decision: Decision, parents: set[int], origins: list[int] | None, number: int
) -> list[Provenance]:
    """Where each token of a decision came from."""
    result = []
    for depth, node in enumerate(decision.nodes, start=1):
        name = names[origins[node] if origins is not None else 0]
        result.append(Provenance(name, "accepted", number, depth))
    last = decision.nodes[-1] if decision.nodes else -1
    kind = "corrected" if last in parents else "bonus" if decision.nodes else "plain"
    result.append(Provenance(None, kind, number, len(decision.nodes) + 1))
    return result


def logprobs_of(logits: Tensor, tokens: list[int], count: int, tokenizer: Any) -> list[dict[int, Logprob]]:
    """Raw log-softmax rows [K, V] → for each the chosen token and the `count` likeliest."""
    if not tokens:
        return []
    values = torch.log_softmax(logits.double(), dim=1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    own = values.gather(1, chosen)
    ids = torch.arange(values.shape[1], device=logits.device)
    rank = 1 + ((values > own) | ((values == own) & (ids < chosen))).sum(1)
    order = torch.sort(values, dim=1, descending=True, stable=True) if count else None
    result = []
    for row, token in enumerate(tokens):
        entries = {token: (float(own[row, 0]), int(rank[row]))}
        if order is not None:
            for place in range(min(count, values.shape[1])):
                entries.setdefault(int(order.indices[row, place]), (float(order.values[row, place]), place + 1))
        result.append({t: Logprob(value, place, _text(tokenizer, t)) for t, (value, place) in entries.items()})
    return result


def _text(tokenizer: Any, token: int) -> str:
    return "" if tokenizer is None else str(tokenizer.decode([token]))


def sequences_before(sequences: list[Sequence], starts: list[int], size: int) -> list[int]:
    """For each sequence the page whose last position is the one before it went on, or -1 (inside a page, or at 0)."""
    return [
        sequence.pages[start // size - 1] if start and start % size == 0 else -1
        for sequence, start in zip(sequences, starts)
    ]


def tails_of(sequences: list[Sequence], starts: list[int], counts: list[int], size: int) -> tuple[list[int], list[int]]:
    """Pages whose last position just became permanent, and the row of the observation that holds it."""
    pages, rows, first = [], [], 0
    for sequence, start, count in zip(sequences, starts, counts):
        for position in range(start + (size - 1 - start % size), start + count, size):
            pages.append(sequence.pages[position // size])
            rows.append(first + position - start)
        first += count
    return pages, rows
