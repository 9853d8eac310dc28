"""A measurement in the terminal: its table, acceptance by position, what is said below them, an answer in colours.

Reads the layout of `results` alone. Measures nothing, writes no file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline.bench import sweep
from paceline.bench.interval import Estimate
from paceline.pieces import MEANINGS, STYLES, readable

Data = dict[str, Any]
IN_A_ROW = 10  # positions; with a name of twenty letters before them they fit into eighty
BUSY = 1.1  # a forward that checks drafts takes no less time than one that does not; noise may make it seem so
UNSTEADY = 1.5  # the slowest round of plain decoding over the fastest
ENOUGH = 8  # prompts; an interval from fewer is not to be trusted far


@dataclass(frozen=True)
class Column:
    """A figure of each variant: its head where there is room and where there is none, and how it is written."""

    head: str
    narrow: str
    cell: Callable[[Data], str]


COLUMNS = {
    "time": Column("time", "time", lambda row: f"{row['median_seconds']:.2f} s"),
    "rate": Column("tokens/s", "tokens\n/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    "speed-up": Column("speed-up in time", "speed-up\nin time", lambda row: f"{row['speed_up']:.2f}×"),
    "interval": Column("95% interval", "95%\ninterval", lambda row: bounds(row["speed_up_interval"])),
    "in forwards": Column("speed-up in forwards", "in\nforwards", lambda row: f"{row['forward_speed_up']:.2f}×"),
    "per forward": Column("tokens per forward", "tokens/\nforward", lambda row: f"{row['tokens_per_forward']:.2f}"),
    "accepted": Column("drafts accepted", "drafts\naccepted", lambda row: share(row["acceptance"])),
    "repeated": Column("repeated 4\u2011grams", "repeated\n4-grams", lambda row: share(row["repeated_4grams"])),
    "same": Column("same text as plain", "same\ntext", lambda row: f"{row['identical']}/{row['answered']}"),
}
LEFT_OUT = {"compare": ("in forwards", "repeated"), "sweep": ("per forward",)}  # where a table has to be narrow


def columns(data: Data) -> list[Column]:
    """Those of a narrow table."""
    return [column for name, column in COLUMNS.items() if name not in LEFT_OUT[data["kind"]]]


def table(data: Data) -> Table:
    """A row a variant, the best of a sweep in bold; where not all text is plain's, that figure stands out."""
    shown = _new_table("draft\nlength" if data["kind"] == "sweep" else "variant", *(c.narrow for c in columns(data)))
    for row in data["variants"]:
        *cells, same = (Text(column.cell(row)) for column in columns(data))
        if row["identical"] != row["answered"]:
            same.stylize("bold yellow")
        shown.add_row(Text(first_cell(data, row)), *cells, same, style="bold" if is_best(data, row) else "")
    return shown


def first_cell(data: Data, row: Data) -> str:
    """What a row is called: of a sweep, by its draft length."""
    swept = data["kind"] == "sweep" and row["draft_length"] is not None
    return str(row["draft_length"]) if swept else str(row["label"])


def is_best(data: Data, row: Data) -> bool:
    return row["draft_length"] is not None and row["draft_length"] == data.get("best", {}).get("draft_length")


def _new_table(*heads: str) -> Table:
    """Tight, so that eighty characters hold eleven columns."""
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    for place, head in enumerate(heads):
        if place:
            shown.add_column(head, justify="right", no_wrap=True)
        else:
            shown.add_column(head, overflow="fold", min_width=max(map(len, head.splitlines())))
    return shown


def bounds(found: list[float] | None) -> str:
    return "–" if found is None else f"{found[0]:.2f}–{found[1]:.2f}"


def share(found: float | None) -> str:
    return "–" if found is None else f"{found:.0%}"


def positions(data: Data) -> Table | None:
    """Acceptance by position in the draft; None without a draft. Of a sweep, the longest drafts have them all."""
    rows = drafted(data)
    deepest = max((len(row["acceptance_by_position"]) for row in rows), default=0)
    if not deepest:
        return None
    shown = _new_table("drafts accepted\nat position", *map(str, range(1, min(deepest, IN_A_ROW) + 1)))
    for first in range(0, deepest, IN_A_ROW):
        last = min(deepest, first + IN_A_ROW)
        if first:  # a head of its own, below
            shown.add_row()
            shown.add_row("at position", *map(str, range(first + 1, last + 1)), style="bold")
        for row in rows:
            found = [f"{share:.0%}" for share in row["acceptance_by_position"][first:last]]
            if found:
                shown.add_row(Text(row["label"]), *found)
    return shown


