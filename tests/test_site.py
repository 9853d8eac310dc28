"""The site: it builds without a warning, no link, anchor or picture of it is dead, and it needs nothing from elsewhere.

The built HTML is read, not the Markdown. Knows how HTML points at things; must not know what a page says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
POINTERS = {"a": "href", "img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}


@dataclass
class Page(HTMLParser):
    """What one page offers to point at, and what it points at."""

    ids: set[str] = field(default_factory=set)
    pointers: list[tuple[str, str]] = field(default_factory=list)  # tag, target
    pictures_without_text: list[str] = field(default_factory=list)
    in_nav: int = 0
    nav: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        target = found.get(POINTERS.get(tag, ""))
        if target is not None:
            self.pointers.append((tag, target))
        if tag == "img" and not found.get("alt"):
            self.pictures_without_text.append(found.get("src", ""))
        self.in_nav += tag == "nav"
        if self.in_nav and tag == "a":
            self.nav.add(found.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        self.in_nav -= tag == "nav"


def read_site(folder: Path) -> dict[Path, Page]:
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    return pages


def dead_pointers(folder: Path, pages: dict[Path, Page]) -> list[str]:
    """Every link, anchor, picture, script and style of the site that leads nowhere in it."""
    dead = []
    for path, page in pages.items():
        for tag, target in page.pointers:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = unquote(parts.path)
            aim = (folder / place.lstrip("/") if place.startswith("/") else path.parent / place) if place else path
            aim = aim.resolve()
            aim = aim / "index.html" if aim.is_dir() else aim
            anchor = unquote(parts.fragment)
            lost = not aim.is_file() or (anchor and (aim not in pages or anchor not in pages[aim].ids))
            if lost:
                dead.append(f"{path.relative_to(folder)}: <{tag}> {target}")
    return dead


def foreign_pointers(folder: Path, pages: dict[Path, Page]) -> list[str]:
    """What a browser would fetch from another place while showing a page; a link is only followed by a reader."""
    found = []
    for path, page in pages.items():
        for tag, target in page.pointers:
            if tag != "a" and re.match(r"(https?:)?//", target):
                found.append(f"{path.relative_to(folder)}: <{tag}> {target}")
    for path in sorted([*folder.rglob("*.css"), *folder.rglob("*.svg")]):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"""(?:url\(|@import\s+|(?:xlink:)?href=)["']?((?:https?:)?//[^"')\s]+)""", text):
            found.append(f"{path.relative_to(folder)}: {target}")
    return found


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; a warning is an error there (`strict` in mkdocs.yml)."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Page]:
    return read_site(site)


def test_no_link_anchor_or_picture_of_the_built_site_is_dead(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 10
    assert dead_pointers(site, pages) == []


def test_nothing_is_fetched_from_elsewhere_while_a_page_is_read(site: Path, pages: dict[Path, Page]) -> None:
    assert foreign_pointers(site, pages) == []
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r'class="mermaid|fonts\.g|googletagmanager|"repo_url"', text), path


def test_every_page_is_in_the_navigation_and_none_is_left_out(site: Path, pages: dict[Path, Page]) -> None:
    home = pages[site / "index.html"]
    listed = {(site / link).resolve() for link in home.nav if link.endswith(".html")}
    written = {site / path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    reports = {site / path.name for path in DOCS.glob("*.html")}  # of a measured run; they need no navigation
    assert written == set(pages) - {site / "404.html"} - reports
    assert written <= listed


def test_search_works_in_pages_that_are_opened_from_the_disk(site: Path, pages: dict[Path, Page]) -> None:
    """There neither a fetch nor a Worker is allowed: the index is a script, and a script of ours stands in for it."""
    name, _, index = (site / "search" / "search_index.js").read_text(encoding="utf-8").partition(" = ")
    found = {entry["location"].partition("#")[0] for entry in json.loads(index)["docs"]}
    assert name == "var __index"
    assert {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")} == found
    for path in site.rglob("*.html"):
        scripts = [target for tag, target in pages[path].pointers if tag == "script"]
        own = [place for place, target in enumerate(scripts) if target.endswith("style/iframe-worker.js")]
        assert not scripts or own == [0], f"{path.name}: it must come before the script that starts the Worker"


def test_scripts_and_transcripts_stay_out_of_the_site(site: Path) -> None:
    assert not [*site.rglob("*.py"), *site.rglob("transcripts"), *site.rglob("*.md")]


def test_every_picture_says_in_words_what_it_shows(pages: dict[Path, Page]) -> None:
    assert {path.name: page.pictures_without_text for path, page in pages.items() if page.pictures_without_text} == {}


@pytest.mark.parametrize(
    ("body", "dead"),
    [
        ('<a href="two.html#there">x</a>', []),
        ('<a href="two.html#gone">x</a>', ["one.html: <a> two.html#gone"]),
        ('<a href="three.html">x</a>', ["one.html: <a> three.html"]),
        ('<a href="#here">x</a><p id="here">', []),
        ('<a href="#nowhere">x</a>', ["one.html: <a> #nowhere"]),
        ('<img src="gone.png" alt="x">', ["one.html: <img> gone.png"]),
        ('<script src="/gone.js"></script>', ["one.html: <script> /gone.js"]),
        ('<a href="https://arxiv.org/abs/1">x</a>', []),
    ],
)
def test_the_check_itself_finds_what_is_dead(body: str, dead: list[str], tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(body)
    (tmp_path / "two.html").write_text('<h2 id="there">There</h2>')
    assert dead_pointers(tmp_path, read_site(tmp_path)) == dead


def test_the_check_itself_finds_what_would_be_fetched_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text(
        '<link href="https://fonts.example/a.css"><script src="//b.example/c.js"></script><a href="https://d.example">d</a>'
    )
    (tmp_path / "style.css").write_text("@import 'https://e.example/e.css'; p { background: url(https://f.example/f) }")
    assert foreign_pointers(tmp_path, read_site(tmp_path)) == [
        "one.html: <link> https://fonts.example/a.css",
        "one.html: <script> //b.example/c.js",
        "style.css: https://e.example/e.css",
        "style.css: https://f.example/f",
    ]
