"""`paceline chat`: its commands, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, NGram, SamplingParams, Suffix
from paceline.cli import app
from paceline.drafters.first_of import FirstOf
from paceline.llm import LLM as Target
from paceline.templates import PromptTemplate
from tests.cli.chat.talking import FIRST, MOST, RUNNER, SECOND, THIRD, answers, shown, talk


def test_the_drafter_changes_in_mid_conversation_and_the_text_does_not(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Any] = []
    real = Target.set_drafter
    monkeypatch.setattr(Target, "set_drafter", lambda self, config: (used.append(config), real(self, config))[1])
    lines = [FIRST, "/drafter none", SECOND, "/drafter suffix ngram:max_match=3,min_match=1", THIRD, "/drafter"]
    result = talk(checkpoint, *lines)
    assert result.stdout == shown(answers(llm, FIRST, SECOND, THIRD))
    assert used[-3] == Suffix()
    assert used[-2] is None
    assert isinstance(used[-1], FirstOf)
    assert used[-1].configs == [Suffix(), NGram(min_match=1, max_match=3)]
    told = [line for line in result.stderr.splitlines() if line.startswith("drafter: ")]
    assert told[:2] == ["drafter: none", "drafter: suffix then ngram:max_match=3,min_match=1"]
    assert told[2].startswith("drafter: suffix then ngram")
    assert [" · plain" in line for line in result.stderr.splitlines() if " tokens · " in line] == [False, True, False]


def test_a_drafter_of_later_may_bring_its_own_length_and_is_told_nothing(llm: LLM, checkpoint: Path) -> None:
    lines = ["/drafter none", FIRST, "/drafter ngram:num_draft_tokens=8", SECOND]
    result = talk(checkpoint, *lines, options=("--num-draft-tokens", "3"))
    assert result.stdout == shown(answers(llm, FIRST, SECOND))
    told = [line for line in result.stderr.splitlines() if " tokens · " not in line]
    assert told == ["drafter: none", "drafter: ngram:num_draft_tokens=8"]


def test_no_drafter_needs_no_legend_and_a_new_one_only_its_own(checkpoint: Path) -> None:
    lines = ["/drafter none", "/drafter ngram", "/help"]
    words = ["chat", "--model", str(checkpoint), "--color"]
    said = RUNNER.invoke(app, words, input="\n".join(lines) + "\n").stderr
    before, after = said.split("drafter: ngram")
    assert before.strip() == "drafter: none"
    assert "drafted by ngram and accepted" in after and "suffix and accepted" not in after


def test_the_context_is_never_longer_than_the_model_takes(checkpoint: Path) -> None:
    questions = [f"rider {number} takes a turn" for number in range(8)]
    lines = [line for question in questions for line in (question, "/stats")]
    said = talk(checkpoint, *lines, options=("--max-model-len", "160", "--max-tokens", "60")).stderr
    held = [int(line.split()[1]) for line in said.splitlines() if line.startswith("context")]
    assert len(held) == 8
    assert 100 < max(held) <= 160


def test_the_temperature_changes_in_mid_conversation(llm: LLM, checkpoint: Path) -> None:
    result = talk(checkpoint, FIRST, "/temperature 0.9", SECOND, "/temperature", options=("--seed", "6"))
    first = answers(llm, FIRST)[0]
    messages = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": first}]
    params = SamplingParams(temperature=0.9, max_tokens=MOST, seed=6)
    second = llm.chat([*messages, {"role": "user", "content": SECOND}], params)[0].outputs[0].text
    assert result.stdout == shown([first, second])
    assert result.stderr.count("temperature: 0.9") == 2


def test_the_template_changes_in_mid_conversation(llm: LLM, checkpoint: Path, prompts: list[str]) -> None:
    lines = [FIRST, "/template vicuna", SECOND, "/template none", THIRD, "/template own", "x", "/template"]
    result = talk(checkpoint, *lines)
    texts = result.stdout.splitlines()
    said = [FIRST, texts[0], SECOND, texts[1], THIRD, texts[2], "x"]
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 4, said)]
    assert prompts == [
        llm.read_chat(messages[:1]).text,
        PromptTemplate("vicuna", llm.tokenizer).render(messages[:3]),
        f"{FIRST}{texts[0]}\n{SECOND}{texts[1]}\n{THIRD}",
        llm.read_chat(messages).text,
    ]
    assert "template: the model's own" in result.stderr


def test_a_system_message_is_set_shown_and_dropped(llm: LLM, checkpoint: Path, prompts: list[str]) -> None:
    lines = ["/system Be brief.", FIRST, "/reset", "/system", "/system none", FIRST]
    result = talk(checkpoint, *lines, options=("--system", "Be kind."))
    user = {"role": "user", "content": FIRST}
    assert prompts == [
        llm.read_chat([{"role": "system", "content": "Be brief."}, user]).text,
        llm.read_chat([user]).text,
    ]
    assert result.stderr.count("system message: Be brief.") == 2
    assert "no system message" in result.stderr


def test_reset_forgets_what_was_said(llm: LLM, checkpoint: Path) -> None:
    assert talk(checkpoint, FIRST, "/reset", SECOND).stdout == shown([*answers(llm, FIRST), *answers(llm, SECOND)])


@pytest.mark.parametrize("command", ["/quit", "/exit"])
def test_quit_ends_the_chat(llm: LLM, checkpoint: Path, command: str) -> None:
    assert talk(checkpoint, FIRST, command, SECOND).stdout == shown(answers(llm, FIRST))


def test_help_names_every_command(checkpoint: Path) -> None:
    said = talk(checkpoint, "/help").stderr
    for name in ("drafter", "temperature", "template", "system", "reset", "stats", "help", "quit"):
        assert f"/{name}" in said
    assert max(len(line) for line in said.splitlines()) <= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/drafter ngram:max_mach=3", "did you mean 'max_match'?"),
        ("/drafter no-such-model", "model 'no-such-model' was not found"),
        ("/drafter none ngram", "none cannot stand beside another"),
        ("/temperature warm", "type one, such as /temperature 0.7"),
        ("/temperature -1", "temperature=-1.0 is not allowed"),
        ("/template alpaca", "type own, none, llama, vicuna"),
        ("/tempreture 1", "did you mean /temperature?"),
        ("/xyzzy", "/help lists them"),
        (b"caf\xe9", "it is not UTF-8 text"),
        ("rider " * 1000, "say it shorter"),
    ],
)
def test_what_is_refused_gets_one_sentence_and_the_chat_goes_on(
    llm: LLM, checkpoint: Path, line: str | bytes, said: str
) -> None:
    result = talk(checkpoint, FIRST, line, SECOND)
    assert result.stdout == shown(answers(llm, FIRST, SECOND))
    before, refusal, after = result.stderr.splitlines()
    assert said in refusal
    assert before.startswith("24 tokens") and after.startswith("24 tokens")


def test_options_are_refused_before_the_chat_begins(checkpoint: Path) -> None:
    for words, said in (
        (["--template", "alpaca"], "template 'alpaca' is not known"),
        (["--drafter", "ngram:tree=1"], "option 'tree' is not known"),
        (["--top-p", "3"], "--top-p 3.0 is not allowed"),
    ):
        result = RUNNER.invoke(app, ["chat", "--model", str(checkpoint), *words], input=FIRST)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
