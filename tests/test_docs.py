"""README and docs: samples are tested files, tables name every option, links lead somewhere, flags exist.

Pages are read as text. Blocks that scripts write are in test_pages.py, the built site in test_site.py, the sample files
in test_examples.py. Knows the marker comments, and limits that pages tell; must not know what else a page says.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline import (
    DFlash,
    DraftModel,
    Eagle,
    FirstOf,
    Glide,
    Hydra,
    Medusa,
    MLPSpeculator,
    NGram,
    Pard,
    SamplingParams,
    Suffix,
    compat,
)
from paceline.bench import distribution
from paceline.cli import app
from paceline.drafters import mtp_form, vocabulary
from paceline.drafters.table import loadable
from paceline.engine import memory
from paceline.engine.sequence import Logprob, Provenance
from paceline.engine.stats import SequenceStats
from paceline.errors import PacelineError
from paceline.kernels import KERNELS
from paceline.kernels.blocks import DECODERS
from paceline.kernels.cpu import native
from paceline.llm import EngineOptions
from paceline.models import catalog, families, loader, tile_cache
from paceline.outputs import Chunk, CompletionOutput, RequestOutput, Score
from paceline.sampling.rules import RULES
from paceline.server import guards, program
from paceline.server.app import Settings
from paceline.templates import PromptTemplate
from tests.drafters import tiny_eagle
from tests.fakes import tiny_llm

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".sh"))
DRAFTERS = (*(kind.page for kind in loadable()), "first-of")
HEADINGS = [
    "What it is",
    "When it helps",
    "Use it",
    "Options",
    "What it costs",
    "How it is tested",
    "Where it comes from",
]
SAMPLE = re.compile(r"<!-- example: (\S+) -->\n+```(\w+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HOSTS = ("arxiv.org", "github.com", "huggingface.co", "www.apache.org")  # where a page may send its readers


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def without_transcripts(text: str) -> str:
    """A page without what terminals showed; that may hold fences of its own, so its block has longer ones."""
    return re.sub(r"<!-- transcript: \S+ -->\n\n(`{3,})text\n.*?\n\1\n", "", text, flags=re.DOTALL)


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
    for name, language, code in found:
        assert code == read(f"examples/{name}"), f"{name} in {name_of(page)} is not examples/{name}"
        assert language == {".py": "python", ".sh": "bash"}[Path(name).suffix]
    code = re.findall(r"^`{3,}(?:python|bash|sh|shell|console)$", without_transcripts(text), flags=re.MULTILINE)
    assert len(code) == len(found), "code on a page is an example with a marker, so that it is tested"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "reference.md"], ids=name_of)
def test_output_on_a_page_comes_from_a_file(page: Path) -> None:
    """A block of text is a transcript with a marker; nobody types what a command answers."""
    text = page.read_text(encoding="utf-8")
    typed = without_transcripts(text)
    assert "<!-- transcript:" not in typed, "a marker stands above a block of text"
    assert not re.search(r"^`{3,}text$|^\$ ", typed, flags=re.MULTILINE)


def test_every_example_is_shown_on_some_page_and_listed_on_one() -> None:
    names = {path.relative_to(ROOT / "examples").as_posix() for path in EXAMPLES}
    assert {name for page in PAGES for name, _, _ in SAMPLE.findall(page.read_text(encoding="utf-8"))} == names
    listed = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", read("docs/examples.md"), flags=re.MULTILINE)
    assert {name for name, _ in listed} == names
    for name, link in listed:  # the link leads to the page that shows the file
        assert f"<!-- example: {name} -->" in read(f"docs/{link.partition('#')[0]}"), name


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


TOLD = "What it says, and what to do"
OTHERS = [
    *EXAMPLES,
    *DOCS.glob("*.py"),
    *DOCS.glob("*.html"),
    *DOCS.rglob("*.js"),
    *DOCS.rglob("*.svg"),
    *DOCS.rglob("*.css"),
    *DOCS.glob("transcripts/*"),
]


@pytest.mark.parametrize("page", [*PAGES, *sorted(OTHERS), ROOT / "mkdocs.yml"], ids=name_of)
def test_no_page_names_a_place_on_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("#!/usr/bin/env bash", "").replace("http://www.w3.org/2000/svg", "")
    paths = re.findall(r"(?<![\w.:/~…)-])/[a-z][\w.-]*/[\w./-]*", text)
    everywhere = ("/dev/null", "/v1/")  # the same on every machine: a device, and what a server is asked
    assert [path for path in paths if not path.startswith(everywhere)] == [], "it says nothing on another machine"
    text = text.replace("127.0.0.1", "").replace("0.0.0.0", "")  # every machine has these
    assert re.findall(r"\bshared/|\bworkplace\b|\blocalhost\b|\b\d+\.\d+\.\d+\.\d+\b", text) == []


# Tables


@pytest.mark.parametrize(
    ("page", "kind"),
    [
        ("docs/drafters/ngram.md", NGram),
        ("docs/drafters/suffix.md", Suffix),
        ("docs/drafters/draft-model.md", DraftModel),
        ("docs/drafters/medusa.md", Medusa),
        ("docs/drafters/hydra.md", Hydra),
        ("docs/drafters/mlp-speculator.md", MLPSpeculator),
        ("docs/drafters/glide.md", Glide),
        ("docs/drafters/pard.md", Pard),
        ("docs/drafters/dflash.md", DFlash),
        ("docs/drafters/eagle.md", Eagle),
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


@pytest.mark.parametrize(
    "kind",
    [RequestOutput, CompletionOutput, Chunk, Score, SequenceStats, Provenance, Logprob],
    ids=lambda kind: kind.__name__,
)
def test_what_comes_back_is_told_field_by_field(kind: Any) -> None:
    """Properties too."""
    wanted = [item.name for item in dataclasses.fields(kind)]
    wanted += [name for name, member in vars(kind).items() if isinstance(member, property)]
    assert first_column(section(read("docs/engine.md"), kind.__name__)) == wanted


def test_every_drafter_page_has_the_same_headings() -> None:
    for name in DRAFTERS:
        found = re.findall(r"^## (.+)$", read(f"docs/drafters/{name}.md"), flags=re.MULTILINE)
        assert found == HEADINGS, name


def test_acceptance_rules_and_kernels_are_all_told() -> None:
    assert first_column(section(read("docs/sampling.md"), "Acceptance rules")) == list(RULES)
    assert first_column(section(read("docs/sampling.md"), "What “same text” promises")) == list(KERNELS)


def test_models_types_and_aliases_are_all_told() -> None:
    text = read("docs/models.md")
    kinds = re.findall(r"`(\w+)`", section(text, "Architectures"))
    assert {*families.FAMILIES} <= set(kinds)
    assert set(re.findall(r"`([A-Z0-9_]+)`", section(text, "GGUF files"))) == set(DECODERS)
    assert first_column(section(text, "Names you can use at once")) == list(catalog.ALIASES)
    for alias in catalog.ALIASES.values():
        assert f"| {catalog.human_size(alias.size_bytes)} | {alias.licence} |" in text


def test_a_limit_that_a_page_tells_is_the_one_in_the_code() -> None:
    aliases = catalog.ALIASES
    default, pair = aliases[catalog.DEFAULT_MODEL].size_bytes, ("smollm2-135m", "qwen2.5-coder-1.5b")
    settings = {item.name: item.default for item in dataclasses.fields(Settings)}
    told = {
        "README.md": [f"({default / 1e6:.0f} MB)"],
        "docs/getting-started.md": [f"SmolLM2 ({default / 1e6:.0f} MB)"],
        "docs/drafters/draft-model.md": [f"fetches {sum(aliases[name].size_bytes for name in pair) / 1e9:.1f} GB"],
        "docs/drafters/suffix.md": [f"`{Suffix().max_cached_bytes}` |", f"({Suffix().max_cached_bytes >> 20} MiB)"],
        "docs/models.md": [
            f"at most {tile_cache.MOST_BYTES / 1e9:.0f} GB are kept",
            f"models below {tile_cache.LEAST_BYTES / 1e6:.0f} MB",
        ],
        "docs/engine.md": [f"at most {memory.CPU_CACHE_LIMIT >> 30} GiB of cache"],
        "docs/troubleshooting.md": [f"at most {memory.CPU_CACHE_LIMIT >> 30} GiB unless"],
        "docs/check.md": [f"from {distribution.FEWEST} times or more", f"{100 * distribution.POWER:.0f} times in 100"],
        "docs/server.md": [
            f"within {settings['body_seconds']:.0f} seconds; it is larger than {settings['max_body'] >> 20} MiB",
            f"for at most {program.GRACE} seconds",
            f"do not end within {guards.HEADER_SECONDS:.0f} seconds",
        ],
    }
    for page, limits in told.items():
        text = " ".join(read(page).split())
        assert [limit for limit in limits if limit not in text] == [], page


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {re.split(r"[<>=!~ \[]", item)[0] for item in wanted}
    assert set(first_column(read("docs/dependencies.md"))) == names


def test_the_design_page_names_every_module_of_the_house() -> None:
    block = section(read("docs/design.md"), "5. The house").split("```")[1]
    package = ROOT / "paceline"
    names = {path.stem for path in package.rglob("*.py") if path.stem != "__init__" and "layers" not in path.parts}
    assert names - set(re.findall(r"\w+", block)) == set(), "name the new module in its folder's row"


# The command line


def commands(group: Any, path: str = "paceline") -> dict[str, Any]:
    """Every command by what is typed for it."""
    found = {}
    for name, command in group.commands.items():
        found[f"{path} {name}"] = command
        if hasattr(command, "commands"):
            found |= commands(command, f"{path} {name}")
    return found


COMMANDS = commands(typer.main.get_command(app))


def flags_of(command: Any) -> list[str]:
    return [flag for item in command.params for flag in [*item.opts, *item.secondary_opts] if flag.startswith("--")]


def test_every_option_of_every_command_is_told() -> None:
    text = read("docs/reference.md")
    for path, command in COMMANDS.items():
        under = re.split(r"^### ", text.split(f"\n### {path}\n")[1], flags=re.MULTILINE)[0]
        rows = re.findall(r"^\| (`--[^|]*) \|", under, flags=re.MULTILINE)
        assert sorted(re.findall(r"--[\w-]+", " ".join(rows))) == sorted(flags_of(command)), path


def test_every_command_has_its_place_on_the_page_of_the_command_line() -> None:
    text = read("docs/command-line.md")
    for path in COMMANDS:
        assert any(told in text for told in (f"## {path}\n", f"`{path} NAME`", f"`{path}`")), f"describe {path}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_on_a_page_exists(page: Path) -> None:
    """Ours, another system's, or one of the tools that a page tells the reader to run."""
    known = {flag for command in COMMANDS.values() for flag in flags_of(command)} | {"--help", "--version"}
    known |= {"--" + row.name.replace("_", "-") for row in compat.SPELLINGS}
    known |= {"--force-reinstall", "--no-deps", "--constraint", "--editable", "--extra-index-url"}  # pip's
    known |= {"--check", "--strict", "--before"}  # our scripts', mkdocs'
    text = re.sub(r"(?s)<!-- transcript: mistake -->.*?\n```\n", "", page.read_text(encoding="utf-8"))
    found = re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"<!--.*?-->|\| -{3,} .*", "", text))
    assert [flag for flag in found if flag.replace("_", "-") not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_on_a_page_can_be_typed(page: Path) -> None:
    """Lines in code blocks that begin with paceline are read as the command line reads them; nothing runs."""
    text = page.read_text(encoding="utf-8")
    blocks = re.split(r"^(`{3,}\w*)$", without_transcripts(text), flags=re.MULTILINE)[1:]
    opened = [body for fence, body in zip(blocks[0::4], blocks[1::4]) if fence == "```"]
    for line in (line for body in opened for line in body.splitlines() if line.startswith("paceline ")):
        path = max((path for path in COMMANDS if f"{line} ".startswith(f"{path} ")), key=len)
        COMMANDS[path].make_context(path, shlex.split(line)[len(path.split()) :])


# Troubleshooting


def _raise_no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr("paceline.kernels.cpu.library.NAME", "_missing.so")
    native.NativeOps()


def _raise_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device, share: 0)
    tiny_llm(max_model_len=256, num_pages=None)


