"""Requests that nobody would send, made from a number: the same number, the same request."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

PATHS = (
    "/v1/completions",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
)
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the rider", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the rider"}], "max_tokens": 4},
    "/tokenize": {"prompt": "the rider"},
    "/detokenize": {"tokens": [40, 41]},
}
FIELDS = (
    *("model", "prompt", "messages", "text", "tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "n"),
    *("seed", "max_draft_tokens", "stream", "stream_options", "speculation", "return_provenance", "echo", "logprobs"),
    *("best_of", "suffix", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "prompt_logprobs", "user", "metadata"),
    *("add_special_tokens", "nobody", "", "__class__", "model_config"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1.5, -0.0, 1e-300, 1e300, 2**31, 2**63, 2**64, -(2**63), 10**40),
    *(
        float("nan"),
        float("inf"),
        -float("inf"),
        "",
        "a",
        "the rider",
        "\x00",
        "\ud800",
        "\udfff\ud800",
        "🚲" * 50,
        "é",
    ),
    *("default", "tiny", "x" * 5000, "1", "true", "{{ 1/0 }}", "<|im_end|>", [], [0], [1, 2, 3], [-1], [10**9], [None]),
    *(["a"], ["a", 1], [[]], [[1], ["a"]], [["a"]], ["a"] * 300, [5] * 700, {}, {"a": 1}, {"5": 1.0}, {"5": "x"}),
    *({"enabled": False}, {"max_draft_tokens": 2}, {"include_usage": True}, {"type": "text"}, {"role": "user"}),
    *([{"role": "user", "content": "a"}], [{"role": "user"}], [{"role": 1, "content": 2}], [{}], [[{}]]),
    *([{"role": "assistant", "content": None, "tool_calls": [{"function": 3}]}], [{"role": "user", "content": [{}]}]),
)
METHODS = ("POST",) * 30 + ("GET", "PUT", "DELETE", "OPTIONS")
TYPES = ("application/json",) * 20 + (
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
)


class Fuzzed(NamedTuple):
    method: str
    path: str
    type: str
    body: bytes


def fuzzed(number: int) -> Fuzzed:
    luck = random.Random(number)
    path = luck.choice(PATHS)
    body = dict(BASES[path])
    for _ in range(luck.choice((0, 1, 1, 2, 2, 4))):
        body[luck.choice(FIELDS)] = luck.choice(VALUES)
    raw = json.dumps(body).encode()
    if luck.random() < 0.15:
        raw = _spoilt(luck, raw)
    return Fuzzed(luck.choice(METHODS), path, luck.choice(TYPES), raw)


def _spoilt(luck: random.Random, raw: bytes) -> bytes:
    """Bytes lost, changed, doubled or put in."""
    changed = bytearray(raw)
    for _ in range(luck.randint(1, 4)):
        place = luck.randrange(len(changed))
        way = luck.randrange(4)
        if way == 0:
            changed[place] = luck.randrange(256)
        elif way == 1:
            del changed[place : place + luck.randint(1, 8)]
        elif way == 2:
            changed[place:place] = changed[place : place + 20] * luck.randint(1, 3)
        else:
            changed[place:place] = luck.choice(
                (b"\xff", b"\x00", b"[" * 3000, b'{"a":', b"1" * 5000, b"\\ud800", b"NaN")
            )
        changed = changed or bytearray(b"0")
    return bytes(changed)


def is_right(status: int) -> bool:
    """Whatever is asked: an answer, what is wrong with the question, or come again later."""
    return status in (200, 429, 503) or 400 <= status < 500