def drafted(data: Data) -> list[Data]:
    """The variants whose acceptance by position is worth showing."""
    rows = [row for row in data["variants"] if row["acceptance_by_position"]]
    return rows[-1:] if data["kind"] == "sweep" else rows


def footnotes(data: Data) -> list[str]:
    """What a reader has to know beside the figures, a sentence each."""
    told = [row for row in data["variants"] if data["kind"] == "compare" and row["label"] not in row["name"]]
    notes = [f"{row['label']}: {row['name']}" for row in told]
    notes += [_interval_note(data)] if any(row["speed_up_interval"] for row in data["variants"]) else []
    if any(row.get("trees") for row in data["variants"]):
        notes.append("drafts accepted, of a tree: by its depth, not by its nodes, each of which is a row to compute")
    if data["kind"] == "sweep":
        notes.append(
            "repeated 4-grams: the share of runs of four tokens that stood in the same answer before; text that goes "
            "round in circles is easy to draft, and a speed-up on it says little"
        )
    if is_disturbed(data):
        notes.append(
            "the machine was busy with something else at times: plain decoding's own rounds differ widely, or more was "
            "gained in time than in forwards of the target, which drafting cannot do; measure again when it is quiet"
        )
    notes += differences(data)
    if data["interrupted"]:
        notes.append("interrupted: complete passes are counted" + _cut(data))
    return notes


def is_disturbed(data: Data) -> bool:
    """Whether something else ran on the machine at times."""
    plain, gains = (
        data["variants"][0]["seconds"],
        (row["speed_up"] / row["forward_speed_up"] for row in data["variants"]),
    )
    return bool(max(plain) > UNSTEADY * min(plain) or max(gains) > BUSY)


def _interval_note(data: Data) -> str:
    prompts, rounds = len(data["prompts"]), max(len(row["seconds"]) for row in data["variants"])
    said = f"95% intervals: paired bootstrap over {count(prompts, 'prompt')} and {count(rounds, 'round')}"
    said += f", {data['interval']['resamples']} resamples"
    return said if prompts >= ENOUGH else f"{said}; so few prompts say little about others"


def count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _cut(data: Data) -> str:
    """Which variant had only some answers."""
    total = len(data["prompts"])
    cut = [
        f"of {row['label']} the {row['answered']} of {total} answers" for row in data["variants"] if not row["complete"]
    ]
    return f", and {', '.join(cut)} that were ready" if cut else ""


def differences(data: Data) -> list[str]:
    """One sentence a difference, then what a margin is."""
    notes, margins = [], False
    for row in data["variants"]:
        for answer in row["answers"]:
            found = answer["difference"]
            if found is not None:
                margin = "" if found["margin"] is None else f", margin {found['margin']:.5f}"
                margins = margins or bool(margin)
                notes.append(
                    f"{row['name']}, {answer['prompt']}: differs from token {found['position'] + 1} on{margin}"
                )
    if margins:
        notes.append(
            "margin: how far apart the target's two likeliest tokens were there (log-probability); close to 0 it is a "
            "tie that rounding decided, since the matrix products in use round differently for more rows"
        )
    return notes


def verdict(data: Data) -> str:
    """The result in a sentence or two."""
    rows = data["variants"]
    if data["kind"] == "sweep" and "best" in data:
        said = str(data["best"]["verdict"])
    elif len(rows) == 1:
        said = "Only plain decoding was measured."
    else:
        best = max(rows[1:], key=lambda row: float(row["speed_up"]))
        said = sweep.verdict(best["label"], Estimate(best["speed_up"], *(best["speed_up_interval"] or ())))
    return f"{said} {_same_text(rows)}".strip()


def _same_text(rows: list[Data]) -> str:
    total, same = (sum(row[name] for row in rows[1:]) for name in ("answered", "identical"))
    if not total:
        return ""
    if same == total:
        return (
            f"All {total} answers with drafts are plain's, token for token." if total > 1 else "The answer is plain's."
        )
    return f"{same} of {total} answers with drafts are plain's, token for token."


def answer(shown: Data) -> Group:
    """One answer, every token in the colour of where it came from, and what the colours mean."""
    head = Text()
    head.append(f"{shown['prompt']}, {shown['variant']}: ", style="bold")
    head.append(f"{shown['tokens']} tokens in {shown['forwards']} forwards, the same text as plain\n")
    text = Text()
    for piece, kind, _ in shown["pieces"]:
        text.append(readable(piece), style=STYLES[kind])
    text.append(" …\n" if shown["cut"] else "\n")
    legend = Text()
    for kind in (kind for kind in MEANINGS if any(piece[1] == kind for piece in shown["pieces"])):
        legend.append("■ abc ", style=STYLES[kind])
        legend.append(f"{MEANINGS[kind]}\n", style="dim")
    return Group(head, text, legend)
