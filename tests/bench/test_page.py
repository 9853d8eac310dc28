"""The HTML report: self-contained, complete, well formed, and safe from what models and users write."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.bench import page
from paceline.bench.differences import Difference
from tests.bench.examples import IDS, TOKENIZER, comparison, example, record

VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Text, tags and attributes; fails on a tag that is closed without being open or never closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def read(data: dict[str, Any]) -> Reader:
    reader = Reader()
    reader.feed(page.render(data))
    reader.close()
    assert reader.open == []
    return reader


def words(data: dict[str, Any]) -> str:
    return re.sub(r"\s+", " ", "".join(read(data).text))


def swept() -> dict[str, Any]:
    return record(comparison({"plain": [1.0, 1.0], "1": [0.9, 0.8], "2": [0.6, 0.6], "4": [0.5, 0.5]}), "sweep")


CASES = {
    "compare": lambda: record(example("ngram", "suffix")),
    "one drafter": lambda: record(example("ngram:max_match=3,min_match=1")),
    "plain only": lambda: record(example()),
    "eight drafters": lambda: record(example(*(f"ngram:max_match={n}" for n in range(1, 9)))),
    "one prompt": lambda: record(comparison({"plain": [1.0], "suffix": [0.5]})),
    "sweep": swept,
    "one length": lambda: record(comparison({"plain": [1.0], "3": [0.5]}), "sweep"),
    "no length": lambda: record(comparison({"plain": [1.0]}), "sweep"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_result_makes_a_well_formed_page_that_needs_nothing_else(case: str) -> None:
    reader = read(CASES[case]())
    names = {tag for tag, _ in reader.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in reader.tags:
        assert not {"src", "href", "srcset", "action", "background"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    text = page.render(CASES[case]())
    assert not re.search(r"https?:|url\(|@import|@font-face", text)
    assert "viewport" in text and "prefers-color-scheme: dark" in text


def test_a_comparisons_page_has_every_figure_of_its_table() -> None:
    data = record(example("ngram", "suffix"))
    text = words(data)
    for row in data["variants"]:
        for expected in (
            row["label"],
            f"{row['median_seconds']:.2f} s",
            f"{row['tokens_per_second']:.1f} tokens/s",
            f"{row['speed_up']:.2f}×",
            f"{row['forward_speed_up']:.2f}×",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['identical']}/{row['answered']}",
        ):
            assert expected in text
    assert "2.00–2.00" in text
    assert "The fastest was ngram: 2.00× as fast as plain decoding" in text
    assert "paceline compare" in text
    assert data["machine"]["cpu"] in text
    assert f"torch {data['versions']['torch']}" in text
    assert "results.json" in text


def test_bars_and_intervals_are_on_one_scale() -> None:
    data = record(comparison({"plain": [1.0, 1.0], "ngram": [0.5, 0.4]}))
    text = page.render(data)
    widths = [float(width) for width in re.findall(r'<i style="width:([\d.]+)%', text)]
    one = float(re.findall(r'<s style="left:([\d.]+)%', text)[0])
    assert widths[0] == one
    assert widths[1] / one == pytest.approx(data["variants"][1]["speed_up"], rel=1e-3)
    left, width = map(float, re.findall(r'<u style="left:([\d.]+)%;width:([\d.]+)%', text)[0])
    low, high = data["variants"][1]["speed_up_interval"]
    assert (left / one, (left + width) / one) == pytest.approx((low, high), rel=1e-3)


def test_a_sweeps_page_has_both_speed_ups_at_every_length_and_names_the_best() -> None:
    data = swept()
    text = words(data)
    assert "The fastest was a draft length of 4" in text
    assert "4 · fastest" in text
    assert "in forwards of the target" in text and "in time" in text
    for row in data["variants"][1:]:
        assert f"{row['speed_up']:.2f}" in text
        assert f"{row['forward_speed_up']:.2f}" in text
    assert "repeated 4\u2011grams" in text


def test_tokens_are_shown_by_origin_and_the_whole_text_is_there() -> None:
    data = record(comparison({"plain": [1.0], "ngram": [0.5]}))
    text = page.render(data)
    assert "".join(re.findall(r'<span class="accepted" title="x">([^<]*)</span>', text)) == TOKENIZER.decode(IDS[:3])
    shown = re.findall(r'<p class="text">(.*?)</p>', text, flags=re.DOTALL)
    assert re.sub("<[^>]*>", "", shown[0]) == TOKENIZER.decode(IDS)
    styles = re.findall(r"^\.(accepted|corrected|bonus) \{([^}]*)\}", text, flags=re.MULTILINE)
    marks = [re.sub(r"--?[\w-]+|var|background: \(\);", "", style) for _, style in styles]
    assert len(set(marks)) == 3, "the three differ by more than their colour"


def test_what_models_and_users_wrote_is_shown_as_text() -> None:
    result = comparison({"plain": [1.0], "ngram": [0.5]})
    data = record(result)
    evil = "<script>alert('x')</script><b onclick=\"x\">&amp;"
    data["prompts"][0]["name"] = data["prompts"][0]["text"] = data["command"] = evil
    data["options"]["model"] = "x" + evil.replace("/", "")
    data["variants"][1]["label"] = data["variants"][1]["name"] = evil
    data["shown"][0]["pieces"] = [[evil, "accepted", evil]]
    data["shown"][0]["prompt"] = data["shown"][0]["variant"] = evil
    reader = read(data)
    assert "script" not in {tag for tag, _ in reader.tags}
    assert "".join(reader.text).count(evil) >= 6


def test_differences_and_an_interruption_are_told() -> None:
    result = example("ngram", "suffix")
    result.interrupted = True
    result.measured[2].differences = [Difference(1, 0, 4, IDS[4], 7, 0.00003)]
    text = words(record(result))
    assert "Interrupted:" in text
    assert "suffix, prompt 1: differs from token 5 on, margin 0.00003" in text
    assert "3 of 4 answers with drafts are plain's" in text


def test_positions_with_few_drafts_are_hollow_and_that_is_said() -> None:
    text = page.render(record(example("ngram")))  # four or eight drafts a position
    assert 'class="dot hollow"' in text
    assert "hollow: fewer than 10" in text
    many = example("ngram")
    for answer in many.measured[1].passes[0].answers:
        answer.output.stats.proposed = [50] * 4
        answer.output.stats.accepted = [20] * 4
    assert "hollow:" not in re.sub(r"<style>.*</style>", "", page.render(record(many)), flags=re.DOTALL)


@pytest.mark.parametrize("case", ["compare", "one drafter", "plain only", "eight drafters", "one prompt"])
def test_the_picture_is_a_whole_svg_that_needs_nothing_else(case: str) -> None:
    text = page.draw(CASES[case]())
    names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert names <= {"svg", "style", "rect", "text", "tspan", "g", "line", "circle", "path"}
    assert not re.search(r"url\(|@import|@font-face|href|https?:(?!//www.w3.org/2000/svg)", text)


def test_the_picture_has_every_speed_with_its_interval_and_says_what_was_measured_where() -> None:
    data = record(comparison({"plain": [1.0, 1.0], "ngram": [0.5, 0.4]}))
    data["variants"][1]["label"] = "<ngram>"
    told = "".join(ElementTree.fromstring(page.draw(data)).itertext())
    for row in data["variants"]:
        assert f"{row['tokens_per_second']:.1f} tokens/s · {row['speed_up']:.2f}×" in told
    low, high = data["variants"][1]["speed_up_interval"]
    assert f"({low:.2f}–{high:.2f})" in told and "<ngram>" in told
    assert "2 prompts, at most 20 tokens each" in told and data["machine"]["cpu"] in told
