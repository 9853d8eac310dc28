"""Figures in README and docs come from files: nobody types them.

A block stands between `<!-- figures: NAME -->` and `<!-- /figures -->` and shows bench/results/NAME.json; one of
`<!-- verdict: NAME -->` has its result in a sentence, one of `<!-- counts: NAME -->` what can be counted of it and does
not depend on the machine.
`python docs/pages.py` rewrites them all, next to the other blocks that come from files; this script does the same.
Knows the layouts of `paceline compare`, `paceline sweep` and of the scripts in bench/. Measures nothing, and rounds
only for reading.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
COUNTS = re.compile(r"(<!-- counts: ([\w.-]+) -->\n).*?(<!-- /counts -->)", re.DOTALL)
VERDICT = re.compile(r"(<!-- verdict: ([\w.-]+)(?: (\w+))? -->\n).*?(<!-- /verdict -->)", re.DOTALL)
MISSING = "*not measured yet*"
HOST = {
    "drafter": "{drafter}",
    "temperature": "{temperature:g}",
    "sequences": "{sequences}",
    "ms a round": "{step_ms:.1f}",
    "µs a token": "{token_us:.0f}",
}
ARITHMETIC = {"torch": "float32 (torch kernels)", "native": "packed (native kernels)"}


def rewrite(text: str, results: Path = RESULTS) -> str:
    """The page with every block of figures as its file has it now."""
    text = BLOCK.sub(lambda match: f"{match[1]}\n{render(match[2], results)}\n\n{match[3]}", text)
    text = COUNTS.sub(lambda match: f"{match[1]}\n{counts(_read(match[2], results))}\n\n{match[3]}", text)
    return VERDICT.sub(lambda match: f"{match[1]}\n> {verdict(match[2], match[3] or '', results)}\n\n{match[4]}", text)


def counts(data: dict[str, Any]) -> str:
    """Forwards, drafts and accepted ones of a comparison, and what they come to at a measured cost of a row."""
    rows = {row["figure"]: row["ratio"] for row in _read("cpu_peers")["figures"]["rows"]["rows"]}
    cost = (rows["8 rows"] - 1) / 7
    columns = {
        "variant": "{name}",
        "tokens per forward": "{tokens_per_forward:.2f}",
        "drafts per forward": "{drafts:.2f}",
        "drafts accepted": "{acceptance:.0%}",
        f"gain, if a draft costs {cost:.0%} of a forward": "{gain:.2f}×",
    }
    told = []
    for row in data["variants"][1:]:
        drafts = sum(row["proposed_by_position"]) / len(row["seconds"]) / row["forwards"]
        told.append({**row, "drafts": drafts, "gain": row["tokens_per_forward"] / (1 + cost * drafts)})
    return written(columns, told)


def verdict(name: str, kind: str = "", results: Path = RESULTS) -> str:
    """What a comparison found, in a sentence or two; `kind`: on the prompts whose names begin so."""
    from paceline.bench import report, sweep
    from paceline.bench.interval import Cost, estimate

    if not (results / f"{name}.json").is_file():
        return MISSING
    data = _read(name, results)
    if not kind:
        return report.verdict(data)
    chosen = [place for place, prompt in enumerate(data["prompts"]) if prompt["name"].startswith(kind)]

    def cost(run: dict[str, Any]) -> Cost:
        spent = np.array(run["seconds"])[:, chosen]
        return Cost(spent, np.tile([float(len(run["token_ids"][place])) for place in chosen], (len(spent), 1)))

    found = {row["label"]: estimate(cost(data["default"]), cost(data[row["name"]])) for row in data["variants"][1:]}
    best = max(found, key=lambda label: found[label].value)
    return sweep.verdict(best, found[best])


def render(name: str, results: Path = RESULTS) -> str:
    """One results file as Markdown."""
    path = results / f"{name}.json"
    if not path.is_file():
        return MISSING
    data = _read(name, results)
    if "part" in data:
        return render_gpu(data)
    if "variants" in data:
        return render_measured(_completed(data))
    if "rows" in data:
        return render_rows(data)
    if "figures" in data:
        return render_peers(data)
    if "sides" in data:
        return render_perplexity(data)
    if "counts" in data:
        return render_counts(data)
    if "starts" in data:
        return render_starts(data)
    if "dtypes" in data:
        return render_dtypes(data)
    raise ValueError(f"{path.name} has none of the keys by which a layout is known")


def render_gpu(data: dict[str, Any]) -> str:
    """What bench/gpu.py wrote."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        tables, told = importlib.import_module("gpu_figures").render(data)
    finally:
        sys.path.pop(0)
    return "\n\n".join([*(table(*one) for one in tables), f"{told} {_where(data)}."])


