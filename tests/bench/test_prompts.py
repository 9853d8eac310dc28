"""The prompts of a measurement."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from paceline.bench.prompts import DEMOS, read_questions
from paceline.errors import OptionError


def write(path: Path, rows: list[object]) -> Path:
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["asked", "asked again"]},
        {"turns": "asked"},
        {"prompt": "asked"},
        {"question": "asked"},
        {"text": "asked"},
        {"text": "4", "question": "3", "prompt": "2", "turns": ["asked"]},
        {"text": "4", "question": "3", "prompt": "asked"},
        {"text": "4", "question": "asked"},
        {"turns": [], "prompt": None, "question": " ", "text": "asked"},
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_every_spelling_of_the_text_field_is_read_in_its_order(tmp_path: Path, row: object, name: str) -> None:
    (question,) = read_questions(write(tmp_path / name, [row]))
    assert question.text == "asked"


def test_the_limit_counts_questions_and_blank_lines_are_no_questions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n\n  \n{"text": "two"}\n{"text": "three"}\n')
    found = read_questions(path, 2)
    assert [(question.name, question.text) for question in found] == [("line 1", "one"), ("line 4", "two")]
    assert len(read_questions(path)) == 3


def test_lines_past_the_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\nnot JSON\n')
    assert len(read_questions(path, 1)) == 1
    with pytest.raises(OptionError, match="line 2, is not JSON"):
        read_questions(path, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no prompts"),
        (b'{"answer": "x"}\n', "line 1, has no text to ask; one of the fields messages, turns, prompt, question, text"),
        (b'["x"]\n', "line 1, has no text to ask"),
        (b'{"text": 3}\n', "line 1, has no text to ask"),
        (b"\xff\xfe\n", "cannot be read"),
        (b"[" * 100_000 + b"\n", "line 1, is not usable JSON: it nests too deep"),
        (b'{"text": ' * 100_000 + b"\n", "line 1, is not usable JSON: it nests too deep"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=said) as caught:
        read_questions(path)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_questions(tmp_path / "none.jsonl")
    whole = gzip.compress(b'{"text": "one"}\n' * 50)
    for broken in (b"not gzip", whole[: len(whole) // 2], whole[:10] + b"\xff" * 40):
        (tmp_path / "rows.jsonl.gz").write_bytes(broken)
        with pytest.raises(OptionError, match="cannot be read"):
            read_questions(tmp_path / "rows.jsonl.gz")


def test_a_conversation_is_read_whole_and_a_name_stands_for_the_line(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?"},
    ]
    rows = [{"messages": said, "prompt": "not this"}, {"name": "four", "prompt": "Five?"}]
    first, second = read_questions(write(tmp_path / "rows.jsonl", rows))
    assert (first.name, first.text, first.messages) == ("line 1", "Three?", said)
    assert first.is_conversation and not second.is_conversation
    assert (second.name, second.messages) == ("four", [{"role": "user", "content": "Five?"}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "asked",
        ["asked"],
        [{"role": "user"}],
        [{"role": "user", "content": " "}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "narrator", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ],
)
def test_messages_that_end_with_no_question_are_refused(tmp_path: Path, messages: object) -> None:
    with pytest.raises(OptionError, match="line 1, has no text to ask"):
        read_questions(write(tmp_path / "rows.jsonl", [{"messages": messages}]))


def test_without_a_file_there_are_prompts_of_our_own() -> None:
    assert read_questions(None) == read_questions(None, demo="te")
    assert read_questions(None, 3) == read_questions(None)[:3]
    assert len({tuple(question.name for question in read_questions(None, demo=name)) for name in DEMOS}) == len(DEMOS)
    with pytest.raises(OptionError, match="num_prompts=0"):
        read_questions(None, 0)


def test_a_demo_is_one_of_those_there_are_and_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the demo 'de' is not known; allowed: te \(English\), tc \(Chinese\), chat"):
        read_questions(None, demo="de")
    with pytest.raises(OptionError, match="a demo and a dataset were both given; give one"):
        read_questions(write(tmp_path / "rows.jsonl", [{"text": "x"}]), demo="te")


@pytest.mark.parametrize("name", DEMOS)
def test_our_own_prompts_are_all_different_and_of_their_kind(name: str) -> None:
    questions = read_questions(None, demo=name)
    assert len(questions) >= 8
    assert len({question.name for question in questions}) == len({question.text for question in questions})
    assert len({question.name for question in questions}) == len(questions)
    for question in questions:
        chinese = sum("\u4e00" <= letter <= "\u9fff" for letter in question.text)
        assert (chinese > 10) == (name == "tc")
        assert question.is_conversation == (name == "chat")
        roles = [message["role"] for message in question.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
