"""Figures in README and docs come from files: nobody types them.

A block stands between `<!-- figures: NAME -->` and `<!-- /figures -->` and shows bench/results/NAME.json.
`python docs/pages.py` rewrites them all, next to the other blocks that come from files; this script does the same.
Knows the layouts of `paceline compare`, `paceline sweep` and of the scripts in bench/. Measures nothing, and rounds
only for reading.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures: ([\w.-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
MISSING = "*not measured yet*"
ARITHMETIC = {"torch": "float32 (torch kernels)", "native": "packed (native kernels)"}


def rewrite(text: str, results: Path = RESULTS) -> str:
    """The page with every block of figures as its file has it now."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{render(match[2], results)}\n\n{match[3]}", text)


def render(name: str, results: Path = RESULTS) -> str:
    """One results file as Markdown."""
    path = results / f"{name}.json"
    if not path.is_file():
        return MISSING
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("kind") == "sweep":
        return render_sweep(data)
    if "variants" in data:
        return render_compare(data)
    if "runs" in data:
        return render_runs(data)
    if "rows" in data:
        return render_captured(data) if "replayed_ms" in data["rows"][0] else render_rows(data)
    if "figures" in data:
        return render_peers(data)
    if "sides" in data:
        return render_perplexity(data)
    raise ValueError(f"{path.name} has none of variants, runs, rows, figures, sides: its layout is not known here")


def render_peers(data: dict[str, Any]) -> str:
    """What bench/cpu_peers.py wrote: the figures that have something to reach, reached or not."""
    reach = _reach()
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


def _reach() -> dict[str, tuple[str, float]]:
    spec = importlib.util.spec_from_file_location("cpu_peers", ROOT / "bench" / "cpu_peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_peers"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    found: dict[str, tuple[str, float]] = module.REACH
    return found


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


def render_compare(data: dict[str, Any]) -> str:
    """What `paceline compare` wrote, today or before it had intervals."""
    prompts = len(data["prompts"])
    rows = [
        [
            _without_folders(variant["name"]),
            f"{variant['tokens_per_second']:.1f}",
            _speed_up(variant),
            f"{variant['tokens_per_forward']:.2f}",
            _share(variant["acceptance"]),
            f"{variant['identical']} of {variant.get('answered', prompts)}",
        ]
        for variant in data["variants"]
    ]
    heads = ["variant", "tokens/s", "speed-up", "tokens per forward", "drafts accepted", "same text as plain"]
    parts = [table(heads, rows), _describe(data, prompts, data["options"]), *_differences(data)]
    return "\n\n".join(parts)


def render_sweep(data: dict[str, Any]) -> str:
    """What `paceline sweep` wrote."""
    rows = [
        [
            "plain" if variant["draft_length"] is None else str(variant["draft_length"]),
            f"{variant['tokens_per_second']:.1f}",
            _speed_up(variant),
            f"{variant['forward_speed_up']:.2f}×",
            _share(variant["acceptance"]),
            _share(variant["repeated_4grams"]),
            f"{variant['identical']} of {variant['answered']}",
        ]
        for variant in data["variants"]
    ]
    heads = ["draft length", "tokens/s", "speed-up in time", "speed-up in forwards", "drafts accepted"]
    heads += ["repeated 4-grams", "same text as plain"]
    said = [data["best"]["verdict"]] if "best" in data else []
    described = _describe(data, len(data["prompts"]), data["options"])
    return "\n\n".join([table(heads, rows), *said, described, *_differences(data)])


def _speed_up(variant: dict[str, Any]) -> str:
    bounds = variant.get("speed_up_interval")
    return f"{variant['speed_up']:.2f}×" + (f" ({bounds[0]:.2f}–{bounds[1]:.2f})" if bounds else "")


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _without_folders(name: str) -> str:
    """A model or drafter by its last name: where it lay on one machine says nothing to a reader."""
    return re.sub(r"[^\s:=,]*/", "", name)


def _describe(data: dict[str, Any], prompts: int, options: dict[str, Any]) -> str:
    """What was measured where."""
    passes = max(len(variant["seconds"]) for variant in data["variants"])
    often = "measured once" if passes == 1 else f"median of {passes} rounds"
    cut = "; interrupted, so only complete passes count" if data.get("interrupted") else ""
    sure = ""
    if any(variant.get("speed_up_interval") for variant in data["variants"]):
        sure = f" In brackets: 95% intervals, {data['interval']['resamples']} resamples of prompts and rounds."
    return (
        f"{_without_folders(options['model'])}, {prompts} prompts, at most {options['max_tokens']} tokens each, "
        f"{options['batch_size']} at a time, temperature {options['temperature']:g}, {often}{cut}. "
        f"{_where(data)}.{sure}"
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


def render_captured(data: dict[str, Any]) -> str:
    """What bench/gpu_rounds.py wrote."""
    rows = [
        [
            row["drafter"],
            str(row["batch"]),
            f"{row['temperature']:g}",
            f"{row['rounds_equal']} of {row['rounds']}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['launched_ms']:.1f}",
            f"{row['replayed_ms']:.1f}",
        ]
        for row in data["rows"]
    ]
    heads = ["drafter", "sequences", "temperature", "rounds equal", "tokens a round", "ms launched", "ms replayed"]
    machine, versions = data["machine"], data["versions"]
    where = f"{machine['gpu']}; paceline {versions['paceline']}, torch {versions['torch']}; {data['date'][:10]}."
    return f"{table(heads, rows)}\n\n{where}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    marks = ["---" if place == 0 else "---:" for place in range(len(heads))]
    return "\n".join([line(heads), line(marks), *(line(row) for row in rows)])


if __name__ == "__main__":
    import pages

    raise SystemExit(pages.main(sys.argv[1:]))
