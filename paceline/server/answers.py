"""What clients get back, in OpenAI's shapes: whole answers and streamed ones, and errors.

An answer is made of updates. What is ours stands beside OpenAI's fields: `usage.speculation`, and `provenance` where it
was asked for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.engine.sequence import Logprob
from paceline.engine.stats import SequenceStats, add_by_position
from paceline.engine.update import Update
from paceline.pieces import Pieces

Listed = tuple[int, dict[int, Logprob] | None]  # a token and what is told of it; nothing of a prompt's first
LEAST_LOGPROB = -9999.0  # JSON has no infinity


def encode(content: Any) -> bytes:
    """JSON in ASCII: a text may hold what UTF-8 cannot."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_body(sentence: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


@dataclass
class Form:
    """How an answer is told."""

    chat: bool
    model: str
    id: str
    echo: bool = False
    silent: bool = False  # nothing is told but the prompt: its one token more is dropped
    prompt_logprobs: bool = False  # vLLM's field was asked for
    provenance: bool = False
    top: int = 0  # alternatives told with each token of a chat
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * streamed) if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Choice:
    """One sample of one prompt as it comes."""

    def __init__(self, form: Form, index: int, prompt: list[int], echo: str, tokenizer: Any) -> None:
        self.form, self.index, self._tokenizer = form, index, tokenizer
        self._echo, self._prompt = echo, prompt
        self._texts: list[str] = []
        self._listed: list[Listed] = []
        self._origins: list[dict[str, Any]] = []
        self._pieces = Pieces(tokenizer, prompt) if form.provenance and tokenizer is not None else None
        self._asked = False  # for logprobs
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None
        self._offset = 0  # characters told
        self.stats = SequenceStats()
        self.finish: str | None = None
        self.error: str | None = None
        self.stop_reason: int | str | None = None

    def take(self, update: Update) -> dict[str, Any]:
        """A streamed chunk's choice; the whole is kept for `whole`."""
        text = self._echo if self.form.silent else self._echo + update.text
        said = self._said(update, text)
        self._echo = ""
        self.finish, self.error, self.stop_reason = update.finish_reason, update.error, update.stop_reason
        self.stats = update.stats or self.stats
        if self.form.silent:
            self.finish = self.finish and self.finish.replace("stop", "length")
            self.stats, self.stop_reason = SequenceStats(prefix_hit=self.stats.prefix_hit), None
        if update.prompt_logprobs is not None and self.form.prompt_logprobs:
            self.prompt_logprobs = [None if entry is None else _by_id(entry) for entry in update.prompt_logprobs]
        told: dict[str, Any] = {"index": self.index}
        if self.form.chat:
            told["delta"] = {"content": text} if self._texts[1:] else {"role": "assistant", "content": text}
        else:
            told["text"] = text
        told["logprobs"] = said["logprobs"]
        told["finish_reason"] = self.finish
        if self.stop_reason is not None:
            told["stop_reason"] = self.stop_reason
        if self.form.provenance:
            told["provenance"] = said["provenance"]
        return told

    def _said(self, update: Update, text: str) -> dict[str, Any]:
        self._texts.append(text)
        logprobs = None
        if update.logprobs is not None:
            self._asked = True
            listed = self._list(update)
            self._listed += listed
            logprobs = self._tell_logprobs(listed)
        origins = self._tell_origins(update) if self.form.provenance and not self.form.silent else []
        self._origins += origins
        return {"logprobs": logprobs, "provenance": origins}

    def _list(self, update: Update) -> list[Listed]:
        """An update's tokens; before them the prompt's, where it is echoed."""
        listed: list[Listed] = []
        if self.form.echo and update.prompt_logprobs is not None:
            listed += zip(self._prompt, update.prompt_logprobs)
        return listed if self.form.silent else [*listed, *zip(update.tokens, update.logprobs or [])]

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        told: dict[str, Any] = {"index": self.index}
        if self.form.chat:
            told["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            told["text"] = text
        self._offset = 0
        told["logprobs"] = self._tell_logprobs(self._listed) if self._asked else None
        told["finish_reason"] = self.finish
        if self.stop_reason is not None:
            told["stop_reason"] = self.stop_reason
        if self.prompt_logprobs is not None and not self.form.chat:
            told["prompt_logprobs"] = self.prompt_logprobs
        if self.form.provenance:
            told["provenance"] = self._origins
        return told

    def _tell_origins(self, update: Update) -> list[dict[str, Any]]:
        """Which drafter each token came from; its text, where there is a tokenizer, as far as it can be shown."""
        origins = [
            {"token_id": token, "drafter": one.drafter, "kind": one.kind, "round": one.round, "position": one.depth}
            for token, one in zip(update.tokens, update.provenance)
        ]
        if self._pieces is not None:
            for number, (token, one) in enumerate(zip(update.tokens, update.provenance)):
                self._pieces.take([token], [one])
                if number + 1 == len(update.tokens) and update.finished:
                    self._pieces.finish()
                origins[number]["text"] = "".join(text for text, _ in self._pieces.show(None))
        return origins

    def _tell_logprobs(self, listed: list[Listed]) -> dict[str, Any]:
        if self.form.chat:
            entries = [(entry[token], entry) for token, entry in listed if entry is not None]
            return {"content": [_chat_logprob(own, entry, self.form.top) for own, entry in entries], "refusal": None}
        tokens, offsets = [], []
        for token, entry in listed:
            tokens.append(self._decode(token) if entry is None else entry[token].decoded_token)
            offsets.append(self._offset)
            unseen = entry is None and not self._begins_with(tokens[-1])
            self._offset += 0 if unseen else len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else finite(entry[token].logprob) for token, entry in listed],
            "top_logprobs": [None if entry is None else _by_text(entry) for _, entry in listed],
            "text_offset": offsets,
        }

    def _decode(self, token: int) -> str:
        """A prompt's first token, of which nothing is known."""
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token]))

    def _begins_with(self, text: str) -> bool:
        """Whether the text shows its first token; one that the tokenizer put before a prompt it does not."""
        return "".join(self._texts[:1]).startswith(text)


