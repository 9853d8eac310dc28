"""What scripts write into README and docs: figures, samples, transcripts, tables of foreign words, the reference.

On what the scripts read, so that a change of a layout is noticed here. Knows the markers and the scripts' functions.
"""

from __future__ import annotations

import html
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline import LLM, NGram, SamplingParams, compat
from paceline.bench import compare, prompts, results
from paceline.kernels.cpu.library import library
from paceline.prompts import Prompt
from tests.fakes import tiny_llm

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
SYSTEMS = {
    "vLLM": "vllm",
    "LMFlow": "lmflow",
    "Colossal-Inference": "colossal-inference",
    "PaddleNLP": "paddlenlp",
}


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(DOCS))


figures, pages, reference, transcripts = map(load, ("figures", "pages", "reference", "transcripts"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def all_text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_what_the_script_writes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for kind in ("figures", "verdict", "counts", "spellings", "refusal"):
        assert len(re.findall(f"<!-- {kind}: ", text)) == text.count(f"<!-- /{kind} -->")
    marks = re.findall(r"<!-- (?:example|transcript): ", text)
    assert len(marks) == len(pages.FENCED.findall(text)), "a marker stands above a code block"
    new = reference.page() if page == reference.PAGE else pages.rewrite(text)
    assert new == text, "run: python docs/pages.py"


def test_rewriting_twice_changes_nothing() -> None:
    page = "<!-- example: quickstart.py -->\n\n```\nold\n```\n<!-- spellings: LMFlow -->\n<!-- /spellings -->\n"
    once = pages.rewrite(page)
    assert "from paceline import" in once and "`gamma`" in once and "old" not in once
    assert pages.rewrite(once) == once


# Figures


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
    data = results.record("compare", result, None, "paceline compare", options)
    results.write(tmp_path / "tiny.json", data)
    lines = figures.render("tiny", tmp_path).splitlines()
    plain, ngram = (f"{one.seconds:.2f} s | {one.tokens_per_second:.1f} |" for one in result.measured)
    assert lines[2] == f"| plain | {plain} 1.00× | – | 1.00 | – | 2/2 |"
    assert lines[3].startswith(f"| ngram:min_match=1 | {ngram} ")
    assert lines[-1].startswith("tiny: 2 prompts, at most 8 tokens each, 1 at a time, temperature 0, measured once.")
    data["variants"][1]["answers"][1]["difference"] = {"position": 3, "margin": 0.000012}
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    told = figures.render("tiny", tmp_path).splitlines()[-1]
    assert told.startswith("Not plain's text: margin: how far apart")
    told = figures.render("tiny", tmp_path).splitlines()[-3]
    assert told == "Not plain's text: ngram:min_match=1, second: differs from token 4 on, margin 0.00001."


# Tables of foreign words


def test_every_spelling_is_on_its_systems_page_and_no_test_is_named_there() -> None:
    assert set(SYSTEMS) == {row.system for row in compat.SPELLINGS}
    for system, name in SYSTEMS.items():
        text = (DOCS / "coming-from" / f"{name}.md").read_text(encoding="utf-8")
        told = re.findall(r"^\| `([^`]+)`(?: = `([^`]+)`)? \| [^|]+ \| [^|]+ \|$", text, flags=re.MULTILINE)
        rows = [(row.name, row.value) for row in compat.SPELLINGS if row.system == system]
        assert sorted(told) == sorted(rows)
        assert "tests/" not in text and not re.search(r"\|[^|\n]*\btest\b[^|\n]*\|", text)


# Transcripts


def test_a_transcript_begins_with_the_command_that_made_it() -> None:
    files = {path.stem: path for path in transcripts.TRANSCRIPTS.glob("*.txt")}
    assert set(files) == set(transcripts.COMMANDS), "run: python docs/transcripts.py"
    for name, path in files.items():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0] == f"$ {transcripts.COMMANDS[name][0]}"
        assert len(lines) > 1
        assert all(len(line) <= transcripts.COLUMNS for line in lines[1:] if not line.startswith(" "))
    for name, command in transcripts.PICTURES.items():
        [title] = re.findall(r"<title>(.*)</title>", (transcripts.IMAGES / f"{name}.svg").read_text(encoding="utf-8"))
        assert html.unescape(title) == command


def test_every_transcript_is_shown_on_some_page() -> None:
    text = all_text()
    assert set(re.findall(r"<!-- transcript: (\S+) -->", text)) == {*transcripts.COMMANDS, *pages.RUNS}
    for name in transcripts.PICTURES:
        assert f"images/{name}.svg" in text


@pytest.fixture(scope="module")
def llm() -> LLM:
    if library() is None:
        pytest.skip("pages were recorded on the native kernels, whose bits are the same on every CPU")
    return LLM("smollm2-135m", max_model_len=1024)


def test_what_the_default_model_says_on_a_page_is_what_it_says_today(llm: LLM) -> None:
    for name, (questions, most) in transcripts.ASKED.items():
        told, messages = shown(name), []
        for question in questions:
            messages += [{"role": "user", "content": question}]
            [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=most))
            messages += [{"role": "assistant", "content": answer.outputs[0].text}]
            said = "".join(answer.outputs[0].text.split())
            assert said and said in told, f"run: python docs/transcripts.py {name} && python docs/pages.py"


