"""A comparison as a table, footnotes, a coloured answer, a JSON file and a picture. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.bench.compare import PLAIN, Comparison, Measured, Pass
from paceline.engine.sequence import Provenance
from paceline.outputs import CompletionOutput

# Okabe and Ito's palette, which people with any colour vision can tell apart; grey is plain decoding.
GREY = "#7f7f7f"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = "osD^vP"
STYLES = {"accepted": "bold green", "corrected": "yellow", "bonus": "cyan", "plain": "default"}
MEANINGS = {
    "accepted": "drafted and accepted",
    "corrected": "the target's own, where the draft was wrong",
    "bonus": "the target's own, after a draft accepted whole",
    "plain": "no draft",
}
FEW = 10  # a share of fewer drafts than these says little
MAX_SHOWN = 120  # tokens of an answer worth showing


def labels(result: Comparison) -> list[str]:
    """Variants' names, short where that says enough: the word before the options, unless two share it."""
    names = [measured.variant.name for measured in result.measured]
    words = [Path(name.partition(":")[0]).name for name in names]
    full = [name.replace(":", "\n").replace(",", "\n") for name in names]
    return [word if words.count(word) == 1 else long for word, long in zip(words, full)]


def table(result: Comparison) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    shown.add_column("variant", overflow="fold")
    for name in ("time", "tokens/s", "speed-up", "tokens per\nforward", "acceptance", "identical"):
        shown.add_column(name, justify="right", no_wrap=True)
    total = len(result.plan.prompts)
    for measured, label in zip(result.measured, labels(result)):
        stats, same = measured.stats, result.num_identical(measured)
        shown.add_row(
            Text(label),
            f"{measured.seconds:.2f} s",
            f"{measured.tokens_per_second:.1f}",
            f"{result.speed_up(measured):.2f}×",
            f"{stats.tokens_per_forward:.2f}",
            f"{stats.acceptance:.0%}" if sum(stats.proposed) else "–",
            Text(f"{same}/{total}", style="" if same == total else "bold yellow"),
        )
    return shown


def footnotes(result: Comparison) -> list[str]:
    """One sentence a difference, then what a margin is."""
    notes = []
    for measured in result.measured:
        for found in measured.differences:
            margin = "" if found.margin is None else f", margin {found.margin:.5f}"
            name = result.plan.names[found.prompt]
            notes.append(f"{measured.variant.name}, {name}: differs from token {found.position + 1} on{margin}")
    if any(found.margin is not None for measured in result.measured for found in measured.differences):
        notes.append(
            "margin: how far apart the target's two likeliest tokens were there (log-probability); close to 0 it is a "
            "tie that rounding decided, since the matrix products in use round differently for more rows"
        )
    return notes


def record(result: Comparison) -> dict[str, Any]:
    """The comparison as plain data."""
    names = result.plan.names
    return {
        "interrupted": result.interrupted,
        "prompts": [
            {"name": name, "text": prompt.text, "tokens": len(prompt.ids)}
            for name, prompt in zip(names, result.plan.prompts)
        ],
        "variants": [_record_variant(result, measured) for measured in result.measured],
    }


def _record_variant(result: Comparison, measured: Measured) -> dict[str, Any]:
    stats = measured.stats
    differing = {found.prompt: found for found in measured.differences}
    config = measured.variant.drafter
    return {
        "name": measured.variant.name,
        "drafter": None if config is None else repr(config),
        "seconds": [done.seconds for done in measured.passes],
        "median_seconds": measured.seconds,
        "tokens": measured.passes[0].tokens,
        "tokens_per_second": measured.tokens_per_second,
        "speed_up": result.speed_up(measured),
        "tokens_per_forward": stats.tokens_per_forward,
        "acceptance": stats.acceptance if sum(stats.proposed) else None,
        "acceptance_by_position": stats.acceptance_by_position,
        "proposed_by_position": stats.proposed,
        "draft_seconds": [done.draft_seconds for done in measured.passes],
        "verify_seconds": [done.verify_seconds for done in measured.passes],
        "rest_seconds": [done.rest_seconds for done in measured.passes],
        "identical": result.num_identical(measured),
        "answers": [
            {
                "prompt": name,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "identical": number not in differing,
                "difference": _record_difference(differing.get(number)),
            }
            for number, (name, output) in enumerate(zip(result.plan.names, measured.passes[0].outputs))
        ],
    }


