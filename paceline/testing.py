"""The contract every drafter is held to, for tests of one's own: whatever it proposes, not one token changes.

`check_drafter(factory)` runs a drafter on a tiny random target in every situation there is: batches, chunked prompts,
prefix hits, preemption, small pages, rounds ahead of the host, budgets that change, drafters switched in mid-answer. It
wants the very tokens of plain decoding, to the bit, on the reference kernels. Prompts, seeds and settings are fixed.

A drafter that says `on_device` is run on PyTorch's `meta` device too, where tensors have shapes and no values: any read
by the host (`.item()`, `.tolist()`, `nonzero`, a truth value) raises there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any
from unittest import mock

from paceline.cache.slots import Slots
from paceline.cache.windowed import WindowPages
from paceline.drafters import make
from paceline.drafters.base import Observation
from paceline.engine.context import DraftContext
from paceline.engine.device import DeviceRunner, Outcome
from paceline.engine.engine import Engine
from paceline.engine.replaying import Capture, ReplayingRunner
from paceline.engine.stats import EngineStats, SequenceStats
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.sampling.state import SamplerState

VOCAB = 97
MAX_TOKENS = 12
ROUNDS = 3  # on a device without data: the prompts, then drafts, each upon what nobody has read of the round before
BATCHES = (1, 3)
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True),
    "everything": SamplingParams(
        temperature=0.8,
        seed=12,
        top_p=0.9,
        top_k=30,
        min_p=0.01,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias={5: 1.5, 9: -3.0},
        bad_words=[[7], [3, 4]],
        min_tokens=6,
        stop_token_ids=[90],
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
    ),
}
UNREAD = ("greedy", "everything")  # on a device without data: a seeded round is a part of the latter's
# Options of the engine; behind: on a device that is so many rounds behind the host.
FEW_PAGES = {"prefix_caching": False, "max_model_len": 90, "num_pages": 7}  # three prompts take six of them
SITUATIONS: dict[str, dict[str, Any]] = {
    "fresh": {},
    "chunked": {"max_batched_tokens": 9},
    "preempted": FEW_PAGES,
    "small_pages": {"block_size": 4},
    "behind_1": {"behind": 1},
    "behind_2": {"behind": 2, "block_size": 4},
    "behind_2_preempted": {"behind": 2, **FEW_PAGES},
    "captured": {"behind": 1, "captured": True, "max_batched_tokens": 9},
}


@functools.cache
def tiny_model(layers: int = 2, hidden: int = 32, seed: int = 0, vocab: int = VOCAB) -> Any:
    """A random Llama; wide initial weights, so that its choices are far from uniform."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval().float()


def tiny_llm(drafter: Any = None, behind: int | None = None, target: Any = None, **options: Any) -> LLM:
    """behind: on a device that is so many rounds behind the host; captured: where rounds are replayed. target: another
    model than `tiny_model()`."""
    capture = rerun if options.pop("captured", False) else None
    given = {"kernels": "reference", "max_model_len": 200, "device": "cpu", **options}
    llm = LLM(target or tiny_model(), drafter=None if behind is not None else drafter, **given)
    if behind is not None:
        set_apart(llm, behind, capture)
        llm.set_drafter(drafter)
    return llm


def set_apart(llm: LLM, behind: int, capture: Capture | None = None) -> LLM:
    """Let the LLM's engine believe its CPU to be a device elsewhere, whose rounds the host reads `behind` rounds late.

    The host's tables are memory of their own: what a round decides reaches them only when the round is read.
    """
    old = llm.engine
    pages = old.table.pages.host.shape[1]
    table = Slots(llm.options.max_num_seqs, llm.max_model_len, pages, old.target.device, apart=True)
    if (windowed := old.table.windowed) is not None:
        table.windowed = WindowPages(table, windowed.pool, windowed.width)
    rows, prefixes = old.scheduler.max_batched_tokens, old.scheduler.prefix_caching
    scheduler = type(old.scheduler)(old.cache.pool, table, rows, prefixes)
    parts = old.target, old.cache, table, old.rule
    runner = DeviceRunner(*parts)
    if capture is not None:
        runner = ReplayingRunner(*parts, lambda compute: capture(_as_it_was(runner.state, compute)))
    llm.engine = Engine(old.target, runner, scheduler, depth=behind)
    return llm