def render_starts(data: dict[str, Any]) -> str:
    """What bench/startup.py wrote."""
    kinds = list(next(iter(data["starts"].values())))
    heads = ["seconds, least (median)", *kinds]
    shown = "{least:.2f} ({median:.2f})".format_map
    rows = [[name, *(shown(figures[kind]) for kind in kinds)] for name, figures in data["starts"].items()]
    named = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    low, high = data["load"]
    machine = f"{data['machine']['cpu']}, {data['machine']['cores']} cores, load {low:.1f} to {high:.1f}"
    count = len(next(iter(data["starts"].values()))["first"]["runs"])
    return f"{table(heads, rows)}\n\n{data['model']}, {count} runs of each in turn; {machine}; {named}."


def terminal(name: str) -> str:
    """What the terminal showed of a measured run: its command, and what that command's own code says of its results."""
    from rich.console import Console

    from paceline.cli import measuring

    data = _read(name)
    console = Console(file=io.StringIO(), width=80, color_system=None)
    folder = Path(data["options"]["output"])
    measuring.show(data, False, [folder / file for file in measuring.FILES], console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([f"$ {data['command']}", *lines[1:]]) + "\n"


def drawn(name: str, run: str) -> dict[str, str]:
    """The picture and the report of a run, by their places in docs/."""
    from paceline.bench import page

    data = _read(run)
    return {f"images/{name}.svg": page.draw(data), f"{name}.html": page.render(data)}


def _read(name: str, results: Path = RESULTS) -> Any:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def render_peers(data: dict[str, Any]) -> str:
    """What bench/cpu_peers.py wrote: the figures that have something to reach, reached or not."""
    reach = _reach(next(iter(data["figures"].values()))["command"])
    rows = []
    for row in (row for figure in data["figures"].values() for row in figure["rows"]):
        sign, wanted = reach.get(f"{row['figure']} / {row['against']}", ("", None))
        if wanted is not None and row["ratio"] is not None:
            there = row["ratio"] >= wanted if sign == "≥" else row["ratio"] <= wanted
            figures = [f"{value:.4g} {row['unit']}" for value in (row["ours"], row["peer"])]
            named = f"{row['against']} ({row['note']})" if row["note"] else row["against"]
            ratio = f"{row['ratio']:.2f}×" if there else f"**{row['ratio']:.2f}×**"
            rows.append([row["figure"], figures[0], named, figures[1], ratio, f"{sign} {wanted:g}"])
    first = next(iter(data["figures"].values()))
    named = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    told = f"{data['machine']['cpu']}, {data['threads']} threads; {named}. Bold: not reached."
    heads = ["figure", "paceline", "against", "theirs", "ratio", "wanted"]
    return f"{table(heads, rows)}\n\n{told}\n\n{_profile(data['figures'])}"


def _profile(figures: dict[str, Any]) -> str:
    """Where the time of the speculative figures went, and what the best a drafter could do is."""
    parts, limits = [], []
    for name in ("speculative-small", "speculative-large"):
        for category, found in figures.get(name, {}).get("raw", {}).items():
            where = f"{name.removeprefix('speculative-')}, {category}"
            runs = found["runs"]
            parts += [[where, way, *_parts(turns)] for way, turns in runs.items()]
            limits += [[where, way, *_limits(runs, way)] for way in runs if way != "plain" and _forwards(runs[way])]
    if not parts:
        return ""
    heads = ["prompts", "way", "of them", "reading", "decoding", "tokens", "per forward", "tokens per forward"]
    heads += ["drafts per forward"]
    bounds = ["prompts", "way", "decoding alone", "if drafts cost nothing", "with reading", "if drafts cost nothing"]
    bounds += ["reading, share of a tenth of transformers' time"]
    told = "What speculation gained over plain, and what it would if checking drafts took no time at all:"
    paragraphs = ["The same runs in their parts:", table(heads, parts), _far(figures), told, table(bounds, limits)]
    return "\n\n".join(filter(None, paragraphs))


def _far(figures: dict[str, Any]) -> str:
    """What drafts cost as far into a text as those prompts reach."""
    rows = [row for row in figures.get("rows", {}).get("rows", []) if " after " in row["figure"]]
    costs = ", ".join(f"{row['figure']} {row['ratio']:.2f}×" for row in rows)
    return f"What a forward with drafts costs there, against one row: {costs}." if rows else ""


def _seconds(turns: list[list[dict[str, Any]]], limit: int | None = None) -> tuple[float, float]:
    """Reading and decoding, each summed over the first `limit` prompts: the median over turns."""
    first, rest = ([sum(a[key] for a in turn[:limit]) for turn in turns] for key in ("first", "rest"))
    return statistics.median(first), statistics.median(rest)


def _forwards(turns: list[list[dict[str, Any]]]) -> int:
    """Forwards that decoded; the first of each answer belongs to reading its prompt. 0: the way does not tell."""
    return max(0, sum(answer.get("rounds", 0) for answer in turns[0]) - len(turns[0]))


def _parts(turns: list[list[dict[str, Any]]]) -> list[str]:
    reading, decoding = _seconds(turns)
    tokens, forwards = sum(len(answer["tokens"]) for answer in turns[0]), _forwards(turns)
    told = ["", "", ""]
    if forwards:
        drafts = sum(answer["proposed"] for answer in turns[0])
        told = [
            f"{1e3 * decoding / forwards:.1f} ms",
            f"{(tokens - len(turns[0])) / forwards:.2f}",
            f"{drafts / forwards:.2f}",
        ]
    return [str(len(turns[0])), f"{reading:.2f} s", f"{decoding:.2f} s", str(tokens), *told]


def _limits(runs: dict[str, list[list[dict[str, Any]]]], way: str) -> list[str]:
    reading, decoding = _seconds(runs[way])
    plain = _seconds(runs["plain"])
    fewer = max(1, _forwards(runs["plain"])) / max(1, _forwards(runs[way]))  # forwards saved: all decoding can gain
    told = [plain[1] / decoding, fewer, sum(plain) / (reading + decoding), sum(plain) / (plain[0] + plain[1] / fewer)]
    share = "–"
    if "transformers" in runs:
        count = len(runs["transformers"][0])
        share = f"{_seconds(runs[way], count)[0] / (sum(_seconds(runs['transformers'])) / 10):.0%}"
    return [*(f"{value:.2f}×" for value in told), share]


def _reach(command: str) -> dict[str, tuple[str, float]]:
    sys.path.insert(0, str(ROOT / "bench"))  # where a script finds its neighbours
    try:
        found: dict[str, tuple[str, float]] = importlib.import_module("cpu_peers").reach_of(command)
    finally:
        sys.path.pop(0)
    return found


def render_counts(data: dict[str, Any]) -> str:
    """What bench/same_tokens.py wrote."""
    heads, rows = ["kernels", "the same texts", "tokens before a difference", "agreed, token by token"], []
    for kernels, told in data["counts"].items():
        total = told["total"]
        counts = (("same_texts", "prompts"), ("same_tokens", "tokens"), ("agreed", "tokens"))
        rows.append([kernels, *(f"{total[part]} of {total[whole]}" for part, whole in counts)])
    peer = f"transformers {data['peer_versions']['transformers']}"
    return f"{table(heads, rows)}\n\n{data['model']} against {peer}; prompts of {data['prompt']} tokens."


def render_perplexity(data: dict[str, Any]) -> str:
    """What bench/perplexity.py wrote."""
    rows = [
        [ARITHMETIC.get(side, side), f"{told['perplexity']:.4f}", f"{told['ratio']:.5f}"]
        for side, told in data["sides"].items()
        if told["ratio"] is not None
    ]
    predicted = sum(size - 1 for size in data["chunk_sizes"])
    told = f"{data['model']}, {predicted} tokens of a fixed text in chunks of at most {max(data['chunk_sizes'])}."
    return f"{table(['arithmetic', 'perplexity', 'over float32'], rows)}\n\n{told}"


def render_measured(data: dict[str, Any]) -> str:
    """What `paceline compare` or `paceline sweep` wrote."""
    from paceline.bench import page, report

    swept = data["kind"] == "sweep"
    columns = report.columns(data)
    heads = ["draft length" if swept else "variant", *(column.head for column in columns)]
    names = [report.first_cell(data, row) if swept else _without_folders(row["name"]) for row in data["variants"]]
    rows = [[name, *(column.cell(row) for column in columns)] for name, row in zip(names, data["variants"])]
    said = [data["best"]["verdict"]] if "best" in data else []
    told = f"{_without_folders(data['options']['model'])}: {page.asked(data)}. {_where(data)}."
    if data["variants"][0].get("forward_speed_up") and report.is_disturbed(data):
        told += " Other programs ran at the same time: every tokens/s is lower than it would be alone."
    differences = [f"Not plain's text: {_without_folders(note)}." for note in report.differences(data)]
    return "\n\n".join([table(heads, rows), *said, told, *differences])


def _completed(data: dict[str, Any]) -> dict[str, Any]:
    """A comparison recorded before it had intervals, in today's layout."""
    for row in data["variants"]:
        for name, value in (("draft_length", None), ("speed_up_interval", None), ("answered", len(data["prompts"]))):
            row.setdefault(name, value)
    return {"kind": "compare", **data}


def _without_folders(name: str) -> str:
    """A model or drafter by its last name: where it lay on one machine says nothing to a reader."""
    return re.sub(r"[^\s:=,]*/", "", name)


def _where(data: dict[str, Any]) -> str:
    """Machine, versions and day."""
    machine, versions = data["machine"], data["versions"]
    parts = (machine.get("gpu"), machine["cpu"], f"{machine['cores']} cores")
    told = ", ".join(str(part) for part in parts if part)
    return f"{told}; paceline {versions['paceline']}, torch {versions['torch']}; {data['date'][:10]}"


def render_rows(data: dict[str, Any]) -> str:
    """What bench/host_overhead.py wrote."""
    rows = [{**row, "step_ms": row["step_us"] / 1000} for row in data["rows"]]
    return f"{written(HOST, rows)}\n\n{_where(data)}; median of {data['steps']} rounds."


def written(columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """A table by heads and how each cell is written."""
    return table(list(columns), [[form.format(**row) for form in columns.values()] for row in rows])


def render_dtypes(data: dict[str, Any]) -> str:
    """What bench/cpu_dtypes.py wrote: a line a side, in brackets what another checkout gave in the same turns."""
    sides = {(row["when"], row["weights"], row["dtype"]): row for row in data["dtypes"]}
    forms = {"decode": "{:.1f}", "prefill": "{:.0f}", "rows": "{:.2f}×"}
    lines = []
    for weights, asked in [side[1:] for side in sides if side[0] == "now"]:
        both = [sides[when, weights, asked] for when in ("now", "before") if (when, weights, asked) in sides]
        told = [[form.format(statistics.median(row[name])) for name, form in forms.items()] for row in both]
        cells = zip(*([*figures, row["kernels"]] for figures, row in zip(told, both)))
        lines.append([weights, asked, *(now + "".join(f" ({other})" for other in before) for now, *before in cells)])
    heads = ["weights", "`dtype`", "decode, tokens/s", "prefill, tokens/s", "6 rows against one", "kernels"]
    turns = len(data["dtypes"][0]["decode"])
    return f"{table(heads, lines)}\n\n{_where(data)}; one thread, medians of {turns} turns."


def table(heads: list[str], rows: Iterable[list[str]], mark: str = "---:") -> str:
    """In Markdown; `mark` aligns all columns but the first."""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    marks = ["---", *[mark] * (len(heads) - 1)]
    return "\n".join([line(heads), line(marks), *(line(row) for row in rows)])


if __name__ == "__main__":
    import pages

    raise SystemExit(pages.main(sys.argv[1:]))