def _record_difference(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    names = ("round", "position", "expected", "got", "margin")
    return {name: getattr(found, name) for name in names}


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# The answer in colours


def choose_answer(result: Comparison) -> tuple[Measured, int] | None:
    """The variant and prompt that show drafting best: identical to plain, not long, most tokens from drafts."""
    best: tuple[float, Measured, int] | None = None
    for measured in result.measured[1:]:
        differing = {found.prompt for found in measured.differences}
        for number, output in enumerate(measured.passes[0].outputs):
            count = len(output.token_ids)
            accepted = sum(told.kind == "accepted" for told in output.provenance)
            share = accepted / count if count else 0.0
            if number not in differing and accepted and count <= MAX_SHOWN and (best is None or share > best[0]):
                best = (share, measured, number)
    return None if best is None else best[1:]


def answer(result: Comparison, tokenizer: Any) -> Text | None:
    """One answer, every token in the colour of where it came from; None when there is none to show."""
    chosen = choose_answer(result)
    if chosen is None or tokenizer is None:
        return None
    measured, number = chosen
    output = measured.passes[0].outputs[number]
    told = output.provenance
    shown = Text()
    name = labels(result)[result.measured.index(measured)].replace("\n", " ")
    shown.append(f"{result.plan.names[number]}, {name}: ", style="bold")
    shown.append(f"{len(output.token_ids)} tokens in {output.stats.rounds} forwards, the same text as plain\n\n")
    shown.append_text(colour(output, tokenizer))
    shown.append("\n")
    for kind in (kind for kind in MEANINGS if any(item.kind == kind for item in told)):
        shown.append("\n■ ", style=STYLES[kind])
        shown.append(MEANINGS[kind], style="dim")
    return shown


def colour(output: CompletionOutput, tokenizer: Any) -> Text:
    """The answer's text, piece by piece. A character that took several tokens has the last one's colour."""
    shown = Text()
    for text, told in _pieces(output.token_ids, output.provenance, tokenizer):
        shown.append(text, style=STYLES[told.kind])
    return shown


def _pieces(ids: list[int], provenance: Sequence[Provenance], tokenizer: Any) -> list[tuple[str, Provenance]]:
    pieces, before = [], ""
    for count, told in enumerate(provenance, start=1):
        text = str(tokenizer.decode(ids[:count], skip_special_tokens=True))
        if count < len(ids) and text.endswith("\ufffd"):
            continue  # half a character: wait for the rest of it
        pieces.append((text[len(before) :], told))
        before = text
    return pieces


# The picture


def plot(result: Comparison, path: Path, title: str) -> None:
    """Tokens per second on the left, acceptance by draft position on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drafted = any(sum(measured.stats.proposed) for measured in result.measured)
    names = labels(result)
    colours = [GREY if m.variant.name == PLAIN else PALETTE[(i - 1) % 6] for i, m in enumerate(result.measured)]
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            1, 2 if drafted else 1, figsize=(10.5 if drafted else 5.5, 4.4), layout="constrained", squeeze=False
        )
        try:
            _plot_speed(axes[0, 0], result, names, colours)
            if drafted:
                _plot_acceptance(axes[0, 1], result, names, colours)
            figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
            figure.suptitle(title, fontsize=11, wrap=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


def _plot_speed(axis: Any, result: Comparison, names: list[str], colours: list[str]) -> None:
    speeds = [measured.tokens_per_second for measured in result.measured]
    bars = axis.bar(range(len(speeds)), speeds, color=colours, width=0.62)
    for place, (measured, bar) in enumerate(zip(result.measured, bars)):
        passes = [_speed(done) for done in measured.passes]
        if len(passes) > 1:
            spread = [[speeds[place] - min(passes)], [max(passes) - speeds[place]]]
            axis.errorbar(place, speeds[place], yerr=spread, color="black", linewidth=1, capsize=3)
        text = f"{speeds[place]:.1f}" if place == 0 else f"{speeds[place]:.1f}\n{result.speed_up(measured):.2f}×"
        middle = bar.get_x() + bar.get_width() / 2
        ink = "white" if _is_dark(colours[place]) else "black"
        axis.text(middle, bar.get_height() / 2, text, ha="center", va="center", color=ink, weight="bold")
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("tokens per second")
    axis.set_title("Speed, and how many times plain decoding", fontsize=11)
    axis.set_ylim(0, max(speeds) * 1.12)


def _is_dark(colour_: str) -> bool:
    """Whether white reads better on it than black, by the eye's weighting of red, green and blue."""
    red, green, blue = (int(colour_[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _speed(done: Pass) -> float:
    return done.tokens / done.seconds


def _plot_acceptance(axis: Any, result: Comparison, names: list[str], colours: list[str]) -> None:
    deepest, few = 1, False
    for place, (measured, name) in enumerate(zip(result.measured, names)):
        stats, look = measured.stats, {"color": colours[place], "marker": MARKERS[(place - 1) % len(MARKERS)]}
        shares = stats.acceptance_by_position
        if not shares:
            continue
        positions = range(1, len(shares) + 1)
        axis.plot(positions, shares, label=name.replace("\n", " "), linewidth=2, markersize=6, **look)
        rare = [position for position in positions if stats.proposed[position - 1] < FEW * len(measured.passes)]
        axis.plot(rare, [shares[position - 1] for position in rare], linestyle="", markerfacecolor="white", **look)
        deepest, few = max(deepest, len(shares)), few or bool(rare)
    step = 1 if deepest <= 16 else 5
    axis.set_xticks(range(1, deepest + 1, step))
    axis.set_ylim(0, 1.02)
    axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"])
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("accepted, of those proposed there")
    axis.set_title("Acceptance by draft position", fontsize=11)
    axis.legend(frameon=False, title=f"hollow: fewer than {FEW} drafts" if few else None, title_fontsize=9)
