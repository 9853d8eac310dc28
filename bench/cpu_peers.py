"""paceline on a CPU beside llama.cpp and transformers: the same files, the same tokens, runs in turn.

    python bench/cpu_peers.py [--only decode-small rows …] [--repeat 7] [--peer-python PATH] [--dataset-path FILE …]
    python bench/cpu_peers.py --small gemma3-270m --only decode-small prefill --output cpu_peers_gemma.json

Every side is a process of its own that is kept open and asked in JSON lines, so that runs alternate (A B A B) on one
machine state. llama.cpp is measured through llama-cpp-python, or xllamacpp where that is missing (`pip install
xllamacpp`: no compiler, answers only), in --peer-python where this one has neither; a peer that cannot be imported is
reported as "not installed". --small and --large take any model: a name from `paceline models`, a .gguf file, a folder
(which llama.cpp does not read). --dataset-path: rows with `turns` are asked of the small
model (by category, Spec-Bench's form), rows with `prompt` of the large one (HumanEval's form); without any, built-in
prompts. Prints a table; all raw times go to bench/results/cpu_peers.json.

With --only, figures measured before stay in the file; each carries the command and the revision it was measured with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpu_speculation import ALONE, CATEGORIES, LOOKUP, SLOW_REPEATS, speculate
from peer_processes import QUICK, Answer, Bench, Peer, PeerError, Row, Sizes, clock, in_turn, median, present

RESULTS = Path(__file__).resolve().parent / "results" / "cpu_peers.json"
FAR = "paceline, further"
WIDTH = 140  # of the table, at least
# What each ratio should reach, by the figure's name in the table: ("≥" or "≤", number).
REACH: dict[str, tuple[str, float]] = {
    "decode, small / llama.cpp": ("≥", 1.5),
    "decode, large / llama.cpp": ("≥", 1.2),
    "prefill, small / llama.cpp": ("≥", 1.2),
    "4 rows / 1 row": ("≤", 1.4),
    "8 rows / 1 row": ("≤", 2.0),
    "16 rows / 1 row": ("≤", 3.3),
    **{
        f"{where}: best{added} / {peer}": ("≥", wanted)
        for where, than_plain in (*((f"small, {category}", 1.5) for category in CATEGORIES), ("large, humaneval", 1.3))
        for added in ("", ALONE)
        for peer, wanted in (("plain", than_plain), ("llama.cpp plain", 2.0), (f"transformers, lookup {LOOKUP}", 10.0))
    },
    "memory, small / file + cache": ("≤", 1.3),
    "memory, large / file + cache": ("≤", 1.3),
}


# The same where --small names another model: one that streams more bytes leaves less between two programs.
OTHERS: dict[str, tuple[str, float]] = {f"{what}, small / llama.cpp": ("≥", 1.3) for what in ("decode", "prefill")}


def reach_of(command: str) -> dict[str, tuple[str, float]]:
    """What a command's figures should reach."""
    return REACH | OTHERS if " --small " in command else REACH


def compare_speed(
    bench: Bench, name: str, model: str, sizes: tuple[int, int], seconds: Callable[[Answer], tuple[float, int]]
) -> dict[str, Any]:
    """The same prompt on both sides; `seconds` answers what to count: a time and a number of tokens."""
    prompt, new = sizes
    sides = bench.load(model, prompt + new, "llama.cpp")
    found = present(sides)
    ids = bench.prose(found["paceline"], prompt)
    runs = {kind: lambda p=peer: p("answers", prompts=[ids], new=new, stop=[])[0] for kind, peer in found.items()}
    taken = in_turn(bench.options.repeat, runs)
    speeds = {}
    for kind, answers in taken.items():
        speeds[kind] = median([count / spent for spent, count in map(seconds, answers)])
    missing = sides["llama.cpp"] if isinstance(sides["llama.cpp"], str) else ""
    row = Row(name, "tokens/s", speeds["paceline"], "llama.cpp", speeds.get("llama.cpp"), missing)
    same = [a["tokens"] == b["tokens"] for a, b in zip(taken["paceline"], taken.get("llama.cpp", []))]
    return {"rows": [row], "raw": taken, "same_tokens": same}


