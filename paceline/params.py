"""What a request may ask for. Every field works with every drafter; a wrong value gets one sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import OptionError

GREEDY_BELOW = 1e-6
MAX_LOGPROBS = 1000
LARGEST = 1e6  # for what is multiplied into float32 logits


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop.

    temperature: 0 takes the likeliest token, as does all up to 1e-6 (ties: the lowest id); 1 samples as the model was
      trained.
    top_p: keep the likeliest tokens up to this share; 1 keeps all.
    top_k: keep so many of the likeliest tokens; 0 or -1 keeps all.
    min_p: keep tokens at least this likely, as a share of the likeliest; 0 keeps all.
    presence_penalty: -2 to 2: taken off tokens that the answer has already.
    frequency_penalty: -2 to 2: taken off once for each time the answer has the token.
    repetition_penalty: above 1: less of what prompt and answer have already.
    logit_bias: added to a token's logit, by token id.
    bad_words: never write this word.
    allowed_token_ids: no other tokens than these.
    min_tokens: no end and no stop before so many tokens.
    max_tokens: the most tokens of an answer; None: up to the model's length.
    stop: end before this text.
    stop_token_ids: end at this token.
    include_stop_str_in_output: keep the text that was stopped at.
    ignore_eos: go on after the model's own end, up to max_tokens.
    skip_special_tokens: whether special tokens are left out of the text.
    n: how many answers.
    seed: the same seed gives the same text; without one the engine's run gives one, and it is reported back.
    logprobs: tell each token's log-probability and so many alternatives.
    prompt_logprobs: the same for the tokens of the prompt.
    max_draft_tokens: the most drafted tokens a round for this request; 0 turns speculation off, None leaves it be.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_counts()
        self._check_tokens()
        stop = (self.stop,) if isinstance(self.stop, str) else _listed(self.stop)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r} is not allowed; allowed: True or False")
        if stop is None or any(not isinstance(text, str) or not text for text in stop):
            raise OptionError(f"stop={self.stop!r} is not allowed; allowed: a non-empty string or a list of them")
        object.__setattr__(self, "stop_strings", stop)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, LARGEST)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST)

    def _check_counts(self) -> None:
        _count("top_k", self.top_k, -1)
        _count("n", self.n, 1)
        _count("min_tokens", self.min_tokens, 0)
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("max_draft_tokens", 0)):
            value = getattr(self, name)
            if value is not None:
                _count(name, value, least)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > MAX_LOGPROBS:
                raise OptionError(f"{name}={getattr(self, name)} is not allowed; allowed: 0 to {MAX_LOGPROBS}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if self.seed is not None:
            check_seed(self.seed)

    def _check_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not _are_ids(_listed(getattr(self, name))):
                raise OptionError(f"{name}={getattr(self, name)!r} is not allowed; allowed: a list of token ids")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise OptionError("allowed_token_ids=[] allows no token at all; leave it out or name at least one")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias={self.logit_bias!r} is not allowed; allowed: a dictionary of token ids")
        for token, bias in (self.logit_bias or {}).items():
            if not _is_int(token) or token < 0 or not _is_number(bias) or abs(bias) > LARGEST:
                raise OptionError(
                    f"logit_bias={{{token!r}: {bias!r}}} is not allowed; allowed: token id → number within ±{LARGEST:g}"
                )
        words = _listed(self.bad_words)
        if words is None or not all(_is_word(word) for word in words):
            raise OptionError(
                f"bad_words={self.bad_words!r} is not allowed; allowed: a list of non-empty words or id lists"
            )


def check_seed(seed: Any) -> None:
    """64 bits, read with or without a sign."""
    _count("seed", seed, -(2**63), 2**64 - 1)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A number that a float can hold; 10**400 is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _listed(value: Any) -> tuple[Any, ...] | None:
    """A list as a tuple, nothing as an empty one; None: it is no list."""
    if value is None:
        return ()
    fine = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes)
    return tuple(value) if fine else None


def _are_ids(value: tuple[Any, ...] | None) -> bool:
    return value is not None and all(_is_int(token) and token >= 0 for token in value)


def _is_word(word: Any) -> bool:
    return bool(word) if isinstance(word, str) else bool(_listed(word)) and _are_ids(_listed(word))


def _number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> None:
    if not _is_number(value) or value < low or value > high or (open_below and value == low):
        bounds = f"{'above' if open_below else 'from'} {low:g} up to {high:g}"
        raise OptionError(f"{name}={value!r} is not allowed; allowed: a number {bounds}")


def _count(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):
        bounds = f"{low} or more" if high is None else f"{low} to {high}"
        raise OptionError(f"{name}={value!r} is not allowed; allowed: a whole number, {bounds}")
