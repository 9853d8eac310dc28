"""Blocks in README and docs that come from elsewhere: this script writes them, and nobody types them.

    python docs/pages.py            rewrite every block
    python docs/pages.py --check    change nothing; name the pages that are out of date

    <!-- figures: NAME -->            bench/results/NAME.json as a table, up to <!-- /figures -->
    <!-- verdict: NAME [KIND] -->     what that run found (on prompts of a kind), in a sentence, up to <!-- /verdict -->
    <!-- counts: NAME -->             what can be counted of that run, whatever the machine, up to <!-- /counts -->
    <!-- spellings: SYSTEM -->        the rows of paceline.compat for that system, up to <!-- /spellings -->
    <!-- example: NAME -->            the code block below shows examples/NAME
    <!-- refusal: NAME -->            the sentence with which examples/NAME ends, up to <!-- /refusal -->
    <!-- transcript: NAME -->         the text block below shows docs/transcripts/NAME.txt, or what the terminal showed
                                      of a measured run
    <!-- recorded -->                 when and where the transcripts were made, up to <!-- /recorded -->

The picture and the report of that run are written too, so that table, terminal, picture and report on the pages are of
one run. Knows the markers. How results look is in figures.py, how transcripts are made in transcripts.py;
docs/reference.md is written whole by reference.py, which this script calls.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
import reference
from spellings import ours

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, TRANSCRIPTS = ROOT / "examples", ROOT / "docs" / "transcripts"
FENCED = re.compile(r"(<!-- (example|transcript): ([\w./-]+) -->\n+)(`{3,})(\w*)\n(.*?)^\4$", re.DOTALL | re.MULTILINE)
SPELLINGS = re.compile(r"(<!-- spellings: ([\w-]+) -->\n).*?(<!-- /spellings -->)", re.DOTALL)
REFUSAL = re.compile(r"(<!-- refusal: ([\w./-]+) -->\n).*?(<!-- /refusal -->)", re.DOTALL)
RECORDED = re.compile(r"(<!-- recorded -->\n).*?(<!-- /recorded -->)", re.DOTALL)
GROUPS = (
    ("Understood", ("same", "renamed")),
    ("Taken, and said to have no effect", ("no effect",)),
    ("Refused, with a sentence", ("refused", "later")),
)
RUNS = {"compare": "compare_smollm2"}  # transcripts that a results file has, with a picture and a report beside it
LANGUAGES = {".py": "python", ".sh": "bash"}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewrite(text: str) -> str:
    """The page with every block as its source has it now."""
    text = FENCED.sub(lambda match: match[1] + fenced(match[2], match[3]), text)
    text = SPELLINGS.sub(lambda match: f"{match[1]}\n{spellings(match[2])}\n\n{match[3]}", text)
    text = REFUSAL.sub(lambda match: f"{match[1]}\n> {refusal(match[2])}\n\n{match[3]}", text)
    text = RECORDED.sub(lambda match: f"{match[1]}\n{recorded()}\n\n{match[2]}", text)
    return figures.rewrite(text)


def fenced(kind: str, name: str) -> str:
    """A file as a code block, between fences longer than any in the file."""
    path = EXAMPLES / name if kind == "example" else TRANSCRIPTS / f"{name}.txt"
    measured = kind == "transcript" and name in RUNS
    body = figures.terminal(RUNS[name]) if measured else path.read_text(encoding="utf-8")
    longest = max((len(run) for run in re.findall(r"`{3,}", body)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{LANGUAGES.get(path.suffix, 'text')}\n{body.rstrip()}\n{fence}"


def refusal(name: str) -> str:
    """What is said of something that is not there yet; a test holds the example to it."""
    told: str = json.loads((EXAMPLES / "refused.json").read_text(encoding="utf-8"))[name]
    return f"`{told}`"


def recorded() -> str:
    """Where the transcripts come from."""
    data = json.loads((TRANSCRIPTS / "recorded.json").read_text(encoding="utf-8"))
    machine, versions = data["machine"], data["versions"]
    place = ", ".join(str(part) for part in (machine["gpu"], machine["cpu"], f"{machine['cores']} cores") if part)
    return f"Recorded on {data['date'][:10]} with paceline {versions['paceline']}, torch {versions['torch']}: {place}."


def spellings(system: str) -> str:
    """What another system calls things, and what each is here."""
    from paceline.compat import SPELLINGS as rows

    found = [row for row in rows if row.system == system]
    parts = [_spelling_table(title, [row for row in found if row.effect in effects]) for title, effects in GROUPS]
    return "\n\n".join(filter(None, parts))


def _spelling_table(title: str, rows: list[Any]) -> str:
    heads = ["theirs", "here", "note"]
    return f"**{title}**\n\n{figures.table(heads, map(_spelling, rows), '---')}" if rows else ""


def without(flag: str) -> str:
    """A flag that is on, and so has but one that turns it off."""
    return off if (off := f"--no-{flag[2:]}") in reference.flags() else flag


def _spelling(row: Any) -> list[str]:
    """A row of the table. A flag that no command has is not shown: there the spelling is taken without effect."""
    theirs = f"`{row.name}`" + (f" = `{row.value}`" if row.value else "")
    words = [part for part in ours(row).split(", ") if part]
    words = [part if part in reference.flags() else without(part) for part in words]
    typed = [part for part in words if not part.startswith("--") or part.split()[0] in reference.flags()]
    only = "no effect on the command line" if typed != words else "" if row.where == "both" else f"{row.where} only"
    here = ", ".join(_code(part) for part in typed) or "–"
    return [theirs, here, "; ".join(filter(None, (row.note, only))) or "–"]


def _code(words: str) -> str:
    before, quote, rest = words.partition("'s ")
    return f"{before}{quote}`{rest}`" if quote else f"`{words}`"


def files() -> dict[Path, str]:
    """Every page, picture and report that comes from elsewhere, as it should be now."""
    told = {
        page: reference.page() if page == reference.PAGE else rewrite(page.read_text(encoding="utf-8"))
        for page in pages()
    }
    drawn = {place: text for name, run in RUNS.items() for place, text in figures.drawn(name, run).items()}
    return told | {ROOT / "docs" / place: text for place, text in drawn.items()}


def main(words: list[str]) -> int:
    check = words == ["--check"]
    if words and not check:
        print(__doc__)
        return 2
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(wanted[path], encoding="utf-8")
        print(f"{path.relative_to(ROOT).as_posix()} {'is out of date' if check else 'was rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
