"""The speculative figures of cpu_peers.py: every drafter against plain decoding, llama.cpp and transformers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from peer_processes import Answer, Bench, Peer, PeerError, Row, median, present

DRAFTERS: dict[str, list[Any] | None] = {
    "plain": None,
    "ngram": ["NGram"],
    "suffix": ["Suffix"],
}
LOOKUP = 10
ALONE = ", decoding alone"  # beside a figure with the time of reading the prompts
SLOW_REPEATS = 3
CATEGORIES = ("summarization", "rag")


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
    from paceline.bench import prompts

    return {"built-in": [question.text for question in prompts.read_questions(None)]}


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
