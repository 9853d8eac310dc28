"""What a completed round brought one sequence, as a value that can be sent anywhere."""

from __future__ import annotations

from typing import NamedTuple

from paceline.engine.sequence import Logprob, Provenance
from paceline.engine.stats import SequenceStats


class Update(NamedTuple):
    """What a completed round brought one sequence. A value: nothing in it changes later."""

    request_id: str
    index: int  # type: ignore[assignment]  # which of the request's samples
    tokens: list[int]
    num_tokens: int  # of the sample, with these
    text: str
    provenance: list[Provenance]
    logprobs: list[dict[int, Logprob]] | None  # None: not asked for
    seed: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    stats: SequenceStats | None = None  # the sample's figures, with its last update
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # where asked for, with the first tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
