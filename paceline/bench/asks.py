"""What a server is asked in a measurement: random texts of so many tokens, ShareGPT's, Spec-Bench's, or any prompts.

Texts are sent, not token ids, since not every server takes those. How long a text is in tokens is known where there is
a tokenizer, here or behind the server's /tokenize; else one word is taken for one token and the server's own count is
what is reported. Knows datasets and lengths. Must not know times or figures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from paceline.bench.client import Ask, Server, post
from paceline.bench.prompts import read_questions
from paceline.errors import OptionError

DATASETS = ("random", "sharegpt", "spec-bench", "jsonl")
OUTPUT_LEN = 256  # of a dataset that does not say it
RANDOM_LEN = 128  # of random texts
SHAREGPT_LENGTHS = (4, 1024, 2048)  # tokens: the least of either side, the most of a prompt, the most of both


@dataclass(frozen=True)
class Wanted:
    """Which asks, and how many."""

    name: str = "random"
    path: Path | None = None
    count: int = 100
    seed: int = 0
    input_len: int = 1024
    output_len: int | None = None  # None: the dataset's own
    range_ratio: float = 0.0  # random lengths lie so far around the given ones

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise OptionError(f"dataset_name={self.name!r} is not known; allowed: {', '.join(DATASETS)}")
        if self.name != "random" and self.path is None:
            raise OptionError(f"dataset_name={self.name!r} needs a file; give --dataset-path")
        if self.name == "random" and self.path is not None:
            raise OptionError(
                "--dataset-path belongs to another --dataset-name than random; give jsonl or leave it out"
            )
        if self.count < 1:
            raise OptionError(f"num_prompts={self.count} is not allowed; allowed: 1 or more")
        if self.input_len < 1 or (self.output_len is not None and self.output_len < 1):
            raise OptionError("lengths must be 1 or more tokens")
        if not 0 <= self.range_ratio < 1:
            raise OptionError(f"random_range_ratio={self.range_ratio} is not allowed; allowed: 0 to below 1")


@dataclass
class Speller:
    """Text and tokens: by a tokenizer here, by the server's routes, or, with neither, by words."""

    encode: Callable[[str], Awaitable[list[int]]] | None = None
    decode: Callable[[list[int]], Awaitable[str]] | None = None
    vocabulary: list[int] | None = None  # ids that random texts are made of; None: of words

    async def count(self, text: str) -> int | None:
        return None if self.encode is None else len(await self.encode(text))

    async def random(self, chooser: random.Random, count: int) -> tuple[str, int | None]:
        """A text of about so many tokens, and how many it has where that is known."""
        words = " ".join(chooser.choices(_words(), k=count))
        if self.encode is None or self.decode is None:
            return words, None
        ids = chooser.choices(self.vocabulary, k=count) if self.vocabulary else await self.encode(words)
        text = await self.decode(ids[:count])
        ids = await self.encode(text)  # what was decoded is rarely encoded the same
        if len(ids) > count:
            text = await self.decode(ids[:count])
            ids = await self.encode(text)
        return text, len(ids)


def local_speller(tokenizer: Any) -> Speller:
    special = set(getattr(tokenizer, "all_special_ids", None) or ())
    vocabulary = sorted(set(tokenizer.get_vocab().values()) - special)

    async def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    async def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return Speller(encode, decode, vocabulary)


async def server_speller(client: httpx.AsyncClient, server: Server) -> Speller:
    """With /tokenize and /detokenize as vLLM and paceline have them; else words."""

    async def encode(text: str) -> list[int]:
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        return list(((await post(client, "/tokenize", body)) or {}).get("tokens") or [])

    async def decode(ids: list[int]) -> str:
        told = await post(client, "/detokenize", {"model": server.model, "tokens": ids})
        return str((told or {}).get("prompt", ""))

    ids = await encode("a line of riders")
    return Speller(encode, decode) if ids and await decode(ids) else Speller()


def _words() -> list[str]:
    """Of our own prompts."""
    return " ".join(question.text for question in read_questions(None)).split()


async def read_asks(wanted: Wanted, speller: Speller) -> list[Ask]:
    """What is asked for, in the order in which it is sent; fewer where a file holds fewer."""
    chooser = random.Random(wanted.seed)
    if wanted.name == "random":
        return [await _random(wanted, speller, chooser) for _ in range(wanted.count)]
    assert wanted.path is not None
    if wanted.name == "sharegpt":
        return await _sharegpt(wanted, speller, chooser)
    most = wanted.output_len or OUTPUT_LEN
    asks = []
    for question in read_questions(wanted.path, wanted.count):
        messages = question.messages if question.is_conversation else None
        text = "\n\n".join(said["content"] for said in question.messages)
        asks.append(Ask(text, most, messages, await speller.count(text)))
    return asks


async def _random(wanted: Wanted, speller: Speller, chooser: random.Random) -> Ask:
    def length(given: int) -> int:
        return max(1, round(given * chooser.uniform(1 - wanted.range_ratio, 1 + wanted.range_ratio)))

    text, count = await speller.random(chooser, length(wanted.input_len))
    return Ask(text, length(wanted.output_len or RANDOM_LEN), None, count)


async def _sharegpt(wanted: Wanted, speller: Speller, chooser: random.Random) -> list[Ask]:
    """First questions with the lengths of their answers, those left out that are very short or very long."""
    least, most, both = SHAREGPT_LENGTHS
    pairs = _read_sharegpt(wanted.path or Path())
    chooser.shuffle(pairs)
    asks: list[Ask] = []
    for question, answer in pairs:
        if len(asks) >= wanted.count:
            break
        asked = await speller.count(question)
        length = wanted.output_len or await speller.count(answer) or len(answer.split())
        size = len(question.split()) if asked is None else asked
        if least <= size <= most and (wanted.output_len is not None or least <= length) and size + length <= both:
            asks.append(Ask(question, length, None, asked))
    if not asks:
        raise OptionError(f"the dataset {wanted.path} holds no conversation of a usable length")
    return asks


def _read_sharegpt(path: Path) -> list[tuple[str, str]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        said = [[turn["value"] for turn in row.get("conversations") or row.get("conversation") or ()] for row in rows]
        return [(str(turns[0]), str(turns[1])) for turns in said if len(turns) >= 2]
    except OSError as error:
        raise OptionError(f"the dataset {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"the dataset {path} is not ShareGPT's: a list of conversations is expected ({error!r:.80})"
        ) from None
