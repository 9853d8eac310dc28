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
    PROMPT,
    REACH,
    REACH_ROUNDS,
    THEIRS,
    Bench,
    Row,
    per_round,
    random_prompts,
)
from gpu_exact import exact
from gpu_peer import vllm
from gpu_profile import known_rounds, profile
from gpu_serving import serving
from gpu_speed import fast, head, long, lookup, transformers

from paceline import LLM
from paceline.bench import machine, results

RESULTS = Path(__file__).parent / "results"
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
    parser.add_argument("--small", default="smollm2-135m", help="a model with real weights; none: do without")
    parser.add_argument("--large", default="qwen2.5-coder-1.5b", help="a larger one; none: do without")
    parser.add_argument("--draft", help="a draft model; the small one unless given")
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
    parser.add_argument("--rates", nargs="+", type=float, default=[4.0, 18.0], help="requests a second")
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