def _raise_other_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary._check_same({0: "!", 1: "a"}, {0: "<|endoftext|>", 1: "a"})


def _other_target(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.chdir(folder)
        facts = tiny_eagle.Facts(target=48)
        tiny_eagle.write(tiny_eagle.random_tensors(facts), tiny_eagle.config_of(facts), Path("my-head"))
        try:
            tiny_llm(drafter=kind("my-head"))
        finally:
            monkeypatch.undo()


def _find_folder(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.chdir(folder)
        Path("my-model").mkdir()
        Path("my-model/config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            loader.find("my-model")
        finally:
            monkeypatch.undo()


def _raise_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("PACELINE_HOME", folder)
        loader.locate("gemma3-270m")


OWN_CODE = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}}

TROUBLES = {
    "native": _raise_no_native,
    "memory": _raise_no_memory,
    "vocabulary": _raise_other_vocabulary,
    "another target": lambda monkeypatch: _other_target(monkeypatch, Eagle),
    "another kind": lambda monkeypatch: _other_target(monkeypatch, DraftModel),
    "prompt": lambda monkeypatch: tiny_llm(max_model_len=256).generate([5] * 300),
    "template": lambda monkeypatch: PromptTemplate(None, None).render([{"role": "user", "content": "hello"}]),
    "tokenizer": lambda monkeypatch: tiny_llm().generate("hello"),
    "trees": lambda monkeypatch: tiny_llm(drafter=Suffix(tree=True), acceptance="block"),
    "name": lambda monkeypatch: loader.locate("smolm2"),
    "code": lambda monkeypatch: _find_folder(monkeypatch, OWN_CODE),
    "recurrent": lambda monkeypatch: _find_folder(monkeypatch, {"model_type": "qwen3_next"}),
    "licence": _raise_no_consent,
    "no modules": lambda monkeypatch: mtp_form.find_form([], "my-model"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_a_sentence_in_troubleshooting_is_the_one_that_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PacelineError) as caught:
        TROUBLES[name](monkeypatch)
    rows = re.findall(r"^\| (.+?) \| [^|]+ \|$", section(read("docs/troubleshooting.md"), TOLD), flags=re.MULTILINE)
    assert str(caught.value) in [row.replace("\\|", "|") for row in rows]
    assert len(rows) - 1 == len(TROUBLES), "each row but the head has its trouble here"
