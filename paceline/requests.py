"""From a prompt and its parameters to sequences that are ready to be queued.

It knows the tokenizer and the limits a request is checked against. It must not know the weights, the engine or other
requests: whoever has a tokenizer can refuse a request before it is sent to where the weights are.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from paceline.engine.detokenizer import Detokenizer
from paceline.engine.sequence import Sequence
from paceline.errors import OptionError
from paceline.params import SamplingParams, count_arguments
from paceline.prompts import Prompt
from paceline.sampling.state import Words


@dataclass(frozen=True)
class Limits:
    """What a model and its engine can serve."""

    vocab_size: int
    max_model_len: int
    max_prompt_len: int | None = None
    end_ids: tuple[int, ...] = ()  # those outside the vocabulary can never be said, and hold nothing back


def prepare(
    prompt: Prompt, params: SamplingParams, tokenizer: Any, limits: Limits, request_id: str, seed: int
) -> list[Sequence]:
    """The n samples of a request that `check` let through."""
    if params.stop_strings and params.skip_special_tokens:
        params = stop_at_special(params, tokenizer)
    words = find_words(params, tokenizer, limits)
    ids, most, spoken = prompt.ids, limits.max_model_len, tokenizer if params.detokenize else None
    if params.max_tokens is not None:
        most = min(most, len(ids) + params.max_tokens)
    including, skipping = params.include_stop_str_in_output, params.skip_special_tokens
    samples, ends = list[Sequence](), frozenset((-1, *words.stops))
    for index in range(params.n):
        text = Detokenizer(spoken, ids, params.stop_strings, include_stop=including, skip_special=skipping)
        leader = samples[0] if samples else None
        samples.append(Sequence(request_id, index, list(ids), len(ids), params, seed, words, text, most, leader, ends))
    return samples


def find_seed(asked: int | None, run: int | None, number: int) -> int:
    """A request's own seed; else one made of the run's seed and the request's number in it; else a fresh one."""
    if asked is not None:
        return asked
    if run is None:
        return secrets.randbits(63)
    digest = hashlib.blake2b(f"{run} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def check(prompt: Prompt, params: SamplingParams, tokenizer: Any, limits: Limits) -> None:
    """Raise OptionError where a request cannot be served: what is judged with prompt, tokenizer and limits at hand."""
    most = limits.max_model_len - 1 if limits.max_prompt_len is None else limits.max_prompt_len
    if not 0 < len(prompt.ids) <= min(most, limits.max_model_len - 1):
        raise OptionError(_wrong_length(len(prompt.ids), limits))
    if params.stop_strings and tokenizer is None:
        raise OptionError(f"stop={params.stop!r} is text, but this model has no tokenizer; give stop_token_ids")
    spelled = next((word for word in params.bad_words or () if isinstance(word, str)), None)
    if spelled is not None and tokenizer is None:
        raise OptionError(f"bad_words has {spelled!r}, but this model has no tokenizer; give token ids")
    named = {
        "the prompt": prompt.ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": [i for word in params.bad_words or () if not isinstance(word, str) for i in word],
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise OptionError(f"{name} has token id {token}; the model's ids are 0 to {limits.vocab_size - 1}")


def _wrong_length(count: int, limits: Limits) -> str:
    if not count:
        return "the prompt is empty; it needs at least one token"
    if count < limits.max_model_len:
        return f"the prompt has {count} tokens; max_prompt_len={limits.max_prompt_len} allows no more"
    most = limits.max_model_len
    return f"the prompt has {count} tokens; max_model_len={most} leaves room for {most - 1}"


def stop_at_special(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """A stop text that is one of the tokenizer's special tokens is that token: such tokens leave no text to stop at."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = [token for token, entry in added.items() if entry.special and entry.content in params.stop_strings]
    return replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ids]) if ids else params


def find_words(params: SamplingParams, tokenizer: Any, limits: Limits) -> Words:
    """Bad words as token sequences, the ids that min_tokens holds back, and the user's functions.

    A tokenizer may know more ids than the model can say; what needs one of those need not be held back.
    """
    bad = _spell_out(params.bad_words, tokenizer, limits) if params.bad_words else []
    ends = () if params.ignore_eos else limits.end_ids
    stops = [token for token in (*ends, *(params.stop_token_ids or ())) if token < limits.vocab_size]
    functions = [(function, count_arguments(function) == 3) for function in params.logits_processors or ()]
    return Words(bad, stops, functions)


def _spell_out(words: Iterable[Any], tokenizer: Any, limits: Limits) -> list[list[int]]:
    bad: list[list[int]] = []
    for word in words:
        if not isinstance(word, str):
            bad.append(list(word))
            continue
        for spelling in dict.fromkeys((word, " " + word.lstrip())):
            ids = list(tokenizer.encode(spelling, add_special_tokens=False))
            if ids and ids not in bad and max(ids) < limits.vocab_size:
                bad.append(ids)
    return bad
