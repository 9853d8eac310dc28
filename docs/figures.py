"""Figures and samples in README and docs come from files: this script writes them there, and nobody types them.

    python docs/figures.py            rewrite every block
    python docs/figures.py --check    change nothing; name the pages that are out of date

A block stands between `<!-- figures: NAME -->` and `<!-- /figures -->` and shows bench/results/NAME.json.
A Python block under `<!-- example: NAME.py -->` shows examples/NAME.py.
Knows the layouts of `paceline compare`, bench/gpu_smoke.py and bench/host_overhead.py. Measures nothing, and rounds
only for reading.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
EXAMPLES = ROOT / "examples"
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
SAMPLE = re.compile(r"(<!-- example: ([\w.-]+) -->\n+```python\n).*?(```)", re.DOTALL)
MISSING = "*not measured yet*"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewrite(text: str, results: Path = RESULTS) -> str:
    """The page with every block as its file has it now."""
    text = SAMPLE.sub(lambda match: match[1] + (EXAMPLES / match[2]).read_text(encoding="utf-8") + match[3], text)
    return BLOCK.sub(lambda match: f"{match[1]}\n{render(match[2], results)}\n\n{match[3]}", text)


def render(name: str, results: Path = RESULTS) -> str:
    """One results file as Markdown."""
    path = results / f"{name}.json"
    if not path.is_file():
        return MISSING
    data = json.loads(path.read_text(encoding="utf-8"))
    if "variants" in data:
        return render_compare(data)
    if "runs" in data:
        return render_runs(data)
    if "rows" in data:
        return render_rows(data)
    raise ValueError(f"{path.name} has no 'variants', 'runs' or 'rows': its layout is not known here")


def render_compare(data: dict[str, Any]) -> str:
    """What `paceline compare` wrote."""
    prompts, options = len(data["prompts"]), data["options"]
    rows = [
        [
            _without_folders(variant["name"]),
            f"{variant['tokens_per_second']:.1f}",
            f"{variant['speed_up']:.2f}×",
            f"{variant['tokens_per_forward']:.2f}",
            "–" if variant["acceptance"] is None else f"{variant['acceptance']:.0%}",
            f"{variant['identical']} of {prompts}",
        ]
        for variant in data["variants"]
    ]
    heads = ["variant", "tokens/s", "speed-up", "tokens per forward", "drafts accepted", "same text as plain"]
    parts = [table(heads, rows), _describe(data, prompts, options), *_differences(data)]
    return "\n\n".join(parts)


def _without_folders(name: str) -> str:
    """A model or drafter by its last name: where it lay on one machine says nothing to a reader."""
    return re.sub(r"[^\s:=,]*/", "", name)


def _describe(data: dict[str, Any], prompts: int, options: dict[str, Any]) -> str:
    """What was measured where."""
    passes = max(len(variant["seconds"]) for variant in data["variants"])
    often = "measured once" if passes == 1 else f"median of {passes} rounds"
    cut = "; interrupted, so only complete passes count" if data.get("interrupted") else ""
    return (
        f"{_without_folders(options['model'])}, {prompts} prompts, at most {options['max_tokens']} tokens each, "
        f"{options['batch_size']} at a time, temperature {options['temperature']:g}, {often}{cut}. "
        f"{_where(data)}."
    )


def _where(data: dict[str, Any]) -> str:
    """Machine, versions and day."""
    machine, versions = data["machine"], data["versions"]
    parts = (machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores")
    told = ", ".join(str(part) for part in parts if part)
    return f"{told}; paceline {versions['paceline']}, torch {versions['torch']}; {data['date'][:10]}"


def _differences(data: dict[str, Any]) -> list[str]:
    """Every answer that was not the plain one, with the margin where it was computed."""
    told = []
    for variant in data["variants"]:
        for answer in variant["answers"]:
            found = answer["difference"]
            if found is not None:
                margin = "" if found["margin"] is None else f", margin {found['margin']:.5f}"
                told.append(
                    f"{_without_folders(variant['name'])}, {answer['prompt']}: token {found['position'] + 1}{margin}"
                )
    return [f"Differences from plain: {'; '.join(told)}."] if told else []


def render_runs(data: dict[str, Any]) -> str:
    """What bench/gpu_smoke.py wrote."""
    rows = [
        [
            run["dtype"],
            run["setting"],
            run["drafter"],
            f"{run['tokens_per_second']:.0f}",
            f"{run['tokens_per_forward']:.2f}",
            f"{run['identical_to_plain']} of {run['prompts']}",
        ]
        for run in data["runs"]
    ]
    heads = ["dtype", "sampling", "drafter", "tokens/s", "tokens per forward", "same text as plain"]
    agrees = "the same bits as" if data["noise_agrees_with_cpu"] else "NOT the same bits as"
    versions = data["versions"]
    note = (
        f"{data['machine']}; the noise has {agrees} on a CPU; paceline {versions['paceline']}, "
        f"torch {versions['torch']}; {data['date']}."
    )
    return f"{table(heads, rows)}\n\n{note}"


def render_rows(data: dict[str, Any]) -> str:
    """What bench/host_overhead.py wrote."""
    rows = [
        [
            row["drafter"],
            f"{row['temperature']:g}",
            str(row["sequences"]),
            f"{row['step_us'] / 1000:.1f}",
            f"{row['token_us']:.0f}",
        ]
        for row in data["rows"]
    ]
    heads = ["drafter", "temperature", "sequences", "ms a round", "µs a token"]
    note = f"{_where(data)}; median of {data['steps']} rounds."
    return f"{table(heads, rows)}\n\n{note}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    marks = ["---" if place == 0 else "---:" for place in range(len(heads))]
    return "\n".join([line(heads), line(marks), *(line(row) for row in rows)])


def main(words: list[str]) -> int:
    check = words == ["--check"]
    if words and not check:
        print(__doc__)
        return 2
    stale = []
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = rewrite(old)
        if new != old:
            stale.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(new, encoding="utf-8")
    for name in stale:
        print(f"{name} {'is out of date' if check else 'was rewritten'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
