"""`paceline generate`, and what all commands share."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import paceline
from paceline import LLM, SamplingParams, compat
from paceline.cli import app, loading, prompting
from paceline.errors import OptionError
from paceline.llm import LLM as Target

RUNNER = CliRunner()
TEXT = "the rider in front and the rider behind"


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint))


def expected(llm: LLM, chat: bool = True, **params: object) -> str:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})  # type: ignore[arg-type]
    if chat:
        return llm.chat([{"role": "user", "content": TEXT}], chosen)[0].outputs[0].text
    return llm.generate(TEXT, chosen)[0].outputs[0].text


def invoke(checkpoint: Path, *words: str, given: str | None = None) -> Result:
    fixed = {"--model": str(checkpoint), "--max-tokens": "12"}
    added = [word for name, value in fixed.items() if name not in words for word in (name, value)]
    return RUNNER.invoke(app, ["generate", *added, *words], input=given)


def run(checkpoint: Path, *words: str, given: str | None = None) -> str:
    result = invoke(checkpoint, *words, given=given)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_prompt_may_be_an_argument_a_file_or_standard_input(llm: LLM, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT)
    text = expected(llm) + "\n"
    assert len(text) > 5
    assert run(checkpoint, TEXT) == text
    assert run(checkpoint, *TEXT.split()) == text
    assert run(checkpoint, "--file", str(tmp_path / "prompt.txt")) == text
    assert run(checkpoint, given=TEXT) == text
    assert run(checkpoint, "-", given=TEXT) == text


def test_what_is_piped_in_stands_below_the_argument(llm: LLM, checkpoint: Path) -> None:
    record = json.loads(run(checkpoint, "Summarise:", "--json", "--raw", given="one\ntwo\n"))
    assert record["prompt"] == "Summarise:\none\ntwo\n"
    assert json.loads(run(checkpoint, "Summarise:", "--json", "--raw", given=" \n"))["prompt"] == "Summarise:"


@pytest.mark.parametrize("words", [(), ("",), ("-",), ("", "--raw"), (" \n",), ("--chat", "\t")])
def test_an_empty_prompt_is_refused_however_it_comes(checkpoint: Path, words: tuple[str, ...]) -> None:
    result = invoke(checkpoint, *words, given="")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("the prompt is empty; ") and result.stderr.count("\n") == 1


def test_raw_leaves_the_template_out(llm: LLM, checkpoint: Path) -> None:
    raw = expected(llm, chat=False) + "\n"
    assert raw != expected(llm) + "\n"
    assert run(checkpoint, TEXT, "--raw") == raw
    assert run(checkpoint, TEXT, "--chat") == expected(llm) + "\n"


def test_a_model_without_template_completes_the_text_as_it_is(without_template: Path) -> None:
    text = LLM(str(without_template)).generate(TEXT, SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    assert run(without_template, TEXT) == text + "\n"
    result = RUNNER.invoke(app, ["generate", TEXT, "--model", str(without_template), "--chat"])
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


@pytest.mark.parametrize(
    ("words", "params"),
    [
        (
            "--temperature 0.9 --top-p 0.8 --top-k 20 --seed 7",
            {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 7},
        ),
        ("--temperature 1.5 --min-p 0.2 --seed 3", {"temperature": 1.5, "min_p": 0.2, "seed": 3}),
        ("--presence-penalty 2 --frequency-penalty 1.5", {"presence_penalty": 2.0, "frequency_penalty": 1.5}),
        ("--repetition-penalty 1.8", {"repetition_penalty": 1.8}),
        ("--bad-word e --bad-word the", {"bad_words": ["e", "the"]}),
        ("--min_tokens 4 --ignore_eos", {"min_tokens": 4, "ignore_eos": True}),
    ],
)
def test_sampling_options_reach_the_sampler(
    llm: LLM, checkpoint: Path, words: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SamplingParams] = []
    real = Target.stream
    monkeypatch.setattr(
        Target, "stream", lambda self, prompt, given: (seen.append(given), real(self, prompt, given))[1]
    )
    text = run(checkpoint, TEXT, *words.split())
    assert seen == [SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})]
    assert text == expected(llm, **params) + "\n"


def test_the_text_ends_before_any_of_the_stops(llm: LLM, checkpoint: Path) -> None:
    whole = expected(llm)
    first, second = whole[7:9], whole[4:5]
    assert run(checkpoint, TEXT, "--stop", first, "--stop", second) == whole[: whole.index(second)] + "\n"
    ids = llm.chat([{"role": "user", "content": TEXT}], SamplingParams(temperature=0.0, max_tokens=12))
    token = ids[0].outputs[0].token_ids[3]
    assert run(checkpoint, TEXT, "--stop-token-id", str(token)) == expected(llm, stop_token_ids=[token]) + "\n"


def test_a_stop_may_be_a_line_break() -> None:
    params = loading.read_params({"stop": ["\\n\\n", "\\t", "END"], "temperature": 0.5})
    assert params.stop_strings == ("\n\n", "\t", "END")
    assert params.temperature == 0.5


def test_drafters_change_the_forwards_and_not_the_text(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    real = compat.make
    monkeypatch.setattr(compat, "make", lambda *given: (built.append(real(*given)), built[-1])[1])
    text = expected(llm) + "\n"
    assert run(checkpoint, TEXT, "--drafter", "none") == text
    assert run(checkpoint, TEXT, "--drafter", "suffix", "--drafter", "ngram", "--num-draft-tokens", "3") == text
    assert run(checkpoint, TEXT, "--drafter", str(checkpoint)) == text
    none, both, model = built
    assert none is None
    assert both.configs == [paceline.Suffix(3), paceline.NGram(3)]  # type: ignore[attr-defined]
    assert model == paceline.DraftModel(str(checkpoint))


def test_stats_go_to_standard_error(checkpoint: Path) -> None:
    result = RUNNER.invoke(
        app, f"generate '{TEXT}' --model {checkpoint} --max-tokens 12 --drafter {checkpoint} --stats"
    )
    assert "12 tokens in" in result.stderr
    # The prompt's forward gives 1 token, five drafts and a bonus 6, and with room for 5 the last gives 4 and its own.
    assert "3 target forwards, 4.00 tokens per forward, 100% of drafts accepted" in result.stderr
    assert "target forwards" not in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x", "--temperature", "-1"], "--temperature -1.0 is not allowed"),
        (["x", "--max-tokens", "0"], "--max-tokens 0 is not allowed"),
        (["x", "--top-p", "2"], "--top-p 2.0 is not allowed"),
        (["x", "--drafter", "ngram:max_mach=3"], "did you mean 'max_match'?"),
        (["x", "--drafter", "none", "--drafter", "ngram"], "--drafter none cannot stand beside another"),
        (["x", "--drafter", "no-such-model"], "model 'no-such-model' was not found"),
        (["x", "--model", "no-such-model"], "model 'no-such-model' was not found"),
        (["x", "--dtype", "int3"], "--dtype 'int3' is not known"),
        (["x", "--device", "abacus"], "--device 'abacus' cannot be used"),
        (["x", "--file", "y"], "a prompt and --file were both given"),
        (["--file", "no-such-file"], "no-such-file cannot be read: No such file"),
        (["", "--raw"], "the prompt is empty"),
        (["x", "--min-tokens", "13"], "--min-tokens 13 is above --max-tokens 12"),
        (["x", "--stop", ""], "--stop [''] is not allowed"),
        (["x", "--n", "0"], "--n 0 is not allowed"),
        (["x", "--logprobs", "-1"], "--logprobs -1 is not allowed"),
        (["x", "--acceptance", "sure"], "--acceptance 'sure'"),
        (["x", "--template", "alpaca"], "--template 'alpaca' is not known"),
        (
            ["x", "--system", "be kind", "--raw"],
            "--raw and --system contradict each other: a system message has its place",
        ),
        (["x", "--template", "vicuna", "--raw"], "--raw and --template contradict each other; give one"),
        (["x", "--drafter", "sufix"], "no such path exists; did you mean 'suffix'?"),
        (["x", "--gamma", "0"], "a draft length of 0 is not allowed; allowed: 1 or more"),
        (["x", "--drafter", "ngram", "--drafter-quantization", "banana"], "quantization='banana' is not known"),
        (
            ["x", "--drafter", "ngram:num_draft_tokens=8", "--num-draft-tokens", "3"],
            "--drafter ngram:num_draft_tokens=8 and a draft length of 3 contradict each other; give one",
        ),
        (["x", "--system"], "--system needs a value"),
        (["x", "--max-model-len", "1"], "--max-model-len 1 leaves no room"),
        (["x\udcff"], "the prompt cannot be read: it is not UTF-8 text"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(checkpoint: Path, words: list[str], said: str) -> None:
    result = invoke(checkpoint, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "notice"),
    [
        (["--gamma", "5"], "a draft length of 5 has no effect without a drafter; --drafter suffix would bring one"),
        (["--num-draft-tokens", "5", "--drafter", "none"], "a draft length of 5 has no effect without a drafter"),
        (
            ["--drafter", "ngram", "--drafter-quantization", "int8"],
            "a draft model's quantization int8 has no effect: no draft model was given",
        ),
        (["--drafter", "suffix", "--ngram_prompt_lookup_max", "3"], "--ngram_prompt_lookup_max 3 does not apply to"),
    ],
)
def test_what_applies_to_nothing_is_noticed(llm: LLM, checkpoint: Path, words: list[str], notice: str) -> None:
    result = invoke(checkpoint, TEXT, *words)
    assert (result.exit_code, result.stdout) == (0, expected(llm) + "\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"note: {notice}")


def test_the_value_of_a_switch_is_no_word_of_the_prompt(llm: LLM, checkpoint: Path) -> None:
    text = expected(llm) + "\n"
    assert run(checkpoint, "--ignore-eos=false", TEXT) == text
    assert run(checkpoint, "--stats", "False", TEXT) == text
    assert run(checkpoint, "--raw=false", TEXT) == text


def test_a_system_message_without_a_template_gets_advice_that_helps(without_template: Path) -> None:
    result = invoke(without_template, TEXT, "--system", "Be brief.")
    assert result.exit_code == 2
    assert result.stderr == "--system needs a chat template; leave it out, or add --template vicuna\n"
    run(without_template, TEXT, "--system", "Be brief.", "--template", "vicuna")


def test_a_template_that_is_no_text_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "some.bin").write_bytes(b"\xff\xfe\x00")
    result = invoke(checkpoint, TEXT, "--template", str(tmp_path / "some.bin"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"the template file {tmp_path / 'some.bin'} cannot be read: it is not UTF-8 text\n"


def test_errors_are_red(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = RUNNER.invoke(app, ["generate", "x", "--model", str(checkpoint), "--top-p", "2"], color=True)
    assert "\x1b[31m--top-p 2.0" in result.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    result = RUNNER.invoke(app, ["generate", "x", "--tempratur", "0"])
    assert result.exit_code == 2
    assert "--tempratur" in result.stderr


def test_an_interrupt_ends_quietly_after_what_was_written(
    llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = Target._take_turn, 0

    def interrupted(self: LLM) -> Any:
        nonlocal steps
        steps += 1
        if steps > 4:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Target, "_take_turn", interrupted)
    result = RUNNER.invoke(app, ["generate", TEXT, "--model", str(checkpoint)])
    assert (result.exit_code, result.stderr) == (130, "")
    monkeypatch.undo()
    assert result.stdout.endswith("\n")
    assert expected(llm).startswith(result.stdout.removesuffix("\n"))


def test_the_prompt_is_asked_for_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"what was typed\nnot read"))
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", typed)
    assert prompting.read_text(None, None) == "what was typed"
    assert capsys.readouterr() == ("", prompting.QUESTION)
    monkeypatch.setattr(sys, "stdin", typed)
    typed.buffer.read()
    with pytest.raises(OptionError, match='type paceline generate "your prompt"'):
        prompting.read_text(None, None)


@pytest.mark.parametrize("where", ["--file", "standard input"])
def test_a_prompt_that_is_no_text_is_refused(checkpoint: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "prompt").write_bytes(b"caf\xe9")
    words = ["--file", str(tmp_path / "prompt")] if where == "--file" else []
    result = RUNNER.invoke(app, ["generate", "--model", str(checkpoint), *words], input=b"caf\xe9")
    assert result.exit_code == 2
    assert "it is not UTF-8 text" in result.stderr


def test_a_template_and_a_system_message_reach_the_prompt(llm: LLM, checkpoint: Path) -> None:
    result = json.loads(run(checkpoint, TEXT, "--template", "vicuna", "--system", "Be brief.", "--json"))
    assert result["prompt"] == f"Be brief. USER: {TEXT} ASSISTANT:"
    own = json.loads(run(checkpoint, TEXT, "--system", "Be brief.", "--json"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    assert own["prompt"] == llm.read_chat(messages).text


# Drafts in colours


def test_show_drafts_styles_every_token_and_explains_itself(llm: LLM, checkpoint: Path) -> None:
    shown = run(checkpoint, TEXT, "--show-drafts", "--drafter", str(checkpoint), "--color")
    answer, legend = shown.split("\n\n")
    assert re.sub(r"\x1b\[[0-9;]*m", "", answer) == expected(llm)
    drafted = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", answer)
    output = (
        LLM(str(checkpoint), drafter=str(checkpoint))
        .chat([{"role": "user", "content": TEXT}], SamplingParams(temperature=0.0, max_tokens=12))[0]
        .outputs[0]
    )
    told = zip(output.token_ids, output.provenance)
    accepted = [token for token, origin in told if origin.kind == "accepted"]
    assert "".join(drafted) == llm.tokenizer.decode(accepted)
    assert "\x1b[1;32mdraft_model\x1b[0m" in legend
    assert "drafted by draft_model and accepted" in legend
    assert "\x1b[3;36mbonus\x1b[0m" in legend


def test_on_a_pipe_show_drafts_is_plain_text_and_says_so(llm: LLM, checkpoint: Path) -> None:
    result = invoke(checkpoint, TEXT, "--show-drafts")
    assert result.stdout == expected(llm) + "\n"
    assert "add --color" in result.stderr
    assert invoke(checkpoint, TEXT, "--show-drafts", "--no-color").stdout == expected(llm) + "\n"


def test_show_drafts_brings_a_drafter_where_none_was_named(checkpoint: Path) -> None:
    named = json.loads(run(checkpoint, TEXT, "--show-drafts", "--json"))["drafter"]
    assert (named, json.loads(run(checkpoint, TEXT, "--json"))["drafter"]) == (["suffix"], [])


def test_colours_alone_change_nothing(llm: LLM, checkpoint: Path) -> None:
    assert run(checkpoint, TEXT, "--color") == expected(llm) + "\n"


# Several answers, figures and data


def test_several_answers_come_one_after_the_other(llm: LLM, checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=4)
    outputs = llm.chat([{"role": "user", "content": TEXT}], params)[0].outputs
    assert len({output.text for output in outputs}) == 3
    shown = run(checkpoint, TEXT, "--n", "3", "--temperature", "1", "--seed", "4")
    assert shown == "".join(f"--- {place} of 3\n{output.text}\n" for place, output in enumerate(outputs, start=1))


def test_what_several_answers_took_is_told_together_since_they_share_the_time(checkpoint: Path) -> None:
    words = ["--n", "3", "--temperature", "1", "--seed", "4", "--stats"]
    *each, together = invoke(checkpoint, TEXT, *words).stderr.splitlines()
    counts = [int(re.match(r"(\d+) tokens, \d+ target forwards, ", line)[1]) for line in each]  # type: ignore[index]
    assert len(counts) == 3
    found = re.fullmatch(r"3 answers together: (\d+) tokens in [\d.]+ s \([\d.]+ tokens/s\)", together)
    assert found is not None and int(found[1]) == sum(counts)


def test_several_answers_without_temperature_are_remarked_upon(checkpoint: Path) -> None:
    assert "add --temperature" in invoke(checkpoint, TEXT, "--n", "2").stderr


def test_json_has_the_whole_answer(llm: LLM, checkpoint: Path) -> None:
    words = ["--json", "--logprobs", "2", "--drafter", str(checkpoint), "--seed", "5"]
    (output,) = json.loads(run(checkpoint, TEXT, *words))["outputs"]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)
    own = llm.chat([{"role": "user", "content": TEXT}], params)[0].outputs[0]
    assert own.logprobs is not None
    assert (output["text"], output["token_ids"], output["seed"]) == (own.text, own.token_ids, 5)
    assert [sorted(map(int, entry)) for entry in output["logprobs"]] == [sorted(entry) for entry in own.logprobs]
    assert {origin["drafter"] for origin in output["provenance"]} == {None, "draft_model"}
    assert output["stats"]["tokens"] == 12


def test_logprobs_are_told_beside_the_text(llm: LLM, checkpoint: Path) -> None:
    result = invoke(checkpoint, TEXT, "--logprobs", "1")
    assert result.stdout == expected(llm) + "\n"
    output = llm.chat([{"role": "user", "content": TEXT}], SamplingParams(temperature=0.0, max_tokens=12, logprobs=1))[
        0
    ].outputs[0]
    assert output.logprobs is not None
    for token, entries in zip(output.token_ids, output.logprobs):
        assert f"{entries[token].logprob:.4f}" in result.stderr


def test_parameters_that_are_made_from_the_librarys_reach_it(checkpoint: Path) -> None:
    biased = ["--logit-bias", "0=100", "--logit-bias", "7=-5.5", "--max-tokens", "3", "--ignore-eos"]
    assert run(checkpoint, TEXT, *biased, "--no-skip-special-tokens") == "<|im_start|>" * 3 + "\n"
    assert run(checkpoint, TEXT, *biased) == "\n"
    assert run(checkpoint, TEXT, "--allowed-token-id", "0", "--max-tokens", "2", "--ignore-eos") == "\n"


def test_every_option_has_its_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    help = RUNNER.invoke(app, ["generate", "--help"]).stdout
    for name in ("--show-drafts", "--top-p", "--stop", "--ignore-eos", "--n", "--logprobs", "--json", "--acceptance"):
        assert f"{name} " in help
    assert max(len(line) for line in help.splitlines()) <= 80
    command: Any = typer.main.get_command(app)
    for option in command.commands["generate"].params:
        assert option.help, option.name


def test_version_is_told() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"paceline {paceline.__version__}\n")


def test_neither_the_package_nor_the_command_line_imports_what_it_does_not_need_yet() -> None:
    code = (
        "import sys, paceline\n"
        "assert not {'typer', 'matplotlib', 'torch', 'rich'} & sys.modules.keys()\n"
        "import paceline.cli\n"
        "assert not {'matplotlib', 'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
