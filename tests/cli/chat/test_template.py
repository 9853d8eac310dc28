"""`paceline chat` with templates: the model's own, none, another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.cli.conversation import Conversation
from tests.cli.chat.talking import FIRST, MOST, SECOND, answers, shown, talk


def test_a_model_without_template_completes_and_says_so(without_template: Path, prompts: list[str]) -> None:
    result = talk(without_template, FIRST, "/template own", "/template vicuna", SECOND)
    llm = LLM(str(without_template))
    text = llm.generate(FIRST, SamplingParams(temperature=0.0, max_tokens=MOST))[0].outputs[0].text
    assert result.stdout.startswith(text + "\n")
    assert "/template vicuna gives it one" in result.stderr.splitlines()[0]
    assert "this model has no chat template of its own" in result.stderr
    assert prompts[1].endswith(f"USER: {FIRST} ASSISTANT: {text}</s>USER: {SECOND} ASSISTANT:")


def test_a_template_text_takes_every_turn(llm: LLM) -> None:
    conversation = Conversation(llm, "Q: {input_text}\nA:", "Be brief.")
    for role, text in (("user", "one"), ("assistant", " 1"), ("user", "two")):
        conversation.add(role, text)
    assert conversation.fit(0)[0].text == "Be brief.\nQ: one\nA: 1\nQ: two\nA:"


def test_a_template_file_that_is_no_text_is_refused_and_the_chat_goes_on(
    llm: LLM, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "some.bin").write_bytes(b"\xff\xfe\x00")
    result = talk(checkpoint, FIRST, f"/template {tmp_path / 'some.bin'}", SECOND)
    assert result.stdout == shown(answers(llm, FIRST, SECOND))
    assert f"the template file {tmp_path / 'some.bin'} cannot be read: it is not UTF-8 text" in result.stderr


def test_a_foreign_template_stops_before_the_other_side_speaks(llm: LLM) -> None:
    assert Conversation(llm, "vicuna").stops == ("USER:",)
    assert Conversation(llm).stops == ()


def test_a_template_that_refuses_the_conversation_leaves_the_old_one(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message here') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    conversation = Conversation(llm, None, "Be brief.")
    with pytest.raises(ValueError, match="no system message here"):
        conversation.set_template(str(tmp_path / "strict.jinja"))
    assert conversation.template == "own"
    conversation.set_system(None)
    conversation.set_template(str(tmp_path / "strict.jinja"))
    with pytest.raises(ValueError, match="no system message here"):
        conversation.set_system("Be brief.")
    assert conversation.system is None
