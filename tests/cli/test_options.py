"""Options that are made from dataclasses: a field is an option, its type the value, its docstring's line the help."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import app, loading, options
from paceline.cli.command import Command
from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.models import catalog
from paceline.params import SamplingParams

RUNNER = CliRunner()
GROUP: Any = typer.main.get_command(app)


@dataclass(frozen=True)
class Ride:
    """A ride.

    speed: how fast,
      in the wind.
    riders: who rides.
    gears: of the bicycle.
    weights: of each gear.
    uphill: whether it climbs.
    lights: whether it shines.

    Not a field: nothing of it.
    """

    speed: float = 1.0
    riders: str | Sequence[str] | None = None
    gears: Sequence[int] | None = None
    weights: Mapping[int, float] | None = None
    uphill: bool = False
    lights: bool = True
    kept: int | None = None
    derived: int = dataclasses.field(init=False, default=0)


NAMES = options.fields_but(Ride, "kept")


def ride(*words: str) -> dict[str, Any]:
    """What a command made from the dataclass reads."""
    seen: list[Any] = []

    @options.takes(options.of(Ride, options.MACHINE, NAMES, speed=3.0))
    def command(ctx: typer.Context, own: int = 7) -> None:
        seen.append((own, options.read(Ride, ctx.params)))

    made = typer.Typer(add_completion=False)
    made.command(cls=Command)(command)
    result = RUNNER.invoke(made, [*words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    ((own, read),) = seen
    assert own == 7
    return read


def test_fields_are_options_with_the_commands_own_defaults() -> None:
    assert NAMES == ["speed", "riders", "gears", "weights", "uphill", "lights"]
    assert ride() == {"speed": 3.0, "uphill": False, "lights": True}
    assert Ride(**ride()) == Ride(speed=3.0)


def test_values_are_read_as_the_fields_are_typed() -> None:
    assert ride("--speed", "2")["speed"] == 2.0
    assert ride("--rider", "a\\nb", "--rider", "c")["riders"] == ["a\nb", "c"]
    assert ride("--gear", "3", "--gear", "4")["gears"] == [3, 4]
    assert ride("--weights", "3=-5", "--weights", "4=0.5")["weights"] == {3: -5.0, 4: 0.5}
    assert ride("--uphill")["uphill"] is True
    assert ride("--no-lights")["lights"] is False
    for wrong in ("3", "3=", "=5", "x=5", "3=y"):
        with pytest.raises(OptionError, match="allowed: a token id and a number, as in 42=-5"):
            ride("--weights", wrong)


def test_the_help_is_the_docstrings_line() -> None:
    assert options.lines(Ride)["speed"] == "how fast, in the wind."
    assert options.lines(Ride)["lights"] == "whether it shines."
    helps = {name: info.__metadata__[0].help for name, (info, _) in options.of(Ride, "x", NAMES).items()}
    assert helps["speed"] == "How fast, in the wind."
    assert helps["riders"] == r"Who rides. \n is a line break. May be given several times."


@pytest.mark.parametrize("kind", [SamplingParams, EngineOptions])
def test_every_field_has_its_line(kind: type) -> None:
    assert [*options.lines(kind)] == options.fields_but(kind)


UNTYPED = {"logits_processors"}  # functions
SETTLED = {"max_num_seqs", "prefix_caching", "default_max_tokens", "max_draft_tokens", "prompt_logprobs"} | UNTYPED
SETTLED |= {"skip_tokenizer_init", "detokenize"}  # commands write text
LEFT_OUT = {  # what a command settles itself, or has no use for
    "generate": SETTLED,
    "chat": SETTLED | {"n", "logprobs"},
    "compare": SETTLED | {"n", "logprobs", "skip_special_tokens", "acceptance"},
    "sweep": SETTLED | {"n", "logprobs", "skip_special_tokens", "acceptance"},
    "batch": SETTLED - {"max_num_seqs"},
}


@pytest.mark.parametrize("command", LEFT_OUT)
def test_a_command_takes_every_field_but_those_it_settles_itself(command: str) -> None:
    fields = {*options.fields_but(SamplingParams), *options.fields_but(EngineOptions)}
    taken = {option.name: option for option in GROUP.commands[command].params}
    assert fields - taken.keys() == LEFT_OUT[command]
    assert all(option.help for option in taken.values())


@pytest.mark.parametrize("command", LEFT_OUT)
def test_help_names_every_drafter(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    help = RUNNER.invoke(app, [command, "--help"]).stdout
    (drafter,) = [option for option in GROUP.commands[command].params if option.name == "drafter"]
    assert all(word in drafter.help for word in ("ngram", "suffix", "draft"))
    assert "--drafter " in help


def test_a_field_may_name_its_own_flags() -> None:
    seen: list[Any] = []

    @options.takes(options.machine())
    def command(ctx: typer.Context) -> None:
        seen.append(options.read(EngineOptions, ctx.params)["exact_kernels"])

    made = typer.Typer(add_completion=False)
    made.command(cls=Command)(command)
    for words in ([], ["--fast-kernels"], ["--exact-kernels"]):
        assert RUNNER.invoke(made, words).exit_code == 0
    assert seen == [True, False, True]
    refused = RUNNER.invoke(app, ["generate", "hello", "--fast-kernels", "--kernels", "native"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("fast kernels (exact_kernels=False) are Triton's, not 'native'; allowed kernels")


def test_what_the_engine_refuses_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str) -> None:
        raise AssertionError(f"{name} was fetched")

    monkeypatch.setattr(loading, "fetch", fetch)
    assert catalog.find(catalog.DEFAULT_MODEL) is not None
    result = RUNNER.invoke(app, ["generate", "hello", "--tp_size", "2"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "--tensor-parallel-size 2 is not supported yet; allowed: 1 (one device)\n"


@pytest.mark.parametrize(
    "typed, on",
    [
        ("", True),
        ("--no-mla-use-matrix-absorption", False),
        ("--mla_use_matrix_absorption", True),
        ("--mla_use_matrix_absorption 1", True),
        ("--mla_use_matrix_absorption 0", False),
    ],
)
def test_what_is_on_unless_it_is_said_may_be_said_in_foreign_words(typed: str, on: bool) -> None:
    context = GROUP.commands["generate"].make_context("generate", ["hello", *typed.split()])
    assert options.read(EngineOptions, context.params).get("mla_use_matrix_absorption", True) is on


@pytest.mark.parametrize("typed", ["--mla_use_matrix_absorption maybe", "--mla_use_matrix_absorption=maybe"])
def test_what_is_neither_yes_nor_no_is_not_taken_for_a_prompt(typed: str) -> None:
    result = RUNNER.invoke(app, ["generate", "hello", *typed.split()])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "--mla_use_matrix_absorption maybe is not allowed; allowed: true or false\n"
