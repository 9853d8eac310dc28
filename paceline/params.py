"""What a request may ask for. Every field works with every drafter; a wrong value gets one sentence."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from paceline.errors import OptionError, nearest

GREEDY_BELOW = 1e-6
MAX_LOGPROBS = 1000
LARGEST = 1e6  # for what is multiplied into float32 logits

Kind = TypeVar("Kind", bound=Callable[..., Any])


def names_the_nearest(kind: Kind) -> Kind:
    """A dataclass that refuses a field it does not have with the nearest that it has."""
    made: Any = kind
    init, known = made.__init__, [item.name for item in fields(made) if item.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name in given.keys() - {*known}:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
            raise OptionError(f"{made.__name__} has no parameter {name!r}; {hint}")
        init(self, *args, **given)

    made.__init__ = checked
    return kind


@names_the_nearest
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
    logits_processors: functions (token_ids, logits) -> logits, called for every token with the answer so far.
    min_tokens: no end and no stop before so many tokens.
    max_tokens: the most tokens of an answer; None: up to the model's length.
    stop: end before this text.
    stop_token_ids: end at this token.
    include_stop_str_in_output: keep the text that was stopped at.
    ignore_eos: go on after the model's own end, up to max_tokens.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: whether there is a text at all; False leaves it empty, and token ids are told alone.
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
    logits_processors: Sequence[Callable[..., Any]] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name)))
        self._check_numbers()
        self._check_counts()
        self._check_tokens()
        stop = (self.stop,) if isinstance(self.stop, str) else _listed(self.stop)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            check_flag(name, getattr(self, name))
        if stop is None or any(not isinstance(text, str) or not text for text in stop):
            raise OptionError(f"stop={self.stop!r} is not allowed; allowed: a non-empty string or a list of them")
        for name, texts in (("stop", stop), ("bad_words", _listed(self.bad_words) or ())):
            for text in texts:
                check_text(name, text if isinstance(text, str) else "")
        if stop and not self.detokenize:
            raise OptionError(f"stop={self.stop!r} is text, and detokenize=False makes none; give stop_token_ids")
        object.__setattr__(self, "stop_strings", stop)

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_BELOW

    def _check_numbers(self) -> None:
        check_number("temperature", self.temperature, 0.0, LARGEST)
        check_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("repetition_penalty", self.repetition_penalty, 1 / LARGEST, LARGEST)

    def _check_counts(self) -> None:
        check_count("top_k", self.top_k, -1, 2**63 - 1)  # it goes into a table
        check_count("n", self.n, 1)
        check_count("min_tokens", self.min_tokens, 0)
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("max_draft_tokens", 0)):
            value = getattr(self, name)
            if value is not None:
                check_count(name, value, least)
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
            if not is_int(token) or token < 0 or not _is_number(bias) or abs(bias) > LARGEST:
                raise OptionError(
                    f"logit_bias={{{token!r}: {bias!r}}} is not allowed; allowed: token id → number within ±{LARGEST:g}"
                )
        words = _listed(self.bad_words)
        if words is None or not all(_is_word(word) for word in words):
            raise OptionError(
                f"bad_words={self.bad_words!r} is not allowed; allowed: a list of non-empty words or id lists"
            )
        functions = _listed(self.logits_processors)
        if functions is None or any(count_arguments(function) is None for function in functions):
            raise OptionError(
                f"logits_processors={self.logits_processors!r} is not allowed; allowed: a list of functions of "
                "(token_ids, logits) or (prompt_token_ids, token_ids, logits)"
            )


def check_seed(seed: Any) -> None:
    """64 bits, read with or without a sign."""
    check_count("seed", seed, -(2**63), 2**64 - 1)


def count_arguments(function: Any) -> int | None:
    """How a logits processor is called: with two arguments or, if it does not take two, with three; None: neither."""
    if not callable(function) or isinstance(function, type):
        return None
    try:
        signature = inspect.signature(function)
    except ValueError:  # of those that do not say
        return 2
    for count in (2, 3):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    return None


def check_text(name: str, text: str) -> None:
    """Half a surrogate pair is no character, and no tokenizer reads it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise OptionError(
            f"{name} has {code} at character {error.start}, which is half a surrogate pair and no character; leave it "
            "out, or decode the text with errors='replace'"
        ) from None


def is_int(value: Any) -> bool:
    """numpy's whole numbers are some, too."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """numpy's numbers, alone or in a list or array, as Python's own: they go into keys, JSON and other processes."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and any(hasattr(item, "tolist") for item in value):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and any(hasattr(item, "tolist") for pair in value.items() for item in pair):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value


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
    return value is not None and all(is_int(token) and token >= 0 for token in value)


def _is_word(word: Any) -> bool:
    return bool(word) if isinstance(word, str) else bool(_listed(word)) and _are_ids(_listed(word))


def check_number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> None:
    if not _is_number(value) or value < low or value > high or (open_below and value == low):
        bounds = f"{'above' if open_below else 'from'} {low:g} up to {high:g}"
        raise OptionError(f"{name}={value!r} is not allowed; allowed: a number {bounds}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is not allowed; allowed: True or False")


def check_count(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not is_int(value) or value < low or (high is not None and value > high):
        bounds = f"{low} or more" if high is None else f"{low} to {high}"
        raise OptionError(f"{name}={value!r} is not allowed; allowed: a whole number, {bounds}")
