"""How fast it is on a GPU, and whether every token is the same there: one script, a part for each question.

    python bench/gpu.py steps verify                            made-up weights: nothing else is needed
    python bench/gpu.py exact head lookup --data FOLDER --small MODEL --large MODEL --head FOLDER
    python bench/gpu.py --device cpu --quick --output FOLDER steps      whether the script itself runs

    steps         milliseconds a plain decode step, by batch, beside what is to be reached and what vLLM takes
    verify        what a round with drafts costs, against a plain step
    profile       where a step's time goes
    exact         are the tokens plain decoding's: drafters, batches, prefix hits, preemptions, greedy and seeded
    head          a learned drafter on real weights against plain, by batch
    lookup        n-gram and suffix against plain, by kind of prompt and batch
    fast          what exact kernels cost, against kernels that need not be
    long          a step after 32k tokens, against the time to read its cache
    serving       requests that arrive at random: first token, between tokens, throughput; with --peer-python vLLM's too
    transformers  plain, prompt lookup and assisted generation of transformers in the same run
    vllm          steps, first tokens and the head beside vLLM's, which runs by another Python (--peer-python)

Each part writes bench/results/gpu_PART.json (--output another folder), anew with every row that it finds. Files of
prompts in --data: mt_bench.jsonl, spec_bench.jsonl, humaneval.jsonl.gz. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_common import (
    BATCHES,
    LONG,
    PROMPT,
    REACH,
    REACH_ROUNDS,
    THEIRS,
    Bench,
    Row,
    asking,
    greedy,
    per_round,
    random_prompts,
    rounds_of,
    timed,
)
from gpu_drafters import Fixed
from gpu_exact import exact
from gpu_peer import vllm
from gpu_serving import serving
from gpu_speed import fast, head, long, lookup, transformers

from paceline import LLM, Eagle
from paceline.bench import machine, results

RESULTS = Path(__file__).parent / "results"
IDLE = "none"  # of the kernels runs
HIDDEN = (
    "output",
    "minutes",
    "data",
    "small",
    "large",
    "draft",
    "head",
    "peer_python",
    "revision",
)  # options that are places on one machine, or stand elsewhere


def steps(bench: Bench) -> Iterator[Row]:
    for shape in bench.options.shapes:
        batches, began = bench.batches(*BATCHES), time.perf_counter()
        with bench.dummy(shape, max_num_seqs=max(batches)) as llm:
            start = starting(llm, time.perf_counter() - began)
            print(f"{shape}: {start}", flush=True)
            for batch in batches:
                prompts = random_prompts(batch, 16 if bench.quick else PROMPT, llm.config.vocab_size)
                found = per_round(llm, prompts, bench.options.turns, bench.quick)
                told = {"reach_ms": REACH.get(shape, {}).get(batch), "peer_ms": THEIRS.get(shape, {}).get(batch)}
                print(f"{shape}, {batch} sequences: {found['ms']:.3f} ms a step {told}", flush=True)
                yield {"shape": shape, "batch": batch, **found, **told, "start": start}


def starting(llm: LLM, seconds: float) -> Row:
    """What a start took: kernels are compiled, the first time only, then rounds captured."""
    start = getattr(llm.engine.runner, "start", None)
    return {"seconds": seconds, **({} if start is None else start._asdict())}


def verify(bench: Bench) -> Iterator[Row]:
    """Rounds of 8 rows, all of them kept or none; and those of an EAGLE-shaped head of made-up weights."""
    shape = bench.options.shapes[0]
    for batch in bench.batches(1, 16):
        with bench.dummy(shape, max_num_seqs=batch, budget="fixed", num_pages=batch * 65 + 64) as llm:
            prompts = random_prompts(batch, 16 if bench.quick else PROMPT, llm.config.vocab_size)
            plain = per_round(llm, prompts, bench.options.turns, bench.quick)
            for name, drafter in known_rounds(bench, llm, prompts).items():
                llm.set_drafter(drafter)
                found = per_round(llm, prompts, bench.options.turns, bench.quick)
                ratio = found["ms"] / plain["ms"]
                reach = REACH_ROUNDS.get(name) if batch == 1 else None
                print(f"{shape}, {batch} sequences, {name}: {found['ms']:.3f} ms, {ratio:.3f} of plain", flush=True)
                told = {"plain_ms": plain["ms"], "ratio": ratio, "reach": reach}
                yield {"shape": shape, "batch": batch, "round": name, **found, **told}


def known_rounds(bench: Bench, llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Drafters of rounds whose luck is known, and the EAGLE-shaped one."""
    _, outputs = timed(llm, prompts, greedy(24 if bench.quick else 176))
    recorded = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in outputs}
    return {
        "8 rows, all accepted": Fixed(recorded, 7, right=True),
        "8 rows, none accepted": Fixed(recorded, 7, right=False),
        "EAGLE-shaped, 5 drafts": Eagle(bench.head(bench.options.shapes[0]), 5),
        "EAGLE-shaped, fixed tree of 15": Eagle(bench.head(bench.options.shapes[0]), 15, tree="static"),
        "EAGLE-shaped, grown tree of 15": Eagle(bench.head(bench.options.shapes[0]), 15, tree="dynamic", depth=2),
    }


