"""compare.png: tokens per second on the left, acceptance by draft position on the right. Reads `results`' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.page import FEW

Data = dict[str, Any]

# Okabe and Ito's palette, which people with any colour vision can tell apart; grey is plain decoding.
GREY = "#7f7f7f"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
MARKERS = "osD^vP"


def plot(data: Data, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = data["variants"]
    drafted = any(row["acceptance_by_position"] for row in rows)
    colours = [GREY, *(PALETTE[place % len(PALETTE)] for place in range(len(rows) - 1))]
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(
            1, 2 if drafted else 1, figsize=(10.5 if drafted else 5.5, 4.4), layout="constrained", squeeze=False
        )
        try:
            _plot_speed(axes[0, 0], rows, colours)
            if drafted:
                _plot_acceptance(axes[0, 1], rows, colours)
            figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
            figure.suptitle(title(data), fontsize=11, wrap=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


def title(data: Data) -> str:
    """What was measured where."""
    options, machine = data["options"], data["machine"]
    where = ", ".join(str(part) for part in (machine["gpu"], machine["cpu"], f"{machine['cores']} cores") if part)
    asked = f"{len(data['prompts'])} prompts, at most {options['max_tokens']} tokens each"
    return f"{Path(options['model']).name} on {where}\n{asked}, {options['batch_size']} at a time"


def _plot_speed(axis: Any, rows: list[Data], colours: list[str]) -> None:
    speeds = [row["tokens_per_second"] for row in rows]
    bars = axis.bar(range(len(speeds)), speeds, color=colours, width=0.62)
    for place, (row, bar) in enumerate(zip(rows, bars)):
        text = f"{speeds[place]:.1f}"
        if place:
            text += f"\n{row['speed_up']:.2f}×"
            found = row["speed_up_interval"]
            if found is not None:
                ends = [bound * speeds[0] for bound in found]
                axis.vlines(place, *ends, color="black", linewidth=1.2)
                axis.hlines(ends, place - 0.06, place + 0.06, color="black", linewidth=1.2)
        middle = bar.get_x() + bar.get_width() / 2
        ink = "white" if _is_dark(colours[place]) else "black"
        axis.text(middle, bar.get_height() / 2, text, ha="center", va="center", color=ink, weight="bold")
    axis.set_xticks(range(len(rows)), [_folded(row["label"]) for row in rows])
    axis.set_ylabel("tokens per second")
    axis.set_title("Speed, and how many times plain decoding (95% interval)", fontsize=11)
    highest = [speeds[0] * row["speed_up_interval"][1] for row in rows if row["speed_up_interval"]]
    axis.set_ylim(0, max([*speeds, *highest]) * 1.12)


def _folded(label: str) -> str:
    return label.replace(":", "\n").replace(",", "\n")


def _is_dark(colour: str) -> bool:
    """Whether white reads better on it than black, by the eye's weighting of red, green and blue."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _plot_acceptance(axis: Any, rows: list[Data], colours: list[str]) -> None:
    deepest, few = 1, False
    for place, row in enumerate(rows):
        look = {"color": colours[place], "marker": MARKERS[(place - 1) % len(MARKERS)]}
        shares, proposed = row["acceptance_by_position"], row["proposed_by_position"]
        if not shares:
            continue
        positions = range(1, len(shares) + 1)
        axis.plot(positions, shares, label=row["label"], linewidth=2, markersize=6, **look)
        rare = [position for position in positions if proposed[position - 1] < FEW * len(row["seconds"])]
        axis.plot(rare, [shares[position - 1] for position in rare], linestyle="", markerfacecolor="white", **look)
        deepest, few = max(deepest, len(shares)), few or bool(rare)
    step = 1 if deepest <= 16 else 5
    axis.set_xticks(range(1, deepest + 1, step))
    axis.set_ylim(0, 1.02)
    axis.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0%", "20%", "40%", "60%", "80%", "100%"])
    axis.grid(axis="y", color="#dddddd", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("accepted, of those proposed there")
    axis.set_title("Acceptance by draft position", fontsize=11)
    axis.legend(frameon=False, title=f"hollow: fewer than {FEW} drafts" if few else None, title_fontsize=9)
