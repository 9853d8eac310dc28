"""How every command reads its words: all commands, all flags, in every spelling."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.command import Command, rewrite
from paceline.compat import SPELLINGS, table
from paceline.compat.flags import SETTLED
from paceline.errors import OptionError
from tests.spellings import CASES, as_flags

RUNNER = CliRunner()
TEXT = "the rider in front and the rider behind"


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{path} {name}")
    if not hasattr(command, "commands"):
        yield path, command


COMMANDS = dict(leaves(typer.main.get_command(app), "paceline"))


def declared(path: str) -> dict[str, Any]:
    found = COMMANDS[path].params
    return {flag: option for option in found for flag in (*option.opts, *option.secondary_opts) if flag[:2] == "--"}


def read(path: str, text: str) -> list[str]:
    return rewrite(shlex.split(text), declared(path), path)


def run(*words: str) -> tuple[str, list[str]]:
    """What goes to standard output, and the lines on standard error."""
    result = RUNNER.invoke(app, [*words])
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr.splitlines()


def test_every_command_reads_its_words_this_way() -> None:
    assert {path.removeprefix("paceline ") for path in COMMANDS} == {
        "generate",
        "chat",
        "batch",
        "compare",
        "sweep",
        "serve",
        "check",
        "extract-mtp",
        "bench serve",
        "bench offline",
        "bench report",
        "models list",
        "models fetch",
        "models remove",
    }
    assert all(isinstance(command, Command) for command in COMMANDS.values())


FLAGS = [(path, flag) for path in COMMANDS for flag in declared(path)]


@pytest.mark.parametrize("path, flag", FLAGS, ids=lambda value: value.removeprefix("paceline "))
def test_every_flag_takes_hyphens_and_underscores(path: str, flag: str) -> None:
    value = [] if declared(path)[flag].is_flag else ["7"]
    underscored = "--" + flag.removeprefix("--").replace("-", "_")
    for spelled in (flag, underscored):
        assert rewrite([spelled, *value], declared(path), path) == [flag, *value]
        if value:
            assert rewrite([f"{spelled}=7"], declared(path), path) == [flag, "7"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("hello --max_tokens 5", ["--max-tokens", "5", "hello"]),
        ("--max_tokens 5 -- --gamma", ["--max-tokens", "5", "--", "--gamma"]),
        ("- --raw", ["--raw", "-"]),
        ("--raw -- -5", ["--raw", "--", "-5"]),
        ("--stop --gamma", ["--stop", "--gamma"]),
        ("--stop=--gamma", ["--stop", "--gamma"]),
        ("--model a_b --stop c_d", ["--model", "a_b", "--stop", "c_d"]),
        ("--max-tokens 5 --max-tokens 6", ["--max-tokens", "5", "--max-tokens", "6"]),
        ("--max-tokens 5 --max_new_tokens 5", ["--max-tokens", "5", "--max-tokens", "5"]),
        ("--append_attn hello", ["hello"]),
        ("--append_attn 1 hello", ["hello"]),
        ("--append_attn=True hello", ["hello"]),
        ("--stop x --stop y --stop_token z", ["--stop", "x", "--stop", "y", "--stop", "z"]),
    ],
)
def test_words_that_are_no_flags_stay_as_they_are(text: str, words: list[str]) -> None:
    assert read("paceline generate", text) == words


@pytest.mark.parametrize(
    "text, words",
    [
        ("--ignore-eos=false hello", ["hello"]),
        ("--ignore_eos false hello", ["hello"]),
        ("--ignore_eos true hello", ["--ignore-eos", "hello"]),
        ("--stats=Yes hello", ["--stats", "hello"]),
        ("--stats on the road", ["--stats", "on", "the", "road"]),
        ("--stats 1 of 3", ["--stats", "1", "of", "3"]),
        ("--chat=no hello", ["--raw", "hello"]),
        ("--raw=false hello", ["--chat", "hello"]),
        ("--no_color True hello", ["--no-color", "hello"]),
        ("--stats --stats=false", []),
        ("--stats=off --stats", ["--stats"]),
        ("--system= hello", ["--system", "", "hello"]),
    ],
)
def test_a_switch_may_have_a_value_and_a_word_of_the_prompt_is_none(text: str, words: list[str]) -> None:
    assert read("paceline generate", text) == words


@pytest.mark.parametrize(
    "path, text, words",
    [
        ("paceline sweep", "--gamma 1..3 --draft_model d", ["--gamma", "1..3", "--draft-model", "d"]),
        ("paceline sweep", "--speculative_model d", ["--draft-model", "d"]),
        ("paceline sweep", "--drafter_model d --n_spec_tokens 4", ["--draft-model", "d", "--num-draft-tokens", "4"]),
        ("paceline compare", "--speculative_model d", ["--speculative-model", "d"]),
        ("paceline compare", "--batch_size 4", ["--batch-size", "4"]),
        (
            "paceline compare",
            "--draft_model d --gamma 4",
            ["--speculative-model", "d", "--num-draft-tokens", "4"],
        ),
        (
            "paceline compare",
            "--speculate_method inference_with_reference",
            ["--drafter", "ngram:rule=reference"],
        ),
    ],
)
def test_a_flag_that_the_command_declares_is_its_own(path: str, text: str, words: list[str]) -> None:
    assert read(path, text) == words


GENERATE, COMPARE, SWEEP = "paceline generate", "paceline compare", "paceline sweep"
BESIDE_OURS = [
    (COMPARE, "--speculative-model d --speculative-model-quantization int8", "--drafter-quantization int8"),
    (SWEEP, "--draft_model d --draft_model_quant_type weight_only_int8", "--drafter-quantization int8"),
    (GENERATE, "--drafter d --speculative-model-quantization int8", "--drafter d --drafter-quantization int8"),
    (GENERATE, "--drafter ngram --ngram_prompt_lookup_max 3", "--drafter ngram:max_match=3,min_match=1"),
    (GENERATE, "--drafter ngram --speculate_max_ngram_size 3", "--drafter ngram:max_match=3"),
    (GENERATE, "--drafter ngram:max_match=3 --speculate_max_ngram_size 3", "--drafter ngram:max_match=3"),
    (
        GENERATE,
        "--drafter suffix --drafter ngram:min_match=2 --ngram_prompt_lookup_max 3",
        "--drafter suffix --drafter ngram:max_match=3,min_match=2",
    ),
    (SWEEP, "--drafter ngram --ngram_prompt_lookup_max 3", "--drafter ngram:max_match=3,min_match=1"),
    (SWEEP, "--draft_model d --speculate_method draft_model", "--draft-model d"),
    (COMPARE, "--speculate_max_ngram_size 2", "--ngram-prompt-lookup-max 2"),
]


@pytest.mark.parametrize("path, text, ours", BESIDE_OURS)
def test_a_foreign_option_applies_to_the_drafter_that_our_own_flag_names(
    path: str, text: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = read(path, text)
    assert " ".join(words).endswith(ours)
    assert words.count("--drafter") == ours.count("--drafter ")
    assert not caplog.records


@pytest.mark.parametrize(
    "path, text, words, kind",
    [
        (GENERATE, "--drafter suffix", ["--drafter", "suffix"], "suffix drafting"),
        (GENERATE, "--drafter ./some/model", ["--drafter", "./some/model"], "a draft model"),
        (GENERATE, "--drafter none", ["--drafter", "none"], "plain decoding"),
        (SWEEP, "--draft-model d", ["--draft-model", "d"], "a draft model"),
        (
            GENERATE,
            "--drafter suffix --drafter d",
            ["--drafter", "suffix", "--drafter", "d"],
            "suffix drafting or a draft model",
        ),
    ],
)
def test_a_foreign_option_that_the_named_drafter_does_not_have_is_left_out_with_a_notice(
    path: str, text: str, words: list[str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(path, text + " --speculate_max_ngram_size 3") == words
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"--speculate_max_ngram_size 3 does not apply to {kind} and is left out"]


ON_THE_COMMAND_LINE = [row for row in SPELLINGS if row.holds(table.COMMAND_LINE) and not CASES[row.id].refusal]


@pytest.mark.parametrize("row", ON_THE_COMMAND_LINE, ids=lambda row: row.id)
def test_generate_takes_every_spelling_of_the_command_line(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    case = CASES[row.id]
    words = read("paceline generate", case.typed or as_flags(case.given))
    arrived = any(word in declared("paceline generate") for word in words)
    assert arrived or not row.to or row.to in (*SETTLED, "prompt")
    assert rewrite(words, declared("paceline generate"), "paceline generate") == words, "ours are not foreign again"


@pytest.mark.parametrize(
    "path, text, said",
    [
        ("paceline generate", "--tempratur 0", "option '--tempratur' is not known; did you mean '--temperature'?"),
        ("paceline generate", "--speculate_metod x", "did you mean '--speculate-method'?"),
        ("paceline generate", "--zzzz 0", "option '--zzzz' is not known; see paceline generate --help"),
        ("paceline generate", "-m x", "option '-m' is not known: flags begin with two hyphens"),
        ("paceline generate", "hello --system", "--system needs a value"),
        ("paceline generate", "hello --model", "--model needs a value"),
        ("paceline generate", "--stats=maybe hello", "--stats maybe is not allowed; allowed: true or false"),
        ("paceline generate", "--ignore-eos --ignore_eos=no", "--ignore-eos and --ignore_eos no contradict each other"),
        (
            "paceline generate",
            "--drafter ngram:max_match=4 --ngram_prompt_lookup_max 3",
            "--ngram_prompt_lookup_max 3 and the drafter's max_match=4 contradict each other; give one",
        ),
        ("paceline generate", "--ngram_prompt_lookup_max 3", "--ngram_prompt_lookup_max 3 needs a drafter to apply to"),
        ("paceline generate", "--chat --raw", "--chat and --raw contradict each other; give one"),
        ("paceline models fetch", "--dtype fp16", "--dtype fp16 means --dtype, and paceline models fetch takes no"),
        (
            "paceline models fetch",
            "--draft_model d",
            "means --drafter draft:model=d, and paceline models fetch takes no",
        ),
        ("paceline chat", "--mode static", "--mode static is not there yet; models cannot be exported"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_sentence(path: str, text: str, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(path, text)
    assert said in str(caught.value)
    result = RUNNER.invoke(app, [*path.split()[1:], *shlex.split(text)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [str(caught.value)]


def test_what_a_command_settles_itself_is_left_out_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert read("paceline generate", "--max_batch_size 4 --enable-prefix-caching") == []
    assert [record.getMessage() for record in caplog.records] == [
        "--max_batch_size 4 has no effect on paceline generate",
        "--enable-prefix-caching has no effect on paceline generate",
    ]


def test_the_calls_of_other_manuals_write_the_text_that_ours_write(checkpoint: Path) -> None:
    at = str(checkpoint)
    plain, _ = run("generate", TEXT, "--model", at, "--max-tokens", "12")
    lookup = json.dumps({"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})
    calls: dict[str, int] = {  # and how many notices each brings
        f"--model {at} --draft_model {at} --temperature 0 --gamma 5 --max_new_tokens 12": 0,
        f"--model {at} --speculative-model {at} --num-speculative-tokens 5 --use-v2-block-manager --max-tokens 12": 1,
        f"--model {at} --speculative_config '{lookup}' --max-tokens=12": 0,
        f"--model_name_or_path {at} --dtype float32 --inference_model --append_attn 1 --max_length 12 --mode dynamic "
        "--speculate_method inference_with_reference --speculate_max_draft_token_num 5 --speculate_max_ngram_size 2": 3,
        f"--model {at} --drafter_model {at} --max_new_tokens 12 --do_sample False --max_n_spec_tokens 3": 0,
    }
    for call, count in calls.items():
        text, notices = run("generate", TEXT, *shlex.split(call))
        assert text == plain
        assert len(notices) == count and all(line.startswith("note: --") for line in notices), notices


def test_a_notice_is_one_line_however_narrow_the_terminal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = ("--max_length", "3", "--speculate_max_candidate_len", "5")
    _, notices = run("generate", TEXT, "--model", str(checkpoint), *words)
    assert notices == [
        "note: --max_length 3 counts new tokens, as PaddleNLP's predictor counts",
        "note: --speculate_max_candidate_len 5 has no effect here; the acceptance rule checks drafts",
    ]


def test_the_librarys_own_warnings_are_told_once_and_the_log_is_left_as_it_was(checkpoint: Path) -> None:
    before = list(logging.getLogger("paceline").handlers)
    for _ in range(2):
        _, notices = run("generate", TEXT, "--model", str(checkpoint), "--max-tokens", "2", "--verbose")
        assert notices == ["note: --verbose has no effect here"]
    assert logging.getLogger("paceline").handlers == before


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.removeprefix("paceline "))
def test_help_says_where_the_tables_are(path: str) -> None:
    result = RUNNER.invoke(app, [*path.split()[1:], "--help"])
    assert result.exit_code == 0
    assert ("docs/coming-from" in result.stdout) == (path.split()[1] not in ("models", "extract-mtp"))
