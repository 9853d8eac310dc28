"""The whole decode round in one CUDA graph, on PyTorch's kernels: is every token the uncaptured round's, and how long
does a round take?

    python bench/gpu_rounds.py MODEL [--rounds 203] [--output bench/results/gpu_rounds.json]

For no drafter, n-gram lookup (two rules) and draft models (two random layers, which are never right, and the target
itself, which always is), at 1 and 8 sequences, greedy and sampled: the same rounds run twice from the same prompts,
launched one by one and replayed from a graph that was captured after three of them. Every round's verdict and all
committed tokens must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from paceline import LLM, DraftModel, NGram, SamplingParams
from paceline.bench import machine, results
from paceline.engine.round import Plan, Round, Times
from paceline.models.batch import Work

LENGTH, NODES, WARM_UP = 2048, 5, 3
RESULTS = Path(__file__).parent / "results" / "gpu_rounds.json"


QUESTIONS = [
    "Repeat this sentence five times: the quick brown fox jumps over the lazy dog.",
    "List the numbers from one to forty in words.",
    "Explain in two sentences why the sky is blue, then say it again in other words.",
    "Write a short poem about a bicycle race.",
    "Name twelve rivers, one on each line.",
    "Count down from thirty to one.",
    "Tell a story in which a dog says the same thing on every day of the week.",
    "Write a Python function that adds two numbers, and three tests for it.",
]


def random_model(vocabulary: int, layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


@dataclass
class Standing:
    """Sequences that decode, with all the pages they will need."""

    llm: LLM
    plan: Plan
    slots: Tensor

    def run(self) -> Round:
        plan = Plan(self.plan.sequences, list(self.plan.work), self.plan.num_drafting, self.plan.num_sampling)
        runner = self.llm.engine.runner
        if runner.listener is not None:
            runner.note(runner.listener, plan)
        return runner.run(plan, Times(time.perf_counter()), self.slots)

    def tokens(self) -> list[list[int]]:
        table = self.llm.engine.table
        counts = table.lengths[self.slots].tolist()
        rows = table.tokens.tensor[self.slots].tolist()
        return [row[:count] for row, count in zip(rows, counts)]


def stand(llm: LLM, batch: int, nodes: int, temperature: float) -> Standing:
    """`batch` sequences whose prompts have been computed."""
    engine = llm.engine
    for number, question in enumerate(QUESTIONS[:batch]):
        prompt = llm.read_chat([{"role": "user", "content": question}])
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=None, ignore_eos=True)
        llm.add(prompt, params)
    while engine.scheduler.waiting or any(sequence.num_left != 1 for sequence in engine.scheduler.running):
        engine.step()
    engine._read_all()
    sequences = list(engine.scheduler.running)
    work = []
    for sequence in sequences:
        assert engine.scheduler._reach(sequence, LENGTH)
        assert sequence.slot is not None
        work.append(Work(sequence.slot, None, 1, nodes, LENGTH - 1 - nodes))
    engine.table.flush()
    slots = torch.tensor([item.slot for item in work], device="cuda")
    return Standing(llm, Plan(sequences, work, batch if nodes else 0, batch), slots)


def clear(llm: LLM) -> None:
    for sequence in list(llm.engine.scheduler.running):
        llm.engine.abort(sequence)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.take()


@torch.inference_mode()
def launched(standing: Standing, rounds: int) -> tuple[list[Any], float]:
    """Verdicts of rounds launched one by one, and the median milliseconds of one."""
    tables, times = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        verdict = standing.run().verdict
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        tables.append(verdict.table().tolist())
    return tables, statistics.median(times) * 1e3


@torch.inference_mode()
def replayed(standing: Standing, rounds: int) -> tuple[list[Any], float, float]:
    """The same from a graph that was captured after a few launched rounds; and the seconds of capturing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    tables = []
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            tables.append(standing.run().verdict.table().tolist())
    torch.cuda.current_stream().wait_stream(stream)
    start = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_round = standing.run()  # held as long as the graph: it reads the batch's index tensors
        out = captured_round.verdict.table()
    captured = time.perf_counter() - start
    times = []
    for _ in range(rounds - WARM_UP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        tables.append(out.tolist())
    return tables, statistics.median(times) * 1e3, captured


def compare(llm: LLM, drafter: Any, batch: int, temperature: float, rounds: int) -> dict[str, Any]:
    nodes = NODES if drafter is not None else 0
    runs = []
    for way in (launched, replayed):
        llm.set_drafter(drafter)
        standing = stand(llm, batch, nodes, temperature)
        before = sum(map(len, standing.tokens()))
        found = way(standing, rounds)
        runs.append((found, standing.tokens()))
        made = sum(map(len, runs[-1][1])) - before
        clear(llm)
    (one, tokens), (two, again) = runs
    return {
        "batch": batch,
        "temperature": temperature,
        "rounds": rounds,
        "rounds_equal": sum(a == b for a, b in zip(one[0], two[0])),
        "texts_equal": sum(a == b for a, b in zip(tokens, again)),
        "tokens_per_round": made / rounds / batch,
        "launched_ms": one[1],
        "replayed_ms": two[1],
        "capture_seconds": two[2],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=200 + WARM_UP)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    llm = LLM(options.model, device="cuda", dtype="bfloat16", kernels="torch", max_model_len=LENGTH, max_num_seqs=8)
    drafters = {
        "none": None,
        "ngram": NGram(NODES),
        "ngram_reference": NGram(NODES, rule="reference"),
        "draft_model": DraftModel(random_model(llm.config.vocab_size), NODES),
        "draft_is_target": DraftModel(options.model, NODES),
    }
    rows = []
    for name, drafter in drafters.items():
        for batch in (1, 8):
            for temperature in (0.0, 0.8):
                row = {"drafter": name, **compare(llm, drafter, batch, temperature, options.rounds)}
                rows.append(row)
                print(row, flush=True)
    llm.engine.cache.pool.check()
    results.write(options.output, {**machine.record(), "command": "python bench/gpu_rounds.py MODEL", "rows": rows})
    assert all(row["rounds_equal"] == row["rounds"] and row["texts_equal"] == row["batch"] for row in rows)


if __name__ == "__main__":
    main()