def _as_it_was(state: SamplerState, compute: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """A round that goes through the stages it went through when it was captured, whoever has its slots by now."""
    known = ("words", "kinds", "tempered", "_sampled")
    then = {name: copy(getattr(state, name)) for name in known}

    def again() -> Outcome:
        with mock.patch.multiple(state, **then):
            return compute()

    return again


def rerun(compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
    """What capturing a round is on a CPU: it is run again as it was asked for the first time, into the same memory."""
    from torch import Tensor

    first = compute()

    def replay() -> None:
        again = compute()
        parts = ("verdict", "proposal", "out", "batch")
        pairs = [(getattr(first, part), getattr(again, part)) for part in parts]
        for old, new in (*pairs, (first.batch.layout, again.batch.layout)):
            for name, value in vars(old).items() if old is not None else ():
                if isinstance(value, Tensor):
                    value.copy_(getattr(new, name))
        if first.paths is not None and again.paths is not None:
            first.paths.copy_(again.paths)
        if first.report is not None and again.report is not None:
            first.report.table.copy_(again.report.table)

    return first, replay


def prompts(count: int) -> list[list[int]]:
    """Repetitive prompts of different lengths, one of them longer than two pages."""
    chooser = random.Random(count)
    lengths = (7, 23, 12)[:count]
    return [[chooser.randrange(3, VOCAB) for _ in range(length)] * 2 for length in lengths]


@functools.cache
def plain(batch: int, setting: str) -> list[list[int]]:
    """What plain decoding says."""
    return tokens_of(tiny_llm(), batch, setting)


def tokens_of(llm: LLM, batch: int, setting: str, **changes: Any) -> list[list[int]]:
    """The tokens of one run; the engine's books have to be in order after it."""
    return [tokens for tokens, _ in _run(llm, batch, setting, **changes)]


def _run(llm: LLM, batch: int, setting: str, **changes: Any) -> list[tuple[list[int], SequenceStats]]:
    params = dataclasses.replace(SETTINGS[setting], **changes)
    outputs = [output.outputs[0] for output in llm.generate(prompts(batch), params)]
    for output in outputs:
        assert len(output.provenance) == len(output.token_ids) == output.stats.tokens
    llm.engine.cache.pool.check()
    if llm.engine.table.windowed is not None:
        llm.engine.table.windowed.check()
    assert llm.engine.table.num_free == llm.options.max_num_seqs, "a slot was not given back"
    assert not llm.engine.has_work
    return [(output.token_ids, output.stats) for output in outputs]


@dataclasses.dataclass
class Checked:
    """What a drafter did while it was held to the contract: equality is worth something where drafts were accepted."""

    runs: int = 0
    proposed: int = 0
    accepted: int = 0


class Wavering:
    """A budget that is another in every round, nothing included."""

    def __init__(self, most: int) -> None:
        self._sizes = itertools.cycle((most, 1, 0, max(1, most // 2)))

    def choose(self, num_running: int, history: EngineStats) -> int:
        return next(self._sizes)


def check_drafter(factory: Callable[[], Any], kernels: str = "reference", target: Any = None) -> Checked:
    """Hold a drafter to the contract; an AssertionError says where it broke.

    factory: makes what `LLM(drafter=…)` takes, for a Llama of 97 tokens, 2 layers and hidden size 32 (`tiny_model()`).
    target: another model to draft for, of 97 tokens too.
    """
    checked, settings = Checked(), itertools.cycle(SETTINGS)
    wanted, make_llm = _wanted(kernels, target), functools.partial(tiny_llm, kernels=kernels, target=target)

    def check(where: str, llm: LLM, batch: int, setting: str, **changes: Any) -> None:
        found = _run(llm, batch, setting, **changes)
        for tokens, expected in zip((tokens for tokens, _ in found), wanted(batch, setting)):
            assert tokens == expected, f"{where}, batch of {batch}, {setting}: plain decoding says {expected}"
        checked.runs += 1
        checked.proposed += sum(sum(stats.proposed) for _, stats in found)
        checked.accepted += sum(sum(stats.accepted) for _, stats in found)

    config = make(factory())
    if kernels == "reference" and config is not None and config.create().on_device:  # that device has its own kernels
        for setting in UNREAD:
            check_reads_nothing(factory, setting, target)
    for situation, options in SITUATIONS.items():
        if situation == "small_pages":  # below, with more to be done in them
            continue
        llm = make_llm(factory(), **options)
        for batch in BATCHES:
            check(situation, llm, batch, next(settings))
    llm = make_llm(factory(), **SITUATIONS["small_pages"])
    for batch, setting in zip(itertools.cycle(BATCHES), SETTINGS):  # what it remembers of one is wrong for the next
        for where in ("small_pages", "prefix hits"):
            check(where, llm, batch, setting)
        check("drafts of two tokens", llm, batch, setting, max_draft_tokens=2)
    assert llm.engine.drafter is not None
    llm.engine.budget = Wavering(llm.engine.drafter.max_nodes)
    for batch, setting in zip(itertools.cycle(BATCHES), SETTINGS):
        check("budgets that change", llm, batch, setting)
    check("no drafts", llm, batch, setting, max_draft_tokens=0)
    llm.set_drafter(None)
    check("switched off", llm, batch, setting)
    llm.set_drafter(factory())
    check("switched on again", llm, batch, setting)
    _check_switch(factory, wanted(3, "seeded"), make_llm(factory(), block_size=4))
    return checked


def _wanted(kernels: str, target: Any) -> Callable[[int, str], list[list[int]]]:
    if kernels == "reference" and target is None:
        return plain
    return functools.cache(lambda batch, setting: tokens_of(tiny_llm(kernels=kernels, target=target), batch, setting))


def _check_switch(factory: Callable[[], Any], wanted: list[list[int]], llm: LLM) -> None:
    """Off, on and over to a fresh one, in the middle of three answers."""
    names = [llm.add(Prompt(None, ids), SETTINGS["seeded"]) for ids in prompts(3)]
    said: dict[str, list[int]] = {name: [] for name in names}
    for number in itertools.count():
        if number in (3, 6, 9):
            llm.set_drafter(None if number == 3 else factory())
        for update in llm.step():
            said[update.request_id] += update.tokens
        if not llm.engine.has_work:
            break
    assert list(said.values()) == wanted, f"switched in mid-answer: plain decoding says {wanted}"


def on_nothing(drafter: Any, acceptance: str = "exact", target: Any = None) -> LLM:
    """An LLM on the device without data, which never waits for a round."""
    import torch

    options = {"device": torch.device("meta"), "kernels": "torch", "max_model_len": 64, "max_num_seqs": 4}
    llm = LLM(target or tiny_model(), acceptance=acceptance, budget="fixed", **options)  # every round drafts
    llm.engine.depth = 1000
    llm.set_drafter(drafter)
    return llm


def launch(llm: LLM, setting: str) -> None:
    for length in (5, 19):
        llm.add(Prompt(None, list(range(3, 3 + length))), SETTINGS[setting])
    for _ in range(ROUNDS):
        assert llm.step() == [], "nothing can have been read"


def check_reads_nothing(factory: Callable[[], Any], setting: str = "greedy", target: Any = None) -> None:
    """Rounds on a device without data, with lists of slots that no drafter may walk through."""
    with closed_lists():
        launch(on_nothing(factory(), target=target), setting)


class Closed(list[int]):
    """A list whose length anybody may ask for, and that only the engine may walk through."""

    def __iter__(self) -> Iterator[int]:
        file = Path(sys._getframe(1).f_code.co_filename)
        if "drafters" in file.parts or ROOT not in file.parents:
            raise AssertionError("a drafter on the device looped over sequences")
        return super().__iter__()


ROOT = Path(__file__).parent


@contextmanager
def closed_lists() -> Iterator[None]:
    """Whoever is given the host's list of a round's slots is given a closed one."""

    def closing(kind: Any) -> Callable[..., None]:
        made = kind.__init__

        def init(self: Any, *args: Any, **given: Any) -> None:
            made(self, *args, **given)
            if not isinstance(self.slot_list, Closed):
                self.slot_list = Closed(self.slot_list)

        return init

    with (
        mock.patch.object(DraftContext, "__init__", closing(DraftContext)),
        mock.patch.object(Observation, "__init__", closing(Observation)),
    ):
        yield


__all__ = ["Checked", "check_drafter", "check_reads_nothing", "tiny_llm", "tiny_model"]
