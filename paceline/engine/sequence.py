"""One request's one sample: its tokens, where it stands, what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cache.pages import Key
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.stats import SequenceStats
from paceline.params import SamplingParams
from paceline.sampling.state import Words


@dataclass(frozen=True)
class Logprob:
    """The raw log-probability of a token at its place, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class Provenance:
    """Where a token came from: accepted drafts name their drafter; the target's own token closes every round."""

    drafter: str | None  # None: the target
    kind: str  # accepted | corrected | bonus | plain
    round: int  # counted per sequence
    depth: int  # 1 for a round's first token


@dataclass
class Sequence:
    request_id: str
    index: int  # which of the request's n samples
    tokens: list[int]  # committed: the prompt, then the output
    prompt_length: int
    params: SamplingParams
    seed: int
    words: Words
    detokenizer: Detokenizer
    max_length: int  # committed tokens never exceed it
    leader: Sequence | None = None  # the sample whose prompt pages this one waits for
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of the full pages, in order
    num_computed: int = 0  # positions whose keys and values are in the cache
    in_flight: bool = False
    aborted: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    provenance: list[Provenance] = field(default_factory=list)
    stats: SequenceStats = field(default_factory=SequenceStats)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def num_left(self) -> int:
        """Committed tokens that are not computed yet: 1 means decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def room(self) -> int:
        """How many more tokens it may have."""
        return self.max_length - len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length
