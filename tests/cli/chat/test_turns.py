"""`paceline chat`: turns against the library's own answers, Ctrl-C, and what goes when the model is full."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.cli import app
from paceline.llm import LLM as Target
from tests.cli.chat.talking import FIRST, MOST, RUNNER, SECOND, THIRD, answers, shown, talk


def test_every_turn_sees_the_ones_before(llm: LLM, checkpoint: Path) -> None:
    result = talk(checkpoint, FIRST, SECOND, "", THIRD)
    expected = answers(llm, FIRST, SECOND, THIRD)
    assert expected[1] != answers(llm, SECOND)[0]
    assert result.stdout == shown(expected)


def test_a_line_of_figures_follows_every_answer(checkpoint: Path) -> None:
    lines = talk(checkpoint, FIRST, SECOND, options=("--drafter", str(checkpoint))).stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{MOST} tokens · ")
        assert " tokens/s · " in line
        assert "× plain" in line
        assert line.endswith(" · cut short")
    # The first forward gives 1 token; then five drafts and one of the target's own make 6, and 5 at the end.
    assert " 4.80 per forward " in lines[0]


def test_a_turn_computes_only_what_is_new(checkpoint: Path) -> None:
    stats = talk(checkpoint, FIRST, SECOND, THIRD, "/stats").stderr
    own = LLM(str(checkpoint), drafter="suffix", max_num_seqs=1)
    messages: list[dict[str, str]] = []
    hits, total = [], 0
    for question in (FIRST, SECOND, THIRD):
        messages.append({"role": "user", "content": question})
        (request,) = own.chat(messages, SamplingParams(temperature=0.0, max_tokens=MOST))
        messages.append({"role": "assistant", "content": request.outputs[0].text})
        hits.append(request.outputs[0].stats.prefix_hit)
        total += len(request.prompt_token_ids)
    assert hits[2] > hits[1] > 0
    assert f"{total} tokens, {sum(hits)} of them from the cache" in stats


def test_sampling_options_count_in_every_turn(llm: LLM, checkpoint: Path) -> None:
    options = ("--temperature", "0.9", "--top_k", "30", "--seed", "4", "--stop", "e")
    expected = answers(llm, FIRST, SECOND, temperature=0.9, top_k=30, seed=4, stop="e")
    assert talk(checkpoint, FIRST, SECOND, options=options).stdout == shown(expected)


def test_a_backslash_carries_a_message_on(checkpoint: Path, prompts: list[str], llm: LLM) -> None:
    talk(checkpoint, "the rider\\", "in front\\")
    assert prompts == [llm.read_chat([{"role": "user", "content": "the rider\nin front"}]).text]


def test_a_message_may_begin_with_a_slash(checkpoint: Path, prompts: list[str], llm: LLM) -> None:
    talk(checkpoint, "//etc is a folder")
    assert prompts == [llm.read_chat([{"role": "user", "content": "/etc is a folder"}]).text]


def test_colours_are_there_when_forced(checkpoint: Path) -> None:
    words = ["chat", "--model", str(checkpoint), "--drafter", str(checkpoint), "--max-tokens", "12", "--color"]
    result = RUNNER.invoke(app, words, input=FIRST)
    assert "\x1b[1;32m" in result.stdout


# Ctrl-C


def interrupt_at(step: int, press: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C during a step of the first answer."""
    real, steps = Target._take_turn, 0

    def stepped(self: LLM) -> Any:
        nonlocal steps
        steps += self.engine.drafter is not None  # the probe of plain decoding has none
        if steps == step:
            press()
        return real(self)

    monkeypatch.setattr(Target, "_take_turn", stepped)


def press_control_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_the_answer_and_what_was_said_stays(
    llm: LLM, checkpoint: Path, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(6, press_control_c, monkeypatch)
    result = talk(checkpoint, FIRST, SECOND)
    partial = result.stdout.split("\n")[0]
    assert 0 < len(partial) < len(answers(llm, FIRST)[0])
    assert answers(llm, FIRST)[0].startswith(partial)
    said = [("user", FIRST), ("assistant", partial), ("user", SECOND)]
    assert prompts[1] == llm.read_chat([{"role": role, "content": text} for role, text in said]).text
    first, second = result.stderr.splitlines()
    assert first.endswith("stopped")
    assert second.endswith("cut short")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_before_the_first_word_forgets_the_question(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raised() -> None:
        raise KeyboardInterrupt

    interrupt_at(1, raised, monkeypatch)
    result = talk(checkpoint, FIRST, SECOND)
    assert result.stdout == "\n" + shown(answers(llm, SECOND))
    assert "the question is forgotten" in result.stderr


# Length


def test_the_oldest_turns_go_when_the_model_is_full(llm: LLM, checkpoint: Path, prompts: list[str]) -> None:
    questions = [f"rider {number} takes a turn" for number in range(12)]
    result = talk(checkpoint, *questions, options=("--max-model-len", "160", "--max-tokens", "12"))
    assert "oldest messages were dropped" in result.stderr
    lengths = [len(llm.tokenizer.encode(prompt)) for prompt in prompts]
    assert len(lengths) == 12
    assert max(lengths) <= 160 - 12
    for question, prompt in zip(questions, prompts):
        assert f"user\n{question}<|im_end|>\n<|im_start|>assistant\n" in prompt
        assert prompt.startswith("<|im_start|>user\n")
    dropping = [
        place for place in range(1, 12) if questions[0] in prompts[place - 1] and questions[0] not in prompts[place]
    ]
    assert lengths[dropping[0]] <= 160 // 2


def test_turns_that_had_to_go_come_back_when_no_word_was_said(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long, seen = "rider " * 230, [""]
    real, step = Target.stream, Target._take_turn

    def stream(self: LLM, prompt: Any, params: SamplingParams) -> Any:
        seen.append(prompt.get("prompt", ""))
        return real(self, prompt, params)

    def stepped(self: LLM) -> Any:
        if long.strip() in seen[-1]:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Target, "stream", stream)
    monkeypatch.setattr(Target, "_take_turn", stepped)
    result = talk(checkpoint, FIRST, SECOND, long, THIRD, options=("--max-model-len", "300"))
    assert "oldest messages were dropped" in result.stderr
    assert "the question is forgotten" in result.stderr
    first, second = answers(llm, FIRST, SECOND)
    said = zip(["user", "assistant"] * 3, [FIRST, first, SECOND, second, THIRD])
    assert seen[-1] == llm.read_chat([{"role": role, "content": text} for role, text in said]).text


def test_the_system_message_is_never_dropped(checkpoint: Path, prompts: list[str]) -> None:
    questions = [f"rider {number} takes a turn" for number in range(8)]
    options = ("--max-model-len", "160", "--max-tokens", "12", "--system", "Be kind.")
    assert "oldest messages were dropped" in talk(checkpoint, *questions, options=options).stderr
    assert all(prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n") for prompt in prompts)
