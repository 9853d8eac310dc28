"""Texts to go on from, such that samples after them would show a bias.

A sample's first token is the target's own; drafts reach the second at the earliest. So the first should be next to
certain, for then samples agree on the text before the second; the second should be open; and drafts should come there.
Tokens behind a context's last full page are computed anew for every sample: the fewer there are, the sooner it is done.

Knows what the target says and where drafts came in greedy answers. Nothing is sampled before the choice is made, so the
choice itself makes no test likelier to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from paceline.bench.lens import TOGETHER, Lens, Text
from paceline.bench.measured import Answer
from paceline.prompts import Prompt

MOST = 64  # texts looked at
DRAFTED = ("accepted", "corrected")  # a draft stood where such a token came to stand


@dataclass(frozen=True)
class _Place:
    """An answer, cut before the token `first`."""

    answer: int
    context: list[int]
    first: int


@dataclass(frozen=True)
class _Scored:
    answer: int
    context: list[int]
    score: float  # how many samples come to a choice, times how open that is


def choose(
    lens: Lens, prompts: list[Prompt], answers: list[Answer], count: int, tell: Callable[[int, int], None]
) -> list[list[int]]:
    """The best `count`, or as many as there are: of every answer one, then of every answer a second."""
    places = [place for answer in answers for place in _places(prompts[answer.prompt], answer)]
    places = sorted(places, key=lambda place: (len(place.context) - 1) % lens.page)[:MOST]
    found: list[_Scored] = []
    for first in range(0, len(places), TOGETHER):
        tell(first, len(places))
        found += _score(lens, places[first : first + TOGETHER])
    tell(len(places), len(places))
    return [one.context for one in _in_turn(found)][:count]


def _places(prompt: Prompt, answer: Answer) -> Iterator[_Place]:
    """Where a draft came one token later; if none did, everywhere."""
    said = answer.output.token_ids
    drafted = [at for at, origin in enumerate(answer.output.provenance) if at and origin.kind in DRAFTED]
    for at in drafted or range(1, max(len(said), 2)):
        yield _Place(answer.prompt, [*prompt.ids, *said[: at - 1]], said[at - 1])


def _score(lens: Lens, places: list[_Place]) -> Iterator[_Scored]:
    before = lens.shares([Text(place.context, []) for place in places])
    after = lens.shares([Text(place.context, [place.first]) for place in places])
    for number, place in enumerate(places):
        certain, alike = before[number, place.first], (after[number] ** 2).sum()
        yield _Scored(place.answer, place.context, float(certain * (1 - alike)))


def _in_turn(found: list[_Scored]) -> list[_Scored]:
    """The best of each answer by score, then the second of each."""
    ranks: dict[int, int] = {}
    ranked = []
    for one in sorted(found, key=attrgetter("score"), reverse=True):
        ranks[one.answer] = rank = ranks.get(one.answer, 0) + 1
        ranked.append((rank, one))
    return [one for _, one in sorted(ranked, key=lambda item: item[0])]
