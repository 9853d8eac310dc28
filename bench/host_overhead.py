"""What an engine step costs outside the model: a model that does next to nothing, so that the host's work is left.

    python bench/host_overhead.py [--steps 40] [--sequences 1 16 64 256]
    python bench/host_overhead.py --captured [--waiting]

Prints microseconds per step and per sequence, plain and with drafters, and writes bench/results/host_overhead.json.
captured: as on a GPU, one round ahead and replayed. A replay takes no time here and leaves tokens that nobody computed:
what is measured is all the host does, but for what CUDA takes to launch a graph and a copy or two.
waiting: all that `LLM.generate` does in a round, for callers who wait for the end and want no text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from paceline import NGram, SamplingParams
from paceline.bench import machine, results
from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.drafters.base import FINAL, Context, Drafter, QuietDrafter, Taps, Target
from paceline.drafters.cached import StateReader
from paceline.drafters.tree import Proposal
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.device import Outcome
from paceline.engine.engine import Engine
from paceline.engine.replaying import ReplayingRunner
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Sequence
from paceline.kernels.eager import EagerOps
from paceline.models.base import Hidden
from paceline.models.config import ModelConfig
from paceline.models.tokenizer import Tokenizer
from paceline.sampling.rules import find_rule
from paceline.sampling.state import Words
from paceline.sampling.verify import argmax
from paceline.shared import Shared

VOCABULARY, HIDDEN, BLOCK, LENGTH = 1000, 8, 16, 1024
PERIOD = 8  # the fake model counts 0 … 7, 0 … within the eight of its last token, so lookup finds every draft
CHAIN = 5
clock = time.thread_time  # one thread does everything here, and its own time does not count what others take from it
RESULTS = Path(__file__).parent / "results" / "host_overhead.json"


class FakeModel:
    """One layer that computes nothing; the head says the next number. Its own time is measured and taken off."""

    ops = EagerOps()

    def __init__(self) -> None:
        self.config = ModelConfig(
            "llama", VOCABULARY, HIDDEN, 1, 1, 1, HIDDEN, HIDDEN, LENGTH, 1e-5, "silu", tie_embeddings=True
        )
        ids = torch.arange(VOCABULARY)
        following = (ids // PERIOD * PERIOD + (ids + 1) % PERIOD).clamp(max=VOCABULARY - 1)
        self._head = (
            torch.nn.functional.one_hot(following, VOCABULARY).float() * 30
        )  # sure, so that sampling says the same
        self._embedding = ids[:, None].float().expand(VOCABULARY, HIDDEN).contiguous()
        self.seconds = 0.0

    def forward(
        self, batch: Any, caches: Any, taps: tuple[int, ...] = (), rows: Tensor | None = None, best: bool = True
    ) -> Hidden:
        start = clock()
        hidden = Hidden(self.embed(batch.ids), None)
        hidden.tapped = hidden.final if taps else None
        if rows is not None:  # as the native kernels answer: logits, and the best token of each row
            hidden.logits = self._head.index_select(0, hidden.final[rows, 0].long())
            hidden.best = argmax(hidden.logits)
        self.seconds += clock() - start
        return hidden

    def embed(self, ids: Tensor) -> Tensor:
        return self._embedding.index_select(0, ids)


class FixedChain(QuietDrafter):
    """Always the same five tokens, at no cost, and nearly always wrong."""

    name = "fixed"
    max_nodes = CHAIN

    def propose(self, context: Context) -> Proposal:
        tokens = torch.arange(CHAIN).expand(len(context.slot_list), CHAIN)
        return Proposal.of_chains(tokens, torch.full((len(context.slot_list),), CHAIN), self.name)


class FixedHead(StateReader):
    """The same chain, with all that the host does for a drafter that reads the target's states."""

    name = "head"
    max_nodes = CHAIN
    taps = Taps(hidden=(FINAL,))

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, [], LENGTH)

    def read_pairs(self, batch: Any, states: Tensor, table: Slots) -> None:
        pass

    def propose(self, context: Context) -> Proposal:
        tokens = torch.arange(CHAIN).expand(len(context.slot_list), CHAIN)
        return Proposal.of_chains(tokens, context.budgets.clamp(max=CHAIN), self.name)