def decode(bench: Bench, size: str) -> dict[str, Any]:
    """Greedy tokens after a short prompt, the prompt's own time left out."""
    sizes = (bench.sizes.prompt, bench.sizes.new if size == "small" else bench.sizes.new_large)
    model = getattr(bench.options, size)
    return compare_speed(
        bench, f"decode, {size}", model, sizes, lambda answer: (answer["rest"], len(answer["tokens"]) - 1)
    )


def prefill(bench: Bench) -> dict[str, Any]:
    """From the request to its first token, a prompt of one batch."""
    count = bench.sizes.prefill
    sizes = (count, 1)
    return compare_speed(bench, "prefill, small", bench.options.small, sizes, lambda answer: (answer["first"], count))


def rows(bench: Bench) -> dict[str, Any]:
    """One forward over k rows against one row; ours also further into a text, as speculation meets it."""
    sizes = bench.sizes
    length = sizes.far + max(sizes.counts) + 1
    sides = bench.load(bench.options.small, length, "llama.cpp")
    found = present(sides)
    ids = bench.prose(found["paceline"], length - 1)

    def ask(peer: Peer, context: int) -> Any:
        asked = ids[: context + max(sizes.counts)]
        return peer("rows", ids=asked, context=context, counts=list(sizes.counts), runs=3)

    ways = {kind: (peer, sizes.context) for kind, peer in found.items()} | {FAR: (found["paceline"], sizes.far)}
    taken = in_turn(bench.options.repeat, {name: lambda way=way: ask(*way) for name, way in ways.items()})
    costs = {
        kind: {count: median([s for turn in turns for s in turn[str(count)]]) * 1e3 for count in sizes.counts}
        for kind, turns in taken.items()
    }
    ours, theirs, far = costs["paceline"], costs.get("llama.cpp"), costs[FAR]
    missing = sides["llama.cpp"] if isinstance(sides["llama.cpp"], str) else ""
    shown = [Row("1 row", "ms", ours[1], "llama.cpp", theirs and theirs[1], missing)]
    for count in sizes.counts[1:]:
        shown.append(Row(f"{count} rows", "ms", ours[count], "1 row", ours[1]))
        if theirs is not None:
            relative = ours[count] / ours[1], theirs[count] / theirs[1]
            shown.append(Row(f"{count} rows over 1", "×", relative[0], "llama.cpp", relative[1]))
        shown.append(Row(f"{count} rows after {sizes.far}", "ms", far[count], "1 row there", far[1]))
    return {"rows": shown, "raw": taken}


def memory(bench: Bench, size: str) -> dict[str, Any]:
    """The peak of a fresh process after one request, less what it had after its imports."""
    total, raw, about, ids = bench.sizes.total, {}, {}, []
    name, model = f"memory, {size}", getattr(bench.options, size)
    new = min(64, total // 4)
    missing = ""
    for kind in ("paceline", "llama.cpp"):
        raw[kind] = []
        try:
            for _ in range(1 if bench.options.quick else SLOW_REPEATS):
                with bench.fresh(kind) as peer:
                    before = peer("memory")
                    where = model if kind == "paceline" else about["path"]
                    extra = bench.options.llama_options if kind == "llama.cpp" else {}
                    told = peer("load", model=where, length=total, threads=bench.options.threads, **extra)
                    loaded = peer("memory")
                    about = about or told
                    ids = ids or bench.prose(peer, total - new)
                    peer("answers", prompts=[ids], new=new, stop=[])
                    raw[kind].append({"imported": before, "loaded": loaded, "answered": peer("memory")})
        except PeerError as error:
            if kind == "paceline":
                raise
            missing = str(error)
    grown = {k: median([r["answered"]["peak"] - r["imported"]["now"] for r in v]) / 1e6 for k, v in raw.items() if v}
    least = (about["file_bytes"] + total * about["cache_bytes_per_token"]) / 1e6
    shown = [
        Row(name, "MB", grown["paceline"], "file + cache", least),
        Row(name, "MB", grown["paceline"], "llama.cpp", grown.get("llama.cpp"), missing),
    ]
    return {"rows": shown, "raw": raw}


FIGURES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "decode-small": partial(decode, size="small"),
    "decode-large": partial(decode, size="large"),
    "prefill": prefill,
    "rows": rows,
    "speculative-small": partial(speculate, size="small"),
    "speculative-large": partial(speculate, size="large"),
    "memory-small": partial(memory, size="small"),
    "memory-large": partial(memory, size="large"),
}