def profile(bench: Bench) -> Iterator[Row]:
    """The kernels of a round, by what each adds to its end: they overlap.

    With --head also of the small model's rounds, sampled: there they are drawn as well.
    """
    shape = bench.options.shapes[0]
    for batch in bench.batches(1, 64):
        alike = {"max_num_seqs": batch, "budget": "fixed", "num_pages": batch * 65 + 64}
        make = functools.partial(bench.dummy, shape, **alike)
        with make() as llm:
            prompts = random_prompts(batch, 16 if bench.quick else PROMPT, llm.config.vocab_size)
            known = known_rounds(bench, llm, prompts) if batch == 1 else {}
        rounds = {"plain": None, **{name: drafter for name, drafter in known.items() if "all" not in name}}
        yield from _profile(bench, {"shape": shape, "batch": batch}, make, prompts, rounds)
    for batch in bench.batches(1, 16) if bench.options.head else ():
        length = 128 if bench.quick else 1024
        alike = {"max_num_seqs": batch, "budget": "fixed", "max_model_len": length}
        make = functools.partial(bench.llm, bench.options.small, num_pages=batch * (length // 16 + 1), **alike)
        with make() as llm:
            texts = [] if llm.tokenizer is None else bench.texts("mt_bench.jsonl")
            prompts = asking(llm, texts, batch, 24 if bench.quick else LONG)
            name = Path(llm.engine.target.origin).name
        rounds = {"plain": None, **bench.heads(3)}
        yield from _profile(bench, {"shape": name, "batch": batch}, make, prompts, rounds, temperature=0.8, seed=0)


def _profile(
    bench: Bench,
    told: dict[str, Any],
    make: Callable[[], LLM],
    prompts: list[list[int]],
    rounds: dict[str, Any],
    **sampling: Any,
) -> Iterator[Row]:
    """Of rounds with each drafter."""

    with make() as llm:
        for name, drafter in rounds.items():
            llm.set_drafter(drafter)
            spent = per_round(llm, prompts, bench.options.turns, bench.quick, **sampling)["ms"]
            sums = _kernels(llm, prompts, (24, 8) if bench.quick else (96, 64), **sampling)
            idle = sums.pop(IDLE, 0.0)
            kernels = sorted(((said[:80], ms) for said, ms in sums.items() if ms > 0), key=lambda item: -item[1])
            row = {**told, "round": name, "step_ms": spent, "kernels_ms": sum(sums.values()), "idle_ms": idle}
            row |= {"kernels": [{"kernel": said, "ms": ms} for said, ms in kernels[:40]], "sampling": sampling}
            figures = f"{spent:.3f} ms a round; profiled {row['kernels_ms']:.3f} in kernels, {idle:.3f} between them"
            print(f"{told['shape']}, {told['batch']} sequences, {name}: {figures}", flush=True)
            yield row


def _kernels(llm: LLM, prompts: list[list[int]], sizes: tuple[int, int], **sampling: Any) -> dict[str, float]:
    """Milliseconds that each adds to a round, by its name and how many programs it has: of the rounds between two sizes
    of an answer, the smaller of which is reached when all prompts are read."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU, *([activity.CUDA] if torch.cuda.is_available() else [])]
    sums: dict[str, float] = {}
    found = []
    for size, sign in zip(sizes, (1, -1)):
        with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
            _, outputs = timed(llm, prompts, greedy(size, **sampling))
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        found.append((sign, rounds_of(outputs), [event for event in events if event.get("cat") == "kernel"]))
    rounds = found[0][1] - found[1][1]
    for sign, _, events in found:
        for name, microseconds in added(events):
            sums[name] = sums.get(name, 0.0) + sign * microseconds / 1e3 / rounds
    return sums


def added(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Of kernels that overlap, and end in the order they began, by how much each ended later than all before it; and
    when none ran."""
    now = -math.inf
    for event in sorted(events, key=lambda event: (event["ts"] + event["dur"], event["ts"])):
        end = event["ts"] + event["dur"]
        if now > -math.inf:
            yield IDLE, max(0.0, event["ts"] - now)
        now = max(now, event["ts"])
        yield f"{event['name']}, {math.prod(event['args'].get('grid', [1]))} programs", end - now
        now = end


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "steps": steps,
    "verify": verify,
    "profile": profile,
    "exact": exact,
    "head": head,
    "lookup": lookup,
    "fast": fast,
    "long": long,
    "serving": serving,
    "transformers": transformers,
    "vllm": vllm,
}
# Options that parts cannot do without; a tiny model is asked no questions.
NEEDED = {"exact": ("data",), "head": ("data", "head"), "lookup": ("data",), "transformers": ("data",)}
NEEDED["vllm"] = ("peer_python",)
ALONE = ("steps", "verify", "profile", "fast", "long", "serving")  # those that need no files


def sizes(word: str) -> tuple[int, ...]:
    """A grown tree's nodes, the children of one, and its levels below the first."""
    found = tuple(int(part) for part in word.split(","))
    if len(found) != 3:
        raise ValueError
    return found


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--data", help="a folder with files of prompts")
    parser.add_argument("--small", default="smollm2-135m", help="a model with real weights")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", help="a larger one; none: do without")
    parser.add_argument("--draft", help="a draft model for the small one; itself unless given")
    parser.add_argument("--head", help="an EAGLE head of the small one")
    parser.add_argument(
        "--grown", nargs="+", type=sizes, default=[(31, 8, 2)], metavar="NODES,TOP_K,DEPTH", help="its trees"
    )
    parser.add_argument("--peer-python", help="a Python that has vLLM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", help="the engine's own choice unless given")
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "smollm2"], choices=list(THEIRS))
    parser.add_argument("--batches", nargs="+", type=int, help="sequences at a time; each part has its own")
    parser.add_argument("--turns", type=int, default=3, help="how often each is timed")
    parser.add_argument("--prompts", type=int, default=200, help="of exact; of the others at most so many")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each answer")
    parser.add_argument("--answer", type=int, default=416, help="the same of head: it guesses better later in a text")
    parser.add_argument("--alone", type=int, default=32, help="prompts that exact asks one at a time too")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 4.0, 8.0], help="requests a second")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no more is begun after so many, of all parts")
    parser.add_argument("--revision", help="of the code, where no repository tells it")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few tokens: no figure means anything")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.parts = list(PARTS) if options.parts == ["all"] else options.parts or list(ALONE)
    if options.quick and options.output == RESULTS:
        parser.error("--quick measures nothing that belongs on a page: give --output another folder")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such part; allowed: {', '.join(PARTS)}, all")
    for part, names in NEEDED.items():
        missing = [name for name in names if getattr(options, name) is None and not (options.quick and name == "data")]
        if part in options.parts and missing:
            parser.error(f"{part} needs {' and '.join('--' + name.replace('_', '-') for name in missing)}")
    return options


