"""`paceline chat`: turns against the library's own answers, commands, Ctrl-C, length, and a real terminal."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from paceline import LLM, NGram, SamplingParams, Suffix
from paceline.cli import app
from paceline.cli.chat import take
from paceline.cli.conversation import Conversation
from paceline.cli.talk import Talk
from paceline.drafters.first_of import FirstOf
from paceline.llm import LLM as Target
from paceline.templates import PromptTemplate
from tests.cli.checkpoints import LINES, SPECIAL, TEMPLATE, make_model
from tests.cli.terminal import on_terminal

RUNNER = CliRunner()
FIRST, SECOND, THIRD = "the rider in front", "and the riders behind", "then the line"
MOST = 24


def write_printable(folder: Path, template: str | None) -> Path:
    """A tiny checkpoint that knows letters, no control codes and no end: every answer is one line of known length."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter <= "~" or letter == "Ġ"]
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = template
    model = make_model(len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_printable(tmp_path_factory.mktemp("chat") / "tiny", TEMPLATE)


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_printable(tmp_path_factory.mktemp("chat") / "raw", None)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint))


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that were streamed, the probe of plain decoding left out."""
    seen: list[str] = []
    real = Target.stream

    def stream(self: LLM, prompt: Any, params: SamplingParams) -> Any:
        if "prompt" in prompt:
            seen.append(prompt["prompt"])
        return real(self, prompt, params)

    monkeypatch.setattr(Target, "stream", stream)
    return seen


def chat_options(checkpoint: Path) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    ctx = command.commands["chat"].make_context("chat", ["--model", str(checkpoint), "--max-tokens", "4"])
    chosen: dict[str, Any] = ctx.params
    return chosen


def talk(checkpoint: Path, *lines: str | bytes, options: tuple[str, ...] = ()) -> Result:
    given = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    words = ["chat", "--model", str(checkpoint), *options]
    words += [] if "--max-tokens" in options else ["--max-tokens", str(MOST)]
    result = RUNNER.invoke(app, words, input=given)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout + result.stderr
    return result


def answers(llm: LLM, *questions: str, **params: Any) -> list[str]:
    """The same conversation through the library, plainly decoded."""
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": MOST, **params})
    messages: list[dict[str, str]] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": llm.chat(messages, chosen)[0].outputs[0].text})
    return [message["content"] for message in messages[1::2]]


def shown(texts: list[str]) -> str:
    return "".join(text + "\n" for text in texts)


# Turns


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


# Commands


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


# Templates


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


# A real terminal


def test_on_a_terminal_the_chat_is_coloured_and_leaves_a_clean_screen(llm: LLM, checkpoint: Path) -> None:
    words = ("chat", "--model", str(checkpoint), "--max-tokens", "200", "--drafter", str(checkpoint))
    with on_terminal(*words) as terminal:
        terminal.wait_for("Ctrl-D ends")
        terminal.wait_for("> ")
        terminal.type(FIRST + "\n")
        terminal.wait_for("cut short")
        terminal.wait_for("> ")
        terminal.type("/temperature 0.5\n")
        terminal.wait_for("temperature: 0.5")
        terminal.wait_for("> ")
        terminal.type("\x1b[200~a pasted line\nand another\x1b[201~\n")
        terminal.wait_for("cut short")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.press("\x03", until="/quit or Ctrl-D ends the chat")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        lines, written = terminal.screen.lines, terminal.written.decode()
    answer = answers(llm, FIRST, max_tokens=200)[0]
    start = lines.index(f"> {FIRST}") + 1
    end = next(place for place in range(start, len(lines)) if lines[place].startswith("200 tokens · "))
    said = lines[start:end]
    assert "".join(said).replace(" ", "") == answer.replace(" ", "")
    for line, following in itertools.pairwise(said):  # a line ends where the next word does not fit
        assert len(line) + 1 + len(following.split()[0]) > 80
    assert lines[end + 1 :][:2] == ["> /temperature 0.5", "temperature: 0.5"]
    assert written.count("cut short") == 2, "two lines that are pasted are one question"
    assert "\x1b[1;32mdraft_model\x1b[0m" in written  # the legend
    assert written.count("\x1b[1;32m") > 100  # and the tokens
    assert "per forward" in written.split("cut short")[0]


def test_several_pasted_lines_are_a_message_even_where_the_first_looks_like_a_command(
    llm: LLM, checkpoint: Path, prompts: list[str]
) -> None:
    take(Talk(chat_options(checkpoint)), "/* riders */\nand the wind")
    assert prompts == [llm.read_chat([{"role": "user", "content": "/* riders */\nand the wind"}]).text]
