"""A round's small work on a GPU: microseconds of each kernel inside a CUDA graph, and whether its bits are those of
tensor operations on the same device.

    python bench/gpu_small.py [--output FILE]

Vocabularies of 49,152 and 128,256; 1, 8, 64 and 256 sequences; no nodes, chains of 7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.bench import machine, results
from paceline.cache.slots import Slots
from paceline.drafters.ngram import NGram
from paceline.drafters.tree import Proposal
from paceline.engine.context import DraftContext
from paceline.models.batch import Batch, Nodes, Work, pack_newest
from paceline.params import SamplingParams
from paceline.sampling import noise
from paceline.sampling.rules import find_rule
from paceline.sampling.state import Rows, SamplerState, Words
from paceline.sampling.verify import Judged, choose, follow_there, verify

LENGTH, BLOCK, LAUNCHES, NODES = 2048, 16, 50, 7
VOCABULARIES, BATCHES = (49_152, 128_256), (1, 8, 64, 256)


def microseconds(run: Callable[[], Any]) -> float:
    """Of one call, in a graph that holds many."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    best = float("inf")
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / LAUNCHES)
    return best


def standing(batch: int, vocabulary: int, temperature: float) -> SamplerState:
    """Sequences of half the length, of few tokens."""
    device = torch.device("cuda")
    table = Slots(batch, LENGTH, LENGTH // BLOCK + 8, device)
    state = SamplerState(table, vocabulary, device)
    draws = torch.Generator().manual_seed(batch)
    for slot in range(batch):
        table.begin(slot, torch.randint(0, 9, (LENGTH // 2,), generator=draws).tolist(), 9)
        table.pages.write(slot, 0, list(range(1, LENGTH // BLOCK + 9)))
        state.set(slot, SamplingParams(temperature=temperature, seed=slot), Words([], []), slot, 0)
    table.flush()
    return state


def packed(state: SamplerState, proposal: Proposal, slots: Tensor) -> Batch:
    work = [Work(slot, None, 1, proposal.num_nodes, LENGTH - 20) for slot in range(len(slots))]
    return pack_newest(work, slots, state.table, BLOCK, Nodes(proposal.tokens, proposal.sizes, None))


def measure(batch: int, vocabulary: int, nodes: int, temperature: float) -> dict[str, Any]:
    from paceline.kernels.triton.rounds import TritonRounds

    state, slots = standing(batch, vocabulary, temperature), list(range(batch))
    there = torch.arange(batch, device=state.device)
    table, rule, rounds = state.table, find_rule("exact"), TritonRounds()
    drafter = NGram(NODES).create()

    def propose() -> Proposal:
        if not nodes:
            return Proposal.empty(batch, table.device)
        context = DraftContext(slots, [nodes] * batch, state, rule, there)
        return context.cut(drafter.propose(context))

    draws = torch.Generator("cuda").manual_seed(1)
    logits = 4 * torch.randn(batch * (1 + nodes), vocabulary, generator=draws, device="cuda")
    found: dict[str, list[Any]] = {}
    for kernels in (None, rounds):
        table.rounds = kernels
        proposal = propose()
        rows = packed(state, proposal, there)
        where = rows.layout.slots[rows.places.sampled], rows.layout.positions[rows.places.sampled]
        told = Rows(where[0], slots, where[1], torch.empty(len(where[0]), 0, device="cuda"))
        divided = logits / temperature if temperature else logits
        verdict = verify(Judged(proposal, divided, told, rows.places.index, state), rule)
        parts = (proposal.tokens, proposal.sizes, rows.ids, rows.layout.positions, rows.layout.write)
        found[str(kernels is not None)] = [*parts, choose(divided, told, state), verdict.tokens, verdict.nodes]
    equal = all(torch.equal(one, other) for one, other in zip(*found.values()))
    times = {"pack": microseconds(lambda: packed(state, proposal, there))}
    if nodes:
        times["propose"] = microseconds(propose)
    keyed = state.keyed()
    times["sample"] = microseconds(lambda: rounds.sample(logits, where[0], where[1], keyed))
    times["best"] = microseconds(lambda: rounds.best(logits))
    times["sample_and_walk"] = microseconds(lambda: follow_there(proposal, logits, rows, state))
    said = [part.clone() for part in (table.tokens.tensor, table.lengths)]
    grown = int((said[1][:-1] > LENGTH // 2).sum())
    assert keyed.stream == noise.SAMPLE and grown == batch, "what is measured is committed"
    shape = {"batch": batch, "vocabulary": vocabulary, "nodes": nodes, "temperature": temperature}
    return {**shape, "equal": equal, "microseconds": times}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    rows = []
    for vocabulary in VOCABULARIES:
        for batch in BATCHES:
            for nodes, temperature in ((0, 0.0), (0, 0.8), (NODES, 0.8)):
                rows.append(measure(batch, vocabulary, nodes, temperature))
                print(rows[-1], flush=True)
    if options.output is not None:
        results.write(options.output, {**machine.record(), "command": "python bench/gpu_small.py", "rows": rows})
    assert all(row["equal"] for row in rows)


if __name__ == "__main__":
    main()
