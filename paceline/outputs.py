"""What users get back: the shapes vLLM users know, plus figures and provenance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.engine.sequence import Logprob, Provenance, Sequence
from paceline.engine.stats import SequenceStats
from paceline.engine.update import Update
from paceline.errors import EngineError


@dataclass
class CompletionOutput:
    """One sample of one prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # stop | length | abort | error; None while it runs
    stop_reason: int | str | None  # the stop token or string that ended it, if the request named it
    logprobs: list[dict[int, Logprob]] | None
    seed: int  # the same seed gives the same text
    stats: SequenceStats
    provenance: list[Provenance]
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids))


@dataclass
class RequestOutput:
    """One prompt with all its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass
class Chunk:
    """A piece of a streamed answer."""

    index: int  # which sample
    text: str
    token_ids: list[int]
    provenance: list[Provenance] = field(default_factory=list)
    output: CompletionOutput | None = None  # with the last chunk of a sample
    request_id: str = ""


@dataclass
class Score:
    """How likely the model finds a text. The first token has nothing before it, and no log-probability."""

    token_ids: list[int]
    logprobs: list[float]  # of every token but the first

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model was choosing among, on average; 1 is certainty."""
        return math.exp(-self.total / len(self.logprobs)) if self.logprobs else math.nan

    @classmethod
    def of(cls, output: RequestOutput) -> Score:
        ids, told = output.prompt_token_ids, output.prompt_logprobs or []
        if len(told) != len(ids):
            first = output.outputs[0]
            raise EngineError(f"the text was not scored: {first.error or f'it ended with {first.finish_reason!r}'}")
        return cls(ids, [entry[token].logprob for entry, token in zip(told, ids) if entry is not None])


def completion(sequence: Sequence) -> CompletionOutput:
    return CompletionOutput(
        index=sequence.index,
        text=sequence.detokenizer.text,
        token_ids=sequence.output,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=sequence.logprobs if sequence.params.logprobs is not None else None,
        seed=sequence.seed,
        stats=sequence.stats,
        provenance=sequence.provenance,
        error=sequence.error,
    )


class Gathered:
    """A sample put together from its updates, by whoever takes the engine's steps."""

    def __init__(self) -> None:
        self._updates: list[Update] = []

    def add(self, update: Update) -> CompletionOutput | None:
        """The whole sample, with its last update."""
        self._updates.append(update)
        if update.stats is None:
            return None
        updates = self._updates
        listed = [entry for one in updates for entry in one.logprobs or ()]
        return CompletionOutput(
            index=update.index,
            text="".join(one.text for one in updates),
            token_ids=[token for one in updates for token in one.tokens],
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            logprobs=None if update.logprobs is None else listed,
            seed=update.seed,
            stats=update.stats,
            provenance=[entry for one in updates for entry in one.provenance],
            error=update.error,
        )
