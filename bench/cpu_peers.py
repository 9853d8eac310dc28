"""paceline on a CPU beside llama.cpp and transformers: the same files, the same tokens, runs in turn.

    python bench/cpu_peers.py [--only decode-small rows …] [--repeat 7] [--peer-python PATH] [--dataset-path FILE …]

Every side is a process of its own that is kept open and asked in JSON lines, so that runs alternate (A B A B) on one
machine state. llama.cpp is measured through llama-cpp-python, in --peer-python where this one does not have it; a
peer that cannot be imported is reported as "not installed". --dataset-path: rows with `turns` are asked of the small
model (by category, Spec-Bench's form), rows with `prompt` of the large one (HumanEval's form); without any, built-in
prompts. Prints a table; all raw times go to bench/results/cpu_peers.json.

With --only, figures measured before stay in the file; each carries the command and the revision it was measured with.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cpu_peers.json"
PROSE = HERE / "data" / "prose.txt"
clock = time.perf_counter
Answer = dict[str, Any]  # first: seconds to the first token; rest: seconds after it; tokens


class PeerError(Exception):
    """A side that is missing or that failed; the sentence says which and why."""


class Peer:
    """A side's process."""

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [python, str(HERE / "cpu_sides.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.versions = self._read()
        except PeerError:
            self.close()
            raise

    def __call__(self, do: str, **given: Any) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps({"do": do, **given}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"{self.kind}'s process has ended") from None
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        told = json.loads(line) if line else {"error": f"its process ended with code {self._process.wait()}"}
        if "missing" in told:
            raise PeerError("not installed")
        if "error" in told:
            raise PeerError(f"{self.kind}: {told['error']}")
        return told["result"]

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()


@dataclass(frozen=True)
class Sizes:
    """Tokens and prompts of the figures."""

    prompt: int = 64
    new: int = 64
    new_large: int = 32
    prefill: int = 512
    context: int = 256
    far: int = 768  # where the speculative figures' prompts lie
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)
    total: int = 2048
    answer: int = 128
    length: int = 4096
    num_prompts: int = 5  # a category
    num_prompts_large: int = 3
    num_prompts_slow: int = 2  # of these, for transformers


QUICK = Sizes(8, 6, 4, 16, 16, 24, (1, 2, 4), 64, 8, 128, 1, 1, 1)
DRAFTERS: dict[str, list[Any] | None] = {
    "plain": None,
    "ngram": ["NGram"],
    "suffix": ["Suffix"],
}
LOOKUP = 10
FAR = "paceline, further"
ALONE = ", decoding alone"  # beside a figure with the time of reading the prompts
SLOW_REPEATS = 3
WIDTH = 140  # of the table, at least
CATEGORIES = ("summarization", "rag")
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


@dataclass
class Row:
    """One line of the table. `ratio` is always ours over the other's."""

    figure: str
    unit: str
    ours: float | None
    against: str
    peer: float | None = None
    note: str = ""
    ratio: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.ratio = self.ours / self.peer if self.ours is not None and self.peer else None


@dataclass
class Bench:
    """What the figures share: options, and the processes they ask."""

    options: argparse.Namespace
    sizes: Sizes
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # what each side said when it loaded
    peers: dict[str, Peer] = field(default_factory=dict)  # kept open from figure to figure

    def python(self, kind: str) -> str:
        return self.options.peer_python if kind == "llama.cpp" and self.options.peer_python else sys.executable

    def start(self, kind: str) -> Peer:
        peer = Peer(kind, self.python(kind))
        self.versions |= peer.versions
        return peer

    @contextlib.contextmanager
    def fresh(self, kind: str) -> Iterator[Peer]:
        """A process for one measurement."""
        peer = self.start(kind)
        try:
            yield peer
        finally:
            peer.close()

    def load(self, model: str, length: int, *kinds: str) -> dict[str, Peer | str]:
        """The sides asked for, loaded, or why not; ours first, because it knows where the file is."""
        path, sides = model, {}
        for kind in ("paceline", *kinds):
            extra = self.options.llama_options if kind == "llama.cpp" else {}
            try:
                if kind in self.peers and self.peers[kind].ended:
                    self.peers.pop(kind).close()
                if kind not in self.peers:
                    self.peers[kind] = self.start(kind)
                about = self.peers[kind]("load", model=path, length=length, threads=self.options.threads, **extra)
            except PeerError as error:
                if kind == "paceline":
                    raise
                sides[kind] = str(error)
                continue
            self.settings[f"{kind} {model}"] = about
            sides[kind], path = self.peers[kind], about.get("path", path)
        return sides

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def prose(self, ours: Peer, count: int) -> list[int]:
        """`count` tokens of the fixed text, from its start again where it is too short."""
        ids = ours("tokenize", text=PROSE.read_text())
        return (ids * -(-count // len(ids)))[:count]

    def end_ids(self, model: str) -> list[int]:
        return self.settings[f"paceline {model}"]["end_ids"]


def in_turn(repeat: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """A B A B …, after one run of each that is not counted."""
    taken: dict[str, list[Any]] = {name: [] for name in runs}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            result = run()
            if turn:
                taken[name].append(result)
    return taken


def median(values: list[float]) -> float:
    return float(statistics.median(values))


def present(sides: dict[str, Peer | str]) -> dict[str, Peer]:
    return {kind: side for kind, side in sides.items() if isinstance(side, Peer)}


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


# Speculation


def read_questions(paths: list[Path], wanted: str) -> dict[str, list[str]]:
    """Category → texts, of rows that have the field; the categories named above, where there are any of them."""
    found: dict[str, list[str]] = {}
    for path in paths:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row = json.loads(line)
                if wanted in row:
                    text = row[wanted][0] if isinstance(row[wanted], list) else row[wanted]
                    found.setdefault(row.get("category", path.name.partition(".")[0]), []).append(text)
    chosen = {category: found[category] for category in CATEGORIES if category in found}
    return chosen or found


def built_in() -> dict[str, list[str]]:
    from paceline.bench.prompts import built_in as own_prompts

    return {"built-in": [question.text for question in own_prompts("te")]}


def speculate(bench: Bench, size: str) -> dict[str, Any]:
    """Every drafter against plain decoding, llama.cpp and transformers, category by category."""
    model, sizes = getattr(bench.options, size), bench.sizes
    wanted, limit = ("turns", sizes.num_prompts) if size == "small" else ("prompt", sizes.num_prompts_large)
    asked = read_questions(bench.options.dataset_path, wanted) if bench.options.dataset_path else built_in()
    if not asked:
        raise PeerError(f"no dataset given has the field {wanted!r}")
    shown: list[Row] = []
    raw: dict[str, Any] = {}
    sides = bench.load(model, bench.sizes.length, "llama.cpp", "transformers")
    ours = present(sides)["paceline"]
    for category, texts in asked.items():
        most = bench.sizes.length - bench.sizes.answer
        prompts = [ours("tokenize", text=text, chat=True) for text in texts[: 4 * limit]]
        if bench.options.quick:
            prompts = [ids[: most // 2] for ids in prompts]
        fitting = [ids for ids in prompts if len(ids) <= most][:limit]
        if not fitting:
            raise PeerError(f"no prompt of {category} fits into {most} tokens")
        taken = ask_all(bench, sides, fitting, bench.end_ids(model))
        raw[category] = {"prompt_tokens": [len(ids) for ids in fitting], "runs": taken}
        shown += judge(f"{size}, {category}", taken, sides)
    return {"rows": shown, "raw": raw}


def ask_all(
    bench: Bench, sides: dict[str, Peer | str], prompts: list[list[int]], stop: list[int]
) -> dict[str, list[list[Answer]]]:
    found, new = present(sides), bench.sizes.answer
    ways: dict[str, tuple[Peer, int, dict[str, Any]]] = {
        name: (found["paceline"], len(prompts), {"drafter": drafter}) for name, drafter in DRAFTERS.items()
    }
    if "llama.cpp" in found:
        ways["llama.cpp"] = (found["llama.cpp"], len(prompts), {})
    if "transformers" in found:
        ways["transformers"] = (found["transformers"], bench.sizes.num_prompts_slow, {"lookup": LOOKUP})
    for peer, _, extra in ways.values():
        peer("answers", prompts=prompts[:1], new=min(new, 8), stop=stop, **extra)
    taken: dict[str, list[list[Answer]]] = {name: [] for name in ways}
    for turn in range(bench.options.repeat):
        for name, (peer, limit, extra) in ways.items():
            if name != "transformers" or turn < SLOW_REPEATS:
                taken[name].append(peer("answers", prompts=prompts[:limit], new=new, stop=stop, **extra))
    return taken


def whole_speed(turns: list[list[Answer]], limit: int) -> float:
    """Tokens per second of the first `limit` answers, prompts included."""
    return median(
        [
            sum(len(a["tokens"]) for a in turn[:limit]) / sum(a["first"] + a["rest"] for a in turn[:limit])
            for turn in turns
        ]
    )


def decode_speed(turns: list[list[Answer]], limit: int) -> float:
    """Tokens per second of the first `limit` answers after each one's first token."""
    return median(
        [
            sum(len(a["tokens"]) - 1 for a in turn[:limit]) / max(sum(a["rest"] for a in turn[:limit]), 1e-9)
            for turn in turns
        ]
    )


def judge(where: str, taken: dict[str, list[list[Answer]]], sides: dict[str, Peer | str]) -> list[Row]:
    """Rows for every drafter and the best one. Whether the text is plain's is part of the note."""
    count = len(taken["plain"][0])
    reference = [answer["tokens"] for answer in taken["plain"][0]]
    measures = (("", whole_speed), (ALONE, decode_speed))
    shown: list[Row] = []
    for name in DRAFTERS:
        turns = taken[name]
        if name != "plain":
            same = sum(all(turn[i]["tokens"] == reference[i] for turn in turns) for i in range(count))
            rounds = sum(a["rounds"] - 1 for a in turns[0])  # the first belongs to reading the prompt
            per = sum(len(a["tokens"]) - 1 for a in turns[0]) / max(rounds, 1)
            note = f"{same}/{count} identical, {per:.2f} tokens per forward"
            for added, speed in measures:
                ours, plain = speed(turns, count), speed(taken["plain"], count)
                shown.append(Row(f"{where}: {name}{added}", "tokens/s", ours, "plain", plain, "" if added else note))
    best = max((name for name in DRAFTERS if name != "plain"), key=lambda name: whole_speed(taken[name], count))
    for added, speed in measures:
        figure = f"{where}: best{added}"
        shown.append(Row(figure, "tokens/s", speed(taken[best], count), "plain", speed(taken["plain"], count), best))
        for kind, label in (("llama.cpp", "llama.cpp plain"), ("transformers", f"transformers, lookup {LOOKUP}")):
            side = sides[kind]
            few = len(taken[kind][0]) if kind in taken else count
            theirs = speed(taken[kind], few) if kind in taken else None
            note = side if isinstance(side, str) else f"{best}, {few} prompts"
            shown.append(Row(figure, "tokens/s", speed(taken[best], few), label, theirs, note))
    return shown


# Memory


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


def cells(row: dict[str, Any]) -> list[str]:
    sign, reach = REACH.get(f"{row['figure']} / {row['against']}", ("", None))
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
    parser.add_argument("--small", default="smollm2-135m", help="the small model")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", help="the large model")
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
    shown = [cells(row) for name in options.only for row in figures[name]["rows"]]
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