def shown(name: str) -> str:
    """The letters of a transcript or a picture, whatever the lines they stand on."""
    if name in transcripts.PICTURES:
        text = (transcripts.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
        text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", "", text, flags=re.DOTALL))
    else:
        text = (transcripts.TRANSCRIPTS / f"{name}.txt").read_text(encoding="utf-8")
    return "".join(text.split())


def test_a_run_on_the_pages_has_the_prompts_and_the_answers_of_today(llm: LLM) -> None:
    data = json.loads((figures.RESULTS / f"{pages.RUNS['compare']}.json").read_text(encoding="utf-8"))
    questions = prompts.read_questions(None, demo=data["options"]["demo"])
    assert [prompt["name"] for prompt in data["prompts"]] == [question.name for question in questions]
    params = SamplingParams(temperature=0, max_tokens=data["options"]["max_tokens"])
    answers = llm.chat([question.messages for question in questions[:4]], params)
    said = [answer.outputs[0].token_ids for answer in answers]
    assert said == data["default"]["token_ids"][:4], "run: python docs/transcripts.py && python docs/pages.py"


def test_table_terminal_picture_and_report_of_a_page_are_of_one_run() -> None:
    run = pages.RUNS["compare"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- figures: {run} -->" in readme and "docs/images/compare.svg" in readme
    stale = [path.name for path, text in pages.files().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: python docs/pages.py"
    data = json.loads((figures.RESULTS / f"{run}.json").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"$(BIN)/{data['command']}\n" in makefile, "the first page shows what `make demo` does"
    told = pages.fenced("transcript", "compare")
    for row in data["variants"]:
        speed = f"{row['speed_up']:.2f}×"
        assert speed in told and speed in readme and speed in (DOCS / "images" / "compare.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("sent", "left"),
    [
        ("one\r\ntwo\r\n", ["one", "two", ""]),
        ("\x1b[32mgreen\x1b[0m  \r\n", ["\x1b[32mgreen\x1b[0m", ""]),
        ("10%\r50%\r\x1b[2Kdone\n", ["done", ""]),
        ("\x1b[?25lloading\r\n\x1b[?25h\r\x1b[1A\x1b[2Kanswer\r\n", ["answer", ""]),
    ],
)
def test_the_screen_keeps_what_a_terminal_would_show(sent: str, left: list[str]) -> None:
    assert transcripts.screen(sent) == left


def test_a_command_is_typed_into_a_real_terminal_line_by_line() -> None:
    """It sees a terminal, and what was typed is shown once it was asked for."""
    command = 'test -t 0 && test -t 1 && read -p "who? " name && echo "hello $name from $HOME"'
    shown = transcripts.run(command, [("who? ", "you\n")], colours=False)
    assert transcripts.screen(shown)[:2] == ["who? you", "hello you from ~"]


# Pictures


def test_the_round_in_the_picture_is_a_real_one(llm: LLM) -> None:
    """docs/images/round.svg: what stood there, what was proposed, what was kept, what the target said instead."""
    llm.set_drafter(NGram(4, min_match=1, max_match=3))
    question = "Copy this sentence and change cat to dog: The cat sat on the mat and the cat slept."
    messages = [{"role": "user", "content": question}]
    text, rounds = "", []
    for chunk in llm.stream(messages, SamplingParams(temperature=0, max_tokens=16)):
        tokens = [llm.tokenizer.decode([token]) for token in chunk.token_ids]
        rounds.append((text, tokens, [origin.kind for origin in chunk.provenance]))
        text += chunk.text
    assert ("The cat slept on", [" the", " mat", "."], ["accepted", "accepted", "corrected"]) in rounds
    words = re.findall(r">([\w.]+)(?: [✓✗–])?</text>", (DOCS / "images" / "round.svg").read_text(encoding="utf-8"))
    assert " ".join(words).startswith("1 2 The cat slept on 3 the mat and the 4 on the mat and the 5 the mat . 6")
