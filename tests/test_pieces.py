"""Text by origin: against decoding ever longer beginnings, and against what a stream shows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.style import Style

from paceline import LLM, SamplingParams
from paceline.engine.sequence import Provenance
from paceline.pieces import DRAFTER_STYLES, MEANINGS, STYLES, Pieces, legend, pieces, style_of
from tests.cli.checkpoints import make_model, make_tokenizer

VOCAB = 300


@functools.cache
def tokenizer() -> Any:
    return make_tokenizer()


def told(count: int) -> list[Provenance]:
    """One for each token, told apart by its round."""
    return [Provenance(None, "plain", place, 1) for place in range(count)]


def owners(ids: list[int]) -> list[tuple[str, int]]:
    """Each character with the first token after which it was there for good, by decoding every beginning anew."""
    text = tokenizer().decode(ids, skip_special_tokens=True)
    lengths = [
        len(tokenizer().decode(ids[:count], skip_special_tokens=True).rstrip("\ufffd")) for count in range(1, len(ids))
    ]
    lengths.append(len(text))
    return [(character, next(n for n, end in enumerate(lengths) if end > i)) for i, character in enumerate(text)]


def characters(found: list[tuple[str, Provenance]]) -> list[tuple[str, int]]:
    return [(character, origin.round) for text, origin in found for character in text]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, VOCAB - 1), max_size=30))
def test_every_character_belongs_to_the_token_that_completed_it(ids: list[int]) -> None:
    assert characters(pieces(ids, told(len(ids)), tokenizer())) == owners(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, VOCAB - 1), max_size=20), st.data())
def test_an_answer_may_be_shown_in_part(ids: list[int], data: st.DataObject) -> None:
    """Up to where a stop cut its text, and only its first tokens."""
    whole = owners(ids)
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    most = data.draw(st.integers(0, len(ids)), label="most")
    text = "".join(character for character, _ in whole[:cut])
    shown = characters(pieces(ids, told(len(ids)), tokenizer(), (), text, most))
    expected = [(character, owner) for character, owner in whole[:cut] if owner < most or most == len(ids)]
    assert shown == expected


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    ids = tokenizer().encode("a😀b", add_special_tokens=False)
    assert len(ids) == 6  # four bytes between two letters
    assert characters(pieces(ids, told(6), tokenizer())) == [("a", 0), ("😀", 4), ("b", 5)]


def test_half_a_character_at_the_end_is_the_last_token_s() -> None:
    ids = tokenizer().encode("a😀", add_special_tokens=False)[:3]
    assert characters(pieces(ids, told(3), tokenizer())) == [("a", 0), ("\ufffd", 2)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, VOCAB - 1), max_size=20), st.data())
def test_text_that_lags_behind_its_tokens_keeps_its_origins(ids: list[int], data: st.DataObject) -> None:
    """However late and in whatever portions the text may be shown, and wherever a stop cuts it."""
    whole = owners(ids)
    text = "".join(character for character, _ in whole)
    text = text[: data.draw(st.integers(0, len(text)), label="cut")]
    stream, shown = Pieces(tokenizer()), []
    for place, origin in enumerate(told(len(ids))):
        stream.take(ids[place : place + 1], [origin])
        certain = min(len(text), sum(owner <= place < len(ids) - 1 for _, owner in whole))
        before = len(characters(shown))
        portion = text[before : data.draw(st.integers(before, max(before, certain)), label="shown")]
        shown += stream.show(portion)
    stream.finish()
    shown += stream.show(text[len(characters(shown)) :])
    assert characters(shown) == whole[: len(text)]


@pytest.mark.parametrize("stop", [None, "e", "th", "\ufffd"])
def test_what_a_stream_shows_is_what_its_pieces_say(stop: str | None) -> None:
    llm = LLM(make_model(VOCAB), tokenizer=tokenizer(), drafter="ngram", kernels="reference", max_model_len=200)
    stopped = []
    for prompt in ("the rider in front", "a line of riders is faster"):
        stream, shown, output = Pieces(tokenizer(), tokenizer().encode(prompt)), [], None
        for chunk in llm.stream(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=60, stop=stop)):
            stream.take(chunk.token_ids, chunk.provenance)
            output = chunk.output
            if output is not None:
                stream.finish()
            found = stream.show(chunk.text)
            assert "".join(piece for piece, _ in found) == chunk.text
            shown += found
        assert output is not None
        stopped.append(output.stop_reason)
        by_character = [(character, origin) for text, origin in shown for character in text]
        expected = [(character, output.provenance[place]) for character, place in owners(output.token_ids)]
        assert by_character == expected[: len(output.text)]
    assert stop in stopped


def test_no_two_origins_differ_by_colour_alone() -> None:
    looks = [*DRAFTER_STYLES, *(STYLES[kind] for kind in STYLES if kind != "accepted")]
    plain = [str(Style.parse(look).without_color) for look in looks]
    assert len(set(plain)) == len(plain)
    assert STYLES.keys() == MEANINGS.keys()


def test_every_drafter_has_its_own_style_and_its_line_in_the_legend() -> None:
    drafters = ["suffix", "ngram"]
    first, second = (style_of(Provenance(name, "accepted", 0, 1), drafters) for name in drafters)
    assert first != second
    assert style_of(Provenance("unheard of", "accepted", 0, 1), drafters) == STYLES["accepted"]
    rows = legend(drafters, ["plain", "accepted"])
    assert [(name, style) for name, style, _ in rows] == [
        ("suffix", first),
        ("ngram", second),
        ("plain", STYLES["plain"]),
    ]
    assert [name for name, _, _ in legend(drafters, ["bonus"])] == ["bonus"]