def show(heads: list[str], rows: list[list[str]]) -> None:
    """A table on the terminal: the first and the last column are words."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for place, head in enumerate(heads):
        words = place in (0, len(heads) - 1)
        table.add_column(head, overflow="fold", justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, WIDTH)).print(table)


def cells(row: dict[str, Any], command: str) -> list[str]:
    sign, reach = reach_of(command).get(f"{row['figure']} / {row['against']}", ("", None))
    figures = [f"{value:.4g} {row['unit']}" if value is not None else "–" for value in (row["ours"], row["peer"])]
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    note = f"{row['against']} ({row['note']})" if row["note"] else row["against"]
    return [row["figure"], *figures, ratio, "–" if reach is None else f"{sign} {reach:g}", note]


def read_options(given: list[str] | None) -> argparse.Namespace:
    names = ", ".join(FIGURES)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NAME", help=names)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few tokens: whether it runs, not how fast")
    parser.add_argument("--peer-python", help="a Python that has llama_cpp")
    parser.add_argument("--dataset-path", type=Path, action="append", default=[])
    parser.add_argument("--num-prompts", type=int, help="a category")
    parser.add_argument("--small", default="smollm2-135m", metavar="MODEL", help="the small model: a name or a path")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", metavar="MODEL", help="the large one")
    parser.add_argument("--llama-options", type=json.loads, default={}, help='such as {"flash_attn": true}')
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    if options.repeat < 1 or options.threads < 1:
        parser.error("--repeat and --threads need 1 or more")
    return options


def main(given: list[str] | None = None) -> None:
    options = read_options(given)
    sizes = QUICK if options.quick else Sizes()
    if options.num_prompts:
        sizes = replace(sizes, num_prompts=options.num_prompts, num_prompts_large=options.num_prompts)
    bench = Bench(options, sizes)
    figures = read_former(options.output)
    failures = 0
    for name in options.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        began, load = clock(), os.getloadavg()
        try:
            found = FIGURES[name](bench)
            found["rows"] = [asdict(row) for row in found["rows"]]
        except PeerError as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            found, failures = {"rows": [], "error": str(error)}, failures + 1
        figures[name] = about(bench, given) | found | {"seconds": clock() - began, "load_before": load}
        save(bench, figures)  # after each: whoever stops this keeps what was measured
    bench.close()
    shown = [cells(row, figures[name]["command"]) for name in options.only for row in figures[name]["rows"]]
    show(["figure", "ours", "peer", "ratio", "reach", "against"], shown)
    sys.exit(1 if failures else 0)


def read_former(path: Path) -> dict[str, Any]:
    """Figures measured earlier; none where there is no file of ours."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found


def about(bench: Bench, given: list[str] | None) -> dict[str, Any]:
    """With what one figure was measured."""
    from paceline.bench import machine

    words = sys.argv[1:] if given is None else given
    settings = {
        name: {key: Path(v).name if key == "path" else v for key, v in told.items()}
        for name, told in bench.settings.items()
    }
    command = " ".join(["python", "bench/cpu_peers.py", *(Path(w).name if "/" in w else w for w in words)])
    told = machine.record()
    return {
        "command": command,
        "date": told["date"],
        "revision": told["revision"],
        "versions": told["versions"] | bench.versions,
        "repeat": bench.options.repeat,
        "sizes": asdict(bench.sizes),
        "settings": settings,
    }


def save(bench: Bench, figures: dict[str, Any]) -> None:
    from paceline.bench import machine, results

    data = {"machine": machine.machine(), "threads": bench.options.threads, "figures": figures}
    results.write(bench.options.output, data)


if __name__ == "__main__":
    main()
