"""One request's one sample: its tokens, where it stands, what it reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cache.pages import Key
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.stats import SequenceStats
from paceline.models.batch import Work
from paceline.params import SamplingParams
from paceline.sampling.state import Words

NO_WORK = Work(-1, None, 0)


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


@dataclass(eq=False)  # two requests may be alike in everything
class Sequence:
    """What the host knows; rounds that are launched and not read yet are `ahead` of it."""

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
    ends: frozenset[int] = frozenset((-1,))  # what ends it: stop tokens, and -1 where none could be sampled
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of the full pages, in order
    num_computed: int = 0  # positions whose keys and values are in the cache
    ahead: list[int] = field(default_factory=list)  # per round ahead: the most tokens it may append; 0: a prompt chunk
    work: Work = NO_WORK  # its share of the last round it decoded in
    num_launched: int = 0  # num_computed, and the prompt chunks ahead of it
    num_told: int = 0  # output tokens that are told, or need not be: who waits for the end finds them here
    chars_told: int = 0  # and characters of its text
    end_told: bool = False
    watched: bool = True  # somebody takes its updates as they come; else the last alone is made
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

    def outlook(self) -> tuple[int | None, int, int]:
        """Where its next work begins, None: at a newest token that only the device knows. How long it is at most when
        all that is ahead has been read. How many more tokens it may have, should that bring as few as it can."""
        known, most, ahead = len(self.tokens), self.max_length, self.ahead
        longest = known + sum(ahead)
        if longest == known:
            return self.num_launched, known, most - known
        return None, longest if longest < most else most, most - known - len(ahead) + ahead.count(0)

    def most_nodes(self, budget: int, room: int) -> int:
        """The budget, cut by what the request allows and by the room: the last token is the target's own."""
        most = budget if self.params.max_draft_tokens is None else min(budget, self.params.max_draft_tokens)
        return most if most < room else max(0, room - 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    def note_told(self, num_tokens: int, chars: int, end: bool) -> None:
        """An update went out; said twice it changes nothing."""
        self.num_told, self.chars_told = max(self.num_told, num_tokens), max(self.chars_told, chars)
        self.end_told = self.end_told or end


Planned = tuple[Sequence, Work]  # and its share of a round
