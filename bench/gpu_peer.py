"""The part of gpu.py that has vLLM beside us: the same prompts, lengths and weights, on one machine, one after another.

vLLM runs in a process of its own (`gpu_vllm.py`) by the Python given as --peer-python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_common import (
    BATCHES,
    FASTEST,
    LLAMA,
    LONG,
    PROMPT,
    SHORT,
    SIZES,
    Bench,
    Row,
    asking,
    greedy,
    random_prompts,
    timed,
)
from safetensors.torch import save_file

from paceline import LLM, Eagle
from paceline.models import loader
from paceline.models.config import ModelConfig

FIRST = 2048  # tokens of a prompt whose first new token is waited for
DRAFTS = 3  # of the head, on both sides
FIRST_REACH = 1 / 1.2  # times as fast to a first token, with exact kernels
MARK = "answer: "  # gpu_vllm.py's
PATIENCE = 420.0  # seconds for vLLM's process
MEMORY = 0.4  # of the device that vLLM may take: ours may still hold some


@dataclass
class Run:
    """The same for both sides."""

    name: str
    prompts: list[list[int]]
    new: int
    temperature: float = 0.0
    turns: int = 3


@dataclass
class Job:
    """One engine on each side, and what both are asked."""

    model: str
    runs: list[Run]
    options: dict[str, Any]  # named alike by both
    drafter: Any = None
    speculative: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)  # of ours alone


def vllm(bench: Bench) -> Iterator[Row]:
    """Steps, first tokens and the head, ours and vLLM's."""
    for shape in bench.options.shapes:
        yield from _steps(bench, shape)
    if bench.options.head:
        yield from _head(bench)


def _steps(bench: Bench, shape: str) -> list[Row]:
    """Milliseconds a step and to the first token, of made-up weights."""
    batches, vocabulary = bench.batches(*BATCHES), 256 if bench.quick else 49152
    long, short, prompt, first = (24, 8, 16, 32) if bench.quick else (LONG, SHORT, PROMPT, FIRST)
    runs = [Run("first token", random_prompts(1, first, vocabulary), 1, turns=2 * bench.options.turns)]
    for batch, new in ((batch, new) for batch in batches for new in (long, short)):
        runs.append(Run(f"{batch} {new}", random_prompts(batch, prompt, vocabulary), new, turns=bench.options.turns))
    length = max(first, prompt + long) + 64
    options = {"load_format": "dummy", "max_model_len": length, "max_num_seqs": max(batches)}
    job = Job(bench.shape(shape, length), runs, options)
    ours, theirs = _both(bench, job)
    fast = _ask_ours(bench, job, runs[:1], **FASTEST)

    def step(found: dict[str, Any], batch: int) -> float:
        one, other = (min(found[f"{batch} {new}"]["seconds"]) for new in (long, short))
        return 1e3 * (one - other) / (long - short)

    waited = [1e3 * min(found["first token"]["seconds"]) for found in (ours, fast, theirs)]
    what = f"{shape}: first token of {first}"
    rows = [
        _row(what, 1, waited[0], waited[2], FIRST_REACH),
        _row(f"{what}, fast kernels", 1, waited[1], waited[2]),
    ]
    return rows + [_row(f"{shape}: a step", batch, step(ours, batch), step(theirs, batch)) for batch in batches]


def _head(bench: Bench) -> Iterator[Row]:
    """Milliseconds a token of one sequence, of real weights: plain, and with the head."""
    batches, new = bench.batches(1, 16), 12 if bench.quick else bench.options.tokens
    options = {"max_model_len": 128 if bench.quick else 1024, "max_num_seqs": max(batches)}
    model = str(bench.folder / "exported")
    with bench.llm(bench.options.small, **options) as llm:
        texts = [] if llm.tokenizer is None else bench.texts("mt_bench.jsonl")
        prompts = asking(llm, texts, max(batches), new)
    export(bench.options.small, Path(model))
    runs = [
        Run(f"{batch} {temperature:g}", prompts[:batch], new, temperature, bench.options.turns)
        for batch in batches
        for temperature in (0.0, 0.8)
    ]
    speculative = {"method": "eagle3", "model": str(bench.options.head), "num_speculative_tokens": DRAFTS}
    jobs = {
        "plain": Job(model, runs, options),
        f"EAGLE head, {DRAFTS} drafts": Job(
            model, runs, options, Eagle(bench.options.head, DRAFTS), speculative, {"budget": "fixed"}
        ),
    }
    for named, job in jobs.items():
        ours, theirs = _both(bench, job)
        told = {named: ours}
        if job.drafter is not None:  # and as we would have it
            for better, drafter in bench.heads().items():
                free = Job(model, runs, options, drafter)
                told[f"{better} against {DRAFTS} drafts"] = _ask_ours(bench, free, runs)
        for what, found in told.items():
            for run in runs:
                sides = found[run.name], theirs[run.name]
                rounds = [side["rounds"] for side in sides if "rounds" in side] if job.drafter is not None else []
                more = {"tokens": new, **dict(zip(("ours_rounds", "peer_rounds"), rounds))} if rounds else {}
                spent = [1e3 * min(side["seconds"]) / new for side in sides]
                yield _row(f"small: {what}, temperature {run.temperature:g}", len(run.prompts), *spent, **more)


