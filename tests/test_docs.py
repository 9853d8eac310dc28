"""README and docs: samples are tested files, figures are measured ones, tables name every option, links lead somewhere.

Pages are read as text. Knows the marker comments; must not know what a page says beyond them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from paceline import DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.bench import compare, machine, report
from paceline.cli import app
from paceline.kernels import KERNELS
from paceline.llm import EngineOptions
from paceline.models import catalog, config, gguf
from paceline.prompts import Prompt
from paceline.sampling.verify import ACCEPTANCE
from tests.cli.checkpoints import write_checkpoint
from tests.fakes import tiny_llm

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DRAFTERS = ("ngram", "suffix", "draft-model", "first-of")
HEADINGS = [
    "What it is",
    "When it helps",
    "Use it",
    "Options",
    "What it costs",
    "How it is tested",
    "Where it comes from",
]
SAMPLE = re.compile(r"<!-- example: (\S+) -->\n+```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HOSTS = ("arxiv.org", "github.com", "huggingface.co", "www.apache.org")  # where a page may send its readers


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def load_figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = load_figures()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of any level."""
    parts = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)
    assert len(parts) == 2, f"{heading!r} is a heading {len(parts) - 1} times"
    return re.split(r"^#+ ", parts[1], flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    """The words in back quotes that begin the rows of the tables in a text."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE)


# Samples


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_embedded_sample_is_its_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = SAMPLE.findall(text)
    for name, code in found:
        assert code == read(f"examples/{name}"), f"{name} in {name_of(page)} is not examples/{name}"
    assert text.count("```python") == len(found), "Python on a page is an example with a marker, so that it is tested"


def test_every_example_is_shown_on_some_page() -> None:
    shown = {name for page in PAGES for name, _ in SAMPLE.findall(page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in EXAMPLES}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("examples") / "tiny")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(
    example: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny random model in place of the default; draft_model.py takes two."""
    monkeypatch.setattr(sys, "argv", [str(example), str(checkpoint), str(checkpoint)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


# Links and words


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Pictures included; headings too."""
    dead = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            if link.split("/")[2] not in HOSTS:
                dead.append(f"{link} (not one of {', '.join(HOSTS)})")
            continue
        target, _, heading = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.is_file() or (heading and heading not in anchors(path.read_text(encoding="utf-8"))):
            dead.append(link)
    assert dead == []


def anchors(text: str) -> set[str]:
    """Headings as GitHub names them in links."""
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(read("docs/index.md"))}
    assert {page for page in PAGES if page != index and page.name != "README.md"} <= linked


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES, ROOT / "docs" / "figures.py"], ids=name_of)
def test_no_page_names_a_place_on_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w.:/~…)-])/[a-z][\w.-]*/[\w./-]*", text)
    assert paths == [], "an absolute path says nothing on another machine"
    assert re.findall(r"\bshared/|\bworkplace\b|\blocalhost\b|\b\d+\.\d+\.\d+\.\d+\b", text) == []


# Tables


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("docs/drafters/ngram.md", NGram),
        ("docs/drafters/suffix.md", Suffix),
        ("docs/drafters/draft-model.md", DraftModel),
    ],
)
def test_an_options_table_lists_the_fields_of_its_dataclass(page: str, kind: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section(read(page), "Options"), flags=re.MULTILINE)
    wanted = [(item.name, default_of(item)) for item in dataclasses.fields(kind)]
    assert [(name, default.strip()) for name, default in rows] == wanted


def default_of(item: Any) -> str:
    """A field's default as the tables write it."""
    return "required" if item.default is dataclasses.MISSING else f"`{item.default!r}`".replace("'", '"')


def test_first_ofs_table_lists_its_parameters() -> None:
    told = first_column(section(read("docs/drafters/first-of.md"), "Options"))
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.POSITIONAL_OR_KEYWORD: ""}
    wanted = [kinds[item.kind] + item.name for item in inspect.signature(FirstOf).parameters.values()]
    assert told == wanted


@pytest.mark.parametrize(
    ("page", "heading", "kind"),
    [("docs/sampling.md", "Parameters", SamplingParams), ("docs/engine.md", "Options", EngineOptions)],
)
def test_parameters_and_engine_options_are_all_in_their_tables(page: str, heading: str, kind: Any) -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section(read(page), heading), flags=re.MULTILINE)
    wanted = [(item.name, default_of(item)) for item in dataclasses.fields(kind) if item.init]
    assert [(name, default.strip()) for name, default in rows] == wanted


def test_every_drafter_page_has_the_same_headings() -> None:
    for name in DRAFTERS:
        found = re.findall(r"^## (.+)$", read(f"docs/drafters/{name}.md"), flags=re.MULTILINE)
        assert found == HEADINGS, name


def test_acceptance_rules_and_kernels_are_all_told() -> None:
    assert first_column(section(read("docs/sampling.md"), "Acceptance rules")) == list(ACCEPTANCE)
    assert first_column(section(read("docs/sampling.md"), "What “same text” promises")) == list(KERNELS)


def test_models_types_and_aliases_are_all_told() -> None:
    text = read("docs/models.md")
    kinds = re.findall(r"`(\w+)`", section(text, "Architectures"))
    assert {*config.ARCHITECTURES} <= set(kinds)
    assert set(re.findall(r"`([A-Z0-9_]+)`", section(text, "GGUF files"))) == set(gguf._DECODERS)
    assert first_column(section(text, "Names you can use at once")) == list(catalog.ALIASES)
    for alias in catalog.ALIASES.values():
        assert f"| {catalog.human_size(alias.size_bytes)} | {alias.licence} |" in text


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {re.split(r"[<>=!~ \[]", item)[0] for item in wanted}
    assert set(first_column(read("docs/dependencies.md"))) == names


def test_every_option_of_every_command_is_told() -> None:
    text = read("docs/command-line.md")
    group: Any = typer.main.get_command(app)
    for name in ("generate", "compare"):
        options = [
            option
            for parameter in group.commands[name].params
            for option in [*parameter.opts, *parameter.secondary_opts]
            if option.startswith("--")
        ]
        rows = re.findall(r"^\| (`--[^|]*) \|", section(text, f"paceline {name}"), flags=re.MULTILINE)
        assert re.findall(r"--[\w-]+", " ".join(rows)) == options
    assert set(group.commands) == {"generate", "compare", "models"}, "describe the new command"
    for name in group.commands["models"].commands:
        assert f"paceline models {name}" in text


# Figures


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_are_what_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- figures:") == len(figures.BLOCK.findall(text)) == text.count("<!-- /figures -->")
    assert figures.rewrite(text) == text, "run: python docs/figures.py"


def test_a_block_without_its_file_says_so_and_rewriting_twice_changes_nothing(tmp_path: Path) -> None:
    page = "before\n<!-- figures: nothing -->\nold\n<!-- /figures -->\nafter\n"
    once = figures.rewrite(page, tmp_path)
    assert once == "before\n<!-- figures: nothing -->\n\n*not measured yet*\n\n<!-- /figures -->\nafter\n"
    assert figures.rewrite(once, tmp_path) == once


def test_a_layout_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(ValueError, match=r"odd\.json"):
        figures.render("odd", tmp_path)


def test_the_results_of_a_comparison_become_a_table(tmp_path: Path) -> None:
    """On what the bench really records, so that a change of its layout is noticed here."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    drafter = compare.Variant("some/folder/ngram:min_match=1", NGram(min_match=1, max_match=3))
    plan = compare.Plan(["first", "second"], [Prompt(None, [5, 6, 7] * 4), Prompt(None, [8, 9] * 6)], params, [drafter])
    result = compare.compare(tiny_llm(prefix_caching=False), plan)
    options = {"model": "some/folder/tiny", "max_tokens": 8, "batch_size": 1, "temperature": 0.0}
    data = {**machine.record(), "options": options, **report.record(result)}
    report.write_json(tmp_path / "tiny.json", data)
    lines = figures.render("tiny", tmp_path).splitlines()
    assert lines[2].startswith(f"| plain | {result.plain.tokens_per_second:.1f} | 1.00× | 1.00 | – | 2 of 2 |")
    assert lines[3].startswith(f"| ngram:min_match=1 | {result.measured[1].tokens_per_second:.1f} | ")
    assert lines[-1].startswith("tiny, 2 prompts, at most 8 tokens each, 1 at a time, temperature 0, measured once.")
    data["variants"][1]["answers"][1]["difference"] = {"position": 3, "margin": 0.000012}
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    told = figures.render("tiny", tmp_path).splitlines()[-1]
    assert told == "Differences from plain: ngram:min_match=1, second: token 4, margin 0.00001."