class InstantDevice:
    """Captures rounds, and replays them in no time: their reports say that 0, 1, 2, 3 … drafts were accepted."""

    def __init__(self) -> None:
        self.seconds, self.rounds = 0.0, 0

    def __call__(self, compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        made = compute()

        def replay() -> None:
            start = clock()
            self.rounds += 1
            if made.report is not None:
                self._say(made.report.table.numpy(), made.proposal.num_nodes)
            self.seconds += clock() - start

        return made, replay

    def _say(self, table: Any, nodes: int) -> None:
        """Tokens [B, N+1], accepted nodes [B, N], how many, and how many were proposed."""
        row = np.arange(len(table))[:, None]
        accepted = np.minimum((row + self.rounds) % 4, nodes)
        table[:, : nodes + 1] = (7 * row + 3 * self.rounds + np.arange(nodes + 1)) % VOCABULARY
        table[:, nodes + 1 : 2 * nodes + 1] = np.where(np.arange(nodes) < accepted, np.arange(nodes), -1)
        table[:, 2 * nodes + 1], table[:, 2 * nodes + 2] = accepted[:, 0], nodes


def make_tokenizer() -> Tokenizer:
    """A word for each id, decoded as most models' tokens are."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({f"Ġ{token}": token for token in range(VOCABULARY)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, {}, None, lambda: None)


def build(count: int, drafter: Drafter | None, device: InstantDevice | None) -> Engine:
    """The parts `LLM` would put together, around the fake model."""
    cpu = torch.device("cpu")
    cache = KVCache(PagePool(count * (LENGTH // BLOCK + 1), BLOCK), cpu)
    table = Slots(count, LENGTH, LENGTH // BLOCK + 1, cpu, apart=device is not None)
    scheduler = Scheduler(cache.pool, table, max_batched_tokens=4096, prefix_caching=True)
    target = Target(FakeModel(), make_tokenizer(), cpu, torch.float32, LENGTH, count, "reference")
    parts = target, cache, table, find_rule("exact")
    runner = Runner(*parts) if device is None else ReplayingRunner(*parts, device)
    engine = Engine(target, runner, scheduler, depth=int(table.apart))
    engine.set_drafter(drafter)
    return engine


def fill(engine: Engine, count: int, temperature: float, waiting: bool) -> None:
    """`count` sequences with prompts of their own, all decoding when this returns."""
    params = SamplingParams(temperature=temperature, max_tokens=None, seed=0)
    spoken = None if waiting else engine.target.tokenizer
    for number in range(count):
        first = number * PERIOD % (VOCABULARY - PERIOD)
        prompt = [first + (number + place) % PERIOD for place in range(24)]
        text = Detokenizer(spoken, prompt, (), include_stop=False, skip_special=True)
        sequence = Sequence(str(number), 0, list(prompt), len(prompt), params, number, Words([], []), text, LENGTH)
        sequence.watched = not waiting
        engine.add(sequence)
    while engine.scheduler.waiting or any(not sequence.num_output for sequence in engine.scheduler.running):
        engine.step()
    engine.take()


@dataclass
class Row:
    drafter: str
    temperature: float
    sequences: int
    step_us: float  # the median, model taken off
    sequence_us: float
    token_us: float
    model_us: float


def measure(count: int, kind: str, temperature: float, steps: int, captured: bool, waiting: bool) -> Row:
    device = InstantDevice() if captured else None
    engine = build(count, make_drafter(kind), device)
    fill(engine, count, temperature, waiting)
    callers = Shared()
    callers.engine = engine

    def turn() -> None:
        if waiting:
            callers._take_turn()
        else:
            engine.step()
            engine.take()

    model = device or engine.target.model
    for _ in range(5):
        turn()
    times, models, told = [], [], engine.stats.emitted
    for _ in range(steps):
        before, start = model.seconds, clock()
        turn()
        spent, inside = clock() - start, model.seconds - before
        assert len(engine.stats.recent[-1].met) == count, "every sequence takes part in every step"
        times.append(spent - inside)
        models.append(inside)
    step, tokens = statistics.median(times) * 1e6, engine.stats.emitted - told
    return Row(kind, temperature, count, step, step / count, step * steps / tokens, statistics.median(models) * 1e6)


def make_drafter(kind: str) -> Drafter | None:
    made: dict[str, Drafter] = {"fixed": FixedChain(), "head": FixedHead(), "ngram": NGram(CHAIN).create()}
    return made.get(kind)


def growth(rows: list[Row]) -> list[str]:
    """Whether 16 times the sequences cost at most 16 times the step."""
    said = []
    found = {(row.drafter, row.temperature, row.sequences): row.step_us for row in rows}
    for (kind, temperature, count), small in found.items():
        large = found.get((kind, temperature, 256))
        if count == 16 and large is not None:
            word = "at most linear" if large <= 16 * small else "MORE THAN LINEAR"
            said.append(f"{kind}, temperature {temperature:g}: 16 → 256 sequences cost {large / small:.1f}× ({word})")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--output", type=Path, help=f"default: {RESULTS.name}, or none with --captured or --waiting")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    names = ("sequences", "µs/step", "µs/sequence", "µs/token", "model µs")
    print("drafter  temp. " + " ".join(f"{name:>11}" for name in names))
    for kind in ("plain", "ngram", "head" if arguments.captured else "fixed"):
        for temperature in (0.0, 0.8):
            for count in arguments.sequences:
                row = measure(count, kind, temperature, arguments.steps, arguments.captured, arguments.waiting)
                rows.append(row)
                figures = (row.step_us, row.sequence_us, row.token_us, row.model_us)
                print(f"{kind:8} {temperature:5g} {count:11} " + " ".join(f"{value:11.1f}" for value in figures))
    said = growth(rows)
    print("\n".join(said))
    output = arguments.output or (None if arguments.captured or arguments.waiting else RESULTS)
    if output is None:
        return
    data = {**machine.record(), "steps": arguments.steps, "rows": [vars(row) for row in rows], "growth": said}
    results.write(output, data)


if __name__ == "__main__":
    main()