def _row(what: str, batch: int, ours: float, theirs: float, reach: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"what": what, "batch": batch, "ours_ms": ours, "peer_ms": theirs, "ratio": theirs / ours, "reach": reach}
    row |= more
    print(row, flush=True)
    return row


def _both(bench: Bench, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs = {"model": job.model, "seed": 0, **job.options}
    if job.speculative is not None:
        theirs["speculative_config"] = job.speculative
    return _ask_ours(bench, job, job.runs), ask_vllm(bench, theirs, job.runs)


def _ask_ours(bench: Bench, job: Job, runs: list[Run], **more: Any) -> dict[str, Any]:
    with bench.llm(job.model, job.drafter, skip_tokenizer_init=True, **job.options, **job.more, **more) as llm:
        return {run.name: _ask(llm, run) for run in runs}


def _ask(llm: LLM, run: Run) -> dict[str, Any]:
    params = [greedy(run.new, temperature=run.temperature, seed=number) for number in range(len(run.prompts))]
    found = [timed(llm, run.prompts, params) for _ in range(1 + run.turns)]  # the first is not counted
    outputs = [output.outputs[0] for output in found[-1][1]]
    tokens = sum(len(output.token_ids) for output in outputs)
    return {"seconds": [seconds for seconds, _ in found[1:]], "tokens": tokens, "rounds": outputs[0].stats.rounds}


def ask_vllm(bench: Bench, options: dict[str, Any], runs: list[Run], served: Iterable[Row] = ()) -> dict[str, Any]:
    """What vLLM's process answers, by the runs' names."""
    engine: dict[str, Any] = {"dtype": bench.options.dtype, **options}
    engine |= {"skip_tokenizer_init": True, "enable_prefix_caching": False, "gpu_memory_utilization": MEMORY}
    job = {"engine": engine, "runs": [vars(run) for run in runs], "served": list(served)}
    path = bench.folder / "job.json"
    path.write_text(json.dumps(job))
    script = Path(__file__).with_name("gpu_vllm.py")
    told = [bench.folder / name for name in ("vllm.out", "vllm.err")]
    code = _finish([bench.options.peer_python, str(script), str(path)], told)
    printed, errors = (one.read_text(errors="replace") for one in told)
    answers = [line for line in printed.splitlines() if line.startswith(MARK)]
    if code or not answers:
        ended = f"had not ended after {PATIENCE:g} seconds" if code is None else f"ended with code {code}"
        raise SystemExit(f"vLLM's process {ended}:\n{printed[-8000:]}{errors[-2000:]}")
    found: dict[str, Any] = json.loads(answers[-1].removeprefix(MARK))
    for run in (*job["runs"], *job["served"]):
        asked, made = len(run["prompts"]) * run["new"], found[run["name"]]["tokens"]
        if made != asked:
            raise SystemExit(f"vLLM made {made} tokens in {run['name']!r}, not {asked}")
    return found


def _finish(call: list[str], told: list[Path]) -> int | None:
    """A program's exit code, what it prints in files: a pipe stays open as long as any child. None: it had not ended in
    time. Its children, one of which may hold the device, end with it."""
    with told[0].open("w") as out, told[1].open("w") as err:
        program = subprocess.Popen(call, stdout=out, stderr=err, start_new_session=True)
        try:
            return program.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()


def export(model: str, folder: Path) -> None:
    """A checkpoint as Hugging Face lays it out, in bfloat16, of whatever our loader reads: of Llama's family alone."""
    found = loader.find(model)
    if found.config.architecture != "llama" or found.config.rope.kind != "default":
        raise SystemExit(f"{model} is no llama with plain rotary positions; this part exports such alone")
    folder.mkdir()
    read = {name: found.source.read(name) for name in found.source.names()}
    dense = {name: one if isinstance(one, torch.Tensor) else one.dequantize() for name, one in read.items()}
    save_file({name: one.to(torch.bfloat16).contiguous() for name, one in dense.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_hugging_face(found.config)))


def _hugging_face(config: ModelConfig) -> dict[str, Any]:
    sizes = (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.intermediate_size)
    told = {**LLAMA, **dict(zip(SIZES, sizes)), "head_dim": config.head_dim, "vocab_size": config.vocab_size}
    told |= {"rms_norm_eps": config.norm_eps, "rope_theta": config.rope.theta, "hidden_act": config.activation}
    told |= {"max_position_embeddings": config.max_position, "tie_word_embeddings": config.tie_embeddings}
    return told | {"eos_token_id": list(config.eos_ids)}
