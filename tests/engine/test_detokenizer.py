"""Text as it comes, against decoding everything at once, with a byte-level tokenizer trained here on the spot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenizer import Detokenizer
from tests.tokens import NUM_IDS, SPECIAL, byte_of, id_of_byte, tokenizer


def decode(ids: list[int], skip: bool = True) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=skip))


def detokenizer(
    stops: tuple[str, ...] = (), prompt: list[int] | None = None, *, include: bool = False, skip: bool = True
) -> Detokenizer:
    return Detokenizer(tokenizer(), prompt or [], stops, include_stop=include, skip_special=skip)


def stream(made: Detokenizer, ids: list[int]) -> tuple[list[str], str | None, int]:
    """Deltas, the stop string found, and how many tokens were read."""
    deltas: list[str] = []
    for count, token in enumerate(ids, start=1):
        found = made.push(token)
        if found is not None:
            made.finish()
            return [*deltas, made.take()], found, count
        deltas.append(made.take())
    made.finish()
    return [*deltas, made.take()], None, len(ids)


any_ids = st.lists(st.integers(0, NUM_IDS - 1), max_size=60)
words = st.sampled_from(["the ", "END", " draft", "日本", "😀", "é", "E", "ND", ".", "</s>"])
raw_bytes = st.binary(max_size=6).map(lambda data: [id_of_byte(byte) for byte in data])
whole_words = words.map(lambda text: [int(i) for i in tokenizer().encode(text, add_special_tokens=False)])
mixed_ids = st.lists(st.one_of(raw_bytes, whole_words), max_size=10).map(
    lambda parts: [i for part in parts for i in part]
)


def test_the_byte_tokens_are_what_they_say() -> None:
    assert decode([id_of_byte(byte) for byte in "né 日".encode()]) == "né 日"
    assert len(tokenizer()) == NUM_IDS


@given(st.one_of(any_ids, mixed_ids), st.booleans(), st.sampled_from(["", "the ride", "naïve 日本語 😀"]))
@settings(max_examples=250, deadline=None)
def test_deltas_add_up_to_decoding_everything_at_once(ids: list[int], skip: bool, before: str) -> None:
    prompt = [int(i) for i in tokenizer().encode(before, add_special_tokens=False)]
    made = detokenizer(prompt=prompt, skip=skip)
    deltas, found, _ = stream(made, ids)
    assert found is None
    assert "".join(deltas) == made.text == decode(prompt + ids, skip)[len(before) :]


def test_a_character_that_follows_sixteen_broken_bytes_is_not_lost() -> None:
    ids = [id_of_byte(0xFF)] * 14 + [id_of_byte(byte) for byte in "日".encode()] + [id_of_byte(ord("x"))]
    deltas, _, _ = stream(detokenizer(), ids)
    assert "".join(deltas) == decode(ids) == "\ufffd" * 14 + "日x"


def test_half_a_character_is_never_streamed() -> None:
    made, seen = detokenizer(), []
    for byte in "a😀b".encode():
        made.push(id_of_byte(byte))
        seen.append(made.take())
    assert seen == ["a", "", "", "", "😀", "b"]


def test_a_character_cut_by_the_end_is_shown_as_it_is() -> None:
    made = detokenizer()
    for byte in "a日".encode()[:-1]:
        made.push(id_of_byte(byte))
    assert made.take() == "a"
    made.finish()
    assert made.take() == "\ufffd" == decode([id_of_byte(byte) for byte in "日".encode()[:-1]])


def test_long_outputs_keep_no_more_ids_than_a_window_needs() -> None:
    made = detokenizer()
    ids = [
        int(i) for i in tokenizer().encode("the riders ride ahead in the draft 日本語 ", add_special_tokens=False)
    ] * 40
    deltas, _, _ = stream(made, ids)
    assert "".join(deltas) == decode(ids)
    assert len(made._ids) <= 80


def test_without_a_tokenizer_there_is_no_text() -> None:
    made = Detokenizer(None, [1, 2], ("x",), include_stop=False, skip_special=True)
    assert made.push(5) is None and made.take() == ""
    made.finish()
    assert made.text == ""


@pytest.mark.parametrize("skip, expected", [(True, "the END"), (False, "<s>the </s>END")])
def test_special_tokens_are_skipped_or_not(skip: bool, expected: str) -> None:
    ids = [int(i) for i in tokenizer().encode("<s>the </s>END", add_special_tokens=False)]
    deltas, _, _ = stream(detokenizer(skip=skip), ids)
    assert "".join(deltas) == expected


# Stop strings: brute force decodes everything anew after every token and searches from the beginning.


def shown(ids: list[int], skip: bool) -> str:
    """The text certain after these tokens: all of it, but for what may be the beginning of a character."""
    return decode(ids, skip).rstrip("\ufffd")


def search(ids: list[int], stops: tuple[str, ...], include: bool, skip: bool) -> tuple[str, str | None]:
    """The text and the stop string that ended it: the one completed first; of those, the one that begins first."""
    for count in range(1, len(ids) + 1):
        text = shown(ids[:count], skip)
        ends = [(text.find(stop) + len(stop), text.find(stop), n) for n, stop in enumerate(stops) if stop in text]
        if ends:
            end, start, number = min(ends)
            return text[: end if include else start], stops[number]
    return decode(ids, skip), None


stop_lists = st.lists(
    st.one_of(
        st.sampled_from(["END", "ND", "EN", "the ", "e E", "日", "本😀", "é.", ".."]),
        st.text("END the.", min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=3,
    unique=True,
).map(tuple)
clean_ids = st.lists(whole_words, max_size=14).map(lambda parts: [i for part in parts for i in part])


@given(clean_ids, stop_lists, st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_the_text_is_cut_where_a_search_after_every_token_says(
    ids: list[int], stops: tuple[str, ...], include: bool, skip: bool
) -> None:
    made = detokenizer(stops, include=include, skip=skip)
    deltas, found, count = stream(made, ids)
    text, expected = search(ids, stops, include, skip)
    assert (made.text, found) == (text, expected)
    assert "".join(deltas) == text, "something was streamed that the text does not have"
    first = [n for n in range(1, len(ids) + 1) if any(stop in decode(ids[:n], skip) for stop in stops)]
    assert found is None or count >= first[0]


@given(mixed_ids, stop_lists, st.booleans())
@settings(max_examples=250, deadline=None)
def test_no_stop_string_survives_in_the_text_even_among_broken_characters(
    ids: list[int], stops: tuple[str, ...], include: bool
) -> None:
    made = detokenizer(stops, include=include)
    deltas, found, _ = stream(made, ids)
    assert "".join(deltas) == made.text
    kept = made.text.removesuffix(found) if include and found else made.text
    assert not any(stop in kept for stop in stops if not include or found is None)
    assert (found is not None) == any(stop in decode(ids) for stop in stops)


def test_a_stop_string_may_span_tokens() -> None:
    made = detokenizer(("END",))
    ids = [id_of_byte(byte) for byte in b"xEND"]
    assert stream(made, ids) == (["", "", "x", ""], "END", 4)


def test_a_stop_string_is_found_in_front_of_half_a_character() -> None:
    """A token may end one character and begin the next; the text before the half character is certain."""
    (both,) = [n for n in range(NUM_IDS) if raw_of(n) == b" " + "日".encode()[:2]]
    made = detokenizer((" ",))
    assert stream(made, [both]) == ([""], " ", 1)


def raw_of(token: int) -> bytes:
    text = tokenizer().convert_ids_to_tokens(token)
    return b"" if text in SPECIAL else bytes(byte_of(letter) for letter in text)


@given(clean_ids, stop_lists, st.booleans(), st.integers(0, 12))
@settings(max_examples=400, deadline=None)
def test_a_stop_completed_before_min_tokens_never_ends_the_text_and_the_stream_is_the_text(
    ids: list[int], stops: tuple[str, ...], include: bool, least: int
) -> None:
    made, deltas, found = detokenizer(stops, include=include), [], None
    for count, token in enumerate(ids, start=1):
        found = made.push(token, check_stops=count >= least)
        before, text = shown(ids[: count - 1], True), shown(ids[:count], True)
        ends = [text.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in stops]
        assert (found is not None) == (count >= least and any(ends))
        deltas.append(made.take())
        if found is not None:
            break
    made.finish()
    assert "".join([*deltas, made.take()]) == made.text


def test_a_short_stop_that_passed_does_not_fire_beside_a_longer_one() -> None:
    made = detokenizer(("b", "wxyz"))
    ids = [id_of_byte(byte) for byte in b"abcdef"]
    pushed = [made.push(token, check_stops=count > 2) for count, token in enumerate(ids, start=1)]
    assert pushed == [None] * 6 and made.text == "abcdef"


def broken_after(text: bytes, given: int) -> tuple[list[int], list[int]]:
    ids = [id_of_byte(byte) for byte in text]
    return ids[:given], ids[given:]


@pytest.mark.parametrize("given", range(1, 6))
def test_a_character_split_between_prompt_and_output_is_in_the_output(given: int) -> None:
    """a, then four bytes of one character, then b: the output has whatever the prompt did not end."""
    prompt, output = broken_after("a😀b".encode(), given)
    deltas, _, _ = stream(detokenizer(prompt=prompt), output)
    assert "".join(deltas) == ("😀b" if given < 5 else "b")


@pytest.mark.parametrize(
    "text, given, expected",
    [
        (b"a\xf0\x9fbc", 3, "bc"),
        (b"a\xf0\x9f\xffb", 3, "\ufffdb"),
        (b"a\xff\xe6\x97\xa5", 2, "日"),
        (b"a\xff\xe6\x97\xa5", 3, "日"),
    ],
)
def test_what_the_prompt_left_broken_for_good_is_not_in_the_output(text: bytes, given: int, expected: str) -> None:
    prompt, output = broken_after(text, given)
    made = detokenizer(prompt=prompt)
    deltas, _, _ = stream(made, output)
    assert "".join(deltas) == made.text == expected


def test_text_is_held_only_while_it_may_belong_to_a_stop_string() -> None:
    made, seen = detokenizer(("END",)), []
    for byte in b"abcEx":
        made.push(id_of_byte(byte))
        seen.append(made.take())
    made.finish()
    assert "".join([*seen, made.take()]) == "abcEx"
    assert all("abcEx".startswith("".join(seen[: n + 1])) for n in range(5))


@pytest.mark.parametrize("stops", [("the", "h"), ("h", "the")])
def test_of_two_stops_in_one_token_the_one_completed_first_ends_the_text(stops: tuple[str, ...]) -> None:
    (token,) = tokenizer().encode("the", add_special_tokens=False)
    made = detokenizer(stops)
    assert stream(made, [token]) == (["t"], "h", 1)


@pytest.mark.parametrize("stops", [("the", "he"), ("he", "the")])
def test_of_two_stops_completed_together_the_one_that_begins_first_ends_the_text(stops: tuple[str, ...]) -> None:
    ids = [id_of_byte(byte) for byte in b"xthe"]
    deltas, found, _ = stream(detokenizer(stops), ids)
    assert ("".join(deltas), found) == ("x", "the")


def test_stops_are_not_looked_for_while_min_tokens_holds() -> None:
    made = detokenizer(("the",))
    ids = [id_of_byte(byte) for byte in b"the the"]
    assert [made.push(token, check_stops=count > 3) for count, token in enumerate(ids, start=1)] == [None] * 6 + ["the"]
    assert made.text == "the "
