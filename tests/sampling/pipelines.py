"""The sampling pipeline stated one row and one token at a time, and held against `process`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paceline.params import SamplingParams
from paceline.sampling.processors import process
from paceline.sampling.state import Words
from tests.sampling.checks import Case, make_rows, make_state, random_tree

VOCAB = 23


NEVER = -math.inf


EDGE = 1e-5  # a share this near to top_p or min_p may fall on either side: float32 sums of at most 23 terms


class TooClose(Exception):
    """The statement cannot say on which side of a limit a token falls in float32."""


def stated(logits: list[np.float32], case: Case, drafted: list[int]) -> list[np.float32]:
    """The design's pipeline in its order; float32 up to the temperature, then exact sets of kept tokens."""
    params, prompt, output = case.params, case.prompt, [*case.output, *drafted]
    row = stated_masks(logits, case, prompt + output, len(output))
    for token in range(len(row)):
        if token in prompt + output:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        row[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(params.presence_penalty) * np.float32(token in output)
    if params.temperature <= 1e-6:
        return row
    row = [value / np.float32(params.temperature) for value in row]
    for keep in (kept_by_min_p, kept_by_top_k, kept_by_top_p):
        kept = keep([float(value) for value in row], params)
        row = [value if token in kept else np.float32(NEVER) for token, value in enumerate(row)]
    return row


def stated_masks(logits: list[np.float32], case: Case, history: list[int], produced: int) -> list[np.float32]:
    params = case.params
    banned = {word[-1] for word in case.words.bad if _ends(history, word[:-1])}
    if produced < params.min_tokens:
        banned |= set(case.words.stops)
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    bias = params.logit_bias or {}
    raised = [value + np.float32(bias[token]) if token in bias else value for token, value in enumerate(logits)]
    return [np.float32(NEVER) if token in banned else value for token, value in enumerate(raised)]


def _ends(history: list[int], head: list[int]) -> bool:
    return len(history) >= len(head) and history[len(history) - len(head) :] == head


def kept_by_min_p(row: list[float], params: SamplingParams) -> set[int]:
    shares = [math.exp(value - max(row)) for value in row]
    if params.min_p > 0 and any(abs(share - params.min_p) < EDGE * params.min_p for share in shares):
        raise TooClose
    return {token for token, share in enumerate(shares) if share >= params.min_p}


def kept_by_top_k(row: list[float], params: SamplingParams) -> set[int]:
    if params.top_k <= 0:
        return set(range(len(row)))
    return {token for token, value in enumerate(row) if sum(other > value for other in row) < params.top_k}


def kept_by_top_p(row: list[float], params: SamplingParams) -> set[int]:
    if params.top_p >= 1:
        return set(range(len(row)))
    weights = [math.exp(value - max(row)) for value in row]
    kept, before = set(), 0.0
    for token in sorted(range(len(row)), key=lambda token: (-row[token], token)):
        if kept and weights[token] and abs(before - params.top_p) < EDGE:
            raise TooClose
        if kept and before >= params.top_p:
            break
        kept.add(token)
        before += weights[token] / sum(weights)
    return kept


def random_params(draws: np.random.Generator, stages: set[str]) -> SamplingParams:
    """Every stage of `stages` set to something that bites."""
    some = {
        "temperature": float(draws.uniform(0.3, 2.0)),
        "min_p": float(draws.uniform(0.01, 0.3)),
        "top_k": int(draws.integers(1, VOCAB + 5)),
        "top_p": float(draws.uniform(0.05, 0.99)),
        "presence_penalty": float(draws.uniform(-2, 2)),
        "frequency_penalty": float(draws.uniform(-2, 2)),
        "repetition_penalty": float(draws.uniform(0.5, 2)),
        "logit_bias": {int(token): float(draws.uniform(-5, 5)) for token in draws.integers(0, VOCAB, 4)},
        "allowed_token_ids": sorted({int(token) for token in draws.integers(0, VOCAB, 15)}),
        "min_tokens": int(draws.integers(1, 8)),
        "bad_words": [[0]],  # what is banned stands in Words; this only asks for the stage
    }
    chosen = {name: value for name, value in some.items() if name in stages}
    return SamplingParams(max_tokens=20, **chosen)  # type: ignore[arg-type]


PENALTIES = ["presence_penalty", "frequency_penalty", "repetition_penalty"]


MASKS = ["logit_bias", "allowed_token_ids", "min_tokens", "bad_words"]


ALL = ["temperature", "min_p", "top_k", "top_p", *PENALTIES, *MASKS]


def random_case(draws: np.random.Generator, stages: set[str]) -> Case:
    prompt = draws.integers(0, VOCAB, int(draws.integers(1, 8))).tolist()
    output = draws.integers(0, VOCAB, int(draws.integers(0, 8))).tolist()
    tokens, parents = random_tree(draws, int(draws.integers(0, 7)), VOCAB)
    case = Case(prompt, output, random_params(draws, stages), tokens=tokens, parents=parents)
    bad: list[list[int]] = []
    for _ in range(4 if "bad_words" in stages else 0):  # words that some row's history is about to complete
        node = int(draws.integers(-1, len(tokens)))
        history = [*prompt, *output, *case.drafted(node)]
        length = int(draws.integers(0, min(len(history), 5) + 1))
        bad.append([*history[len(history) - length :], int(draws.integers(0, VOCAB))])
    if bad:
        bad.append([VOCAB - 1] * 30)  # longer than any history
    case.words = Words(bad, draws.integers(0, VOCAB, 3).tolist())
    return case


def random_logits(draws: np.random.Generator, rows: int) -> Tensor:
    return torch.from_numpy(draws.normal(0, 2, (rows, VOCAB)).astype(np.float32))


def check_pipeline(seed: int, stages: set[str], least: int = 1) -> int:
    """A batch of random slots and trees: every row equals the statement on its own history. Returns changed rows."""
    draws = np.random.default_rng(seed)
    cases = [random_case(draws, stages) for _ in range(10)]
    rows, places = make_rows(cases)
    logits = random_logits(draws, len(places))
    found = process(logits, rows, make_state(cases, VOCAB))
    changed = skipped = 0
    for row, (slot, node) in enumerate(places):
        try:
            expected = stated(list(logits[row].numpy()), cases[slot], cases[slot].drafted(node))
        except TooClose:
            skipped += 1
            continue
        changed += not torch.equal(logits[row], found[row])
        assert found[row].tolist() == [float(value) for value in expected], (seed, slot, node, cases[slot])
    assert skipped <= 2, f"{skipped} rows of {len(places)} could not be judged"
    assert changed >= least, "no row was changed, so nothing was tested"
    return changed