def _chat_logprob(own: Logprob, entry: dict[int, Logprob], count: int) -> dict[str, Any]:
    def told(one: Logprob) -> dict[str, Any]:
        text = one.decoded_token or ""
        return {"token": text, "logprob": finite(one.logprob), "bytes": list(text.encode("utf-8", "replace"))}

    return {**told(own), "top_logprobs": [told(one) for one in _ranked(entry)[:count]]}


def _ranked(entry: dict[int, Logprob]) -> list[Logprob]:
    return sorted(entry.values(), key=lambda one: one.rank)


def _by_id(entry: dict[int, Logprob]) -> dict[str, Any]:
    """As vLLM tells them."""
    return {
        str(token): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in entry.items()
    }


def _by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    """Of tokens that look alike, parts of a character say, the likeliest is told."""
    return {one.decoded_token: finite(one.logprob) for one in reversed(_ranked(entry))}


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST_LOGPROB


def usage(prompt_tokens: int, all_stats: Iterable[SequenceStats]) -> dict[str, Any]:
    """OpenAI's counts, and what speculation did."""
    listed = list(all_stats)
    tokens = sum(stats.tokens for stats in listed)
    drafted = add_by_position(stats.proposed for stats in listed)
    accepted = add_by_position(stats.accepted for stats in listed)
    forwards = sum(stats.rounds for stats in listed)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stats.prefix_hit for stats in listed)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(accepted),
            "rejected_prediction_tokens": sum(drafted) - sum(accepted),
        },
        "speculation": {
            "drafted_tokens": sum(drafted),
            "accepted_tokens": sum(accepted),
            "target_forwards": forwards,
            "tokens_per_forward": round(tokens / forwards, 4) if forwards else 0.0,
            "drafted_by_position": drafted,
            "accepted_by_position": accepted,
        },
    }