def measure(part: str, options: argparse.Namespace, told: dict[str, Any], end: float) -> bool:
    """Write a part's file anew with every row: what cuts it off leaves what was found. Whether it came to its end."""
    data = {"part": part, **machine.record(), "command": f"python bench/gpu.py {part}", "options": told}
    data["revision"] = options.revision or data["revision"]
    rows, finished = list[Row](), False
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(PARTS[part](Bench(options, Path(folder)))) as found,
    ):
        while not finished and time.monotonic() < end:
            row = next(found, None)
            finished = row is None
            rows += [] if row is None else [row]
            more = {} if finished else {"unfinished": True}
            results.write(options.output / f"gpu_{part}.json", {**data, **more, "rows": rows})
    kept = f"wrote gpu_{part}.json{'' if finished else ', unfinished'}" if rows or finished else "nothing was measured"
    print(f"{part}: {kept}", flush=True)
    return finished


def main() -> int:
    options = read_options()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return 0
    told = {name: value for name, value in vars(options).items() if name not in (*HIDDEN, "parts")}
    failed, end = [], time.monotonic() + 60 * options.minutes
    for part in options.parts:
        try:
            finished = measure(part, options, told, end)
        except (Exception, SystemExit) as error:  # what the other parts find is worth having all the same
            traceback.print_exc()
            print(f"{part} failed: {error}", flush=True)
            finished = False
        failed += [] if finished else [part]
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
