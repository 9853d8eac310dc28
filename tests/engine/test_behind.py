"""Rounds that run ahead of the host: random arrivals, stops, aborts and switches, and nothing lost or held twice."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, FirstOf, NGram, SamplingParams, Suffix
from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.engine.engine import Update
from paceline.outputs import CompletionOutput, Gathered
from paceline.prompts import Prompt
from tests.fakes import Hopeless, Oracle, Recorded, Replay, check_books, set_apart, tiny_model
from tests.tokens import NUM_IDS, tokenizer

MAX_TOKENS = 20
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
DRAFTERS: dict[str, Callable[[Recorded], Any]] = {
    "nobody": lambda known: None,
    "ngram": lambda known: NGram(5, min_match=1, max_match=3),
    "suffix": lambda known: Suffix(tree=True, max_spec_factor=4.0, min_token_prob=0.01),
    "draft_model": lambda known: DraftModel(tiny_model(vocab=NUM_IDS), 3),
    "first_of": lambda known: FirstOf(NGram(4, max_match=1), DraftModel(tiny_model(vocab=NUM_IDS), 2)),
    "oracle": lambda known: Oracle(known, 4),
    "hopeless": lambda known: Hopeless(known, 3, trees=True),
    "replay": lambda known: Replay(known, seed=3, trees=True),
}


@functools.cache
def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    return [[chooser.randrange(3, NUM_IDS) for _ in range(length)] * 2 for length in (3, 11, 6)]


def make_llm(drafter: Any = None, behind: int | None = None, **options: Any) -> LLM:
    given = {"max_model_len": 48, "block_size": 4, "max_num_seqs": 4, **options}
    llm = LLM(tiny_model(vocab=NUM_IDS), tokenizer=tokenizer(), kernels="reference", device="cpu", **given)
    if behind is not None:
        set_apart(llm, behind)
    llm.set_drafter(drafter)
    return llm


@functools.cache
def plain_llm() -> LLM:
    return make_llm()


@functools.cache
def plain(number: int, **params: Any) -> list[CompletionOutput]:
    """What plain decoding says to a prompt, sample by sample."""
    asked = {name: [value] if name in ("stop", "stop_token_ids") else value for name, value in params.items()}
    return plain_llm().generate([prompts()[number]], SamplingParams(**asked))[0].outputs


@functools.cache
def recorded() -> Recorded:
    return {tuple(prompt): prompt + plain(n, **GREEDY)[0].token_ids for n, prompt in enumerate(prompts())}


def random_request(chooser: random.Random) -> tuple[int, dict[str, Any]]:
    """A prompt and what is wished for: greedy or sampled, one sample or three, an end somewhere in the text or none."""
    number, params = chooser.randrange(3), dict(GREEDY)
    if chooser.random() < 0.3:
        params |= {"temperature": 0.9, "seed": chooser.randrange(2)}
    if chooser.random() < 0.3:
        params |= {"n": 3}
    end, whole = chooser.random(), plain(number, **params)[-1]
    if end < 0.3:
        params |= {"stop_token_ids": chooser.choice(whole.token_ids)}
    elif end < 0.6:
        place = chooser.randrange(len(whole.text) - 3)
        params |= {"stop": whole.text[place : place + 3]}
    return number, params


def decode(ids: list[int]) -> str:
    return str(tokenizer().decode(ids, skip_special_tokens=True))


class Story:
    """Requests come, stop, are aborted, and drafters change, on one engine; the books balance after every step."""

    def __init__(self, name: str, pages: int, behind: int) -> None:
        self.chooser = random.Random(f"{name} {pages}")
        caching = self.chooser.random() < 0.7
        self.llm = make_llm(DRAFTERS[name](recorded()), behind, num_pages=pages, prefix_caching=caching)
        self.asked: dict[str, tuple[int, dict[str, Any]]] = {}
        self.live: dict[tuple[str, int], Gathered] = {}
        self.said: dict[tuple[str, int], list[int]] = {}
        self.aborted: set[str] = set()
        self.happened: Counter[str] = Counter()

    def add(self) -> None:
        number, params = random_request(self.chooser)
        asked = {name: [value] if name in ("stop", "stop_token_ids") else value for name, value in params.items()}
        request = self.llm.add(Prompt(None, prompts()[number]), SamplingParams(**asked))
        self.asked[request] = number, params
        for index in range(params.get("n", 1)):
            self.live[request, index], self.said[request, index] = Gathered(), []

    def abort(self) -> None:
        request, _ = self.chooser.choice(list(self.live))
        self.happened["aborted ahead"] += any(sample.ahead for sample in self.llm._live.get(request, []))
        self.llm.abort(request)
        self.aborted.add(request)

    def switch(self) -> None:
        self.llm.set_drafter(DRAFTERS[self.chooser.choice(list(DRAFTERS))](recorded()))
        self.happened["switched"] += 1

    def step(self) -> None:
        for update in self.llm.step():
            self.take(update)
        check_books(self.llm)
        self.happened["ahead"] = max(self.happened["ahead"], len(self.llm.engine._in_flight))

    def take(self, update: Update) -> None:
        sample = update.request_id, update.index
        assert sample in self.live, "somebody spoke who had finished"
        self.said[sample] += update.tokens
        output = self.live[sample].add(update)
        number, params = self.asked[update.request_id]
        expected = plain(number, **params)[update.index]
        assert self.said[sample] == expected.token_ids[: len(self.said[sample])]
        if output is None:
            return
        del self.live[sample]
        if output.finish_reason == "abort":
            assert update.request_id in self.aborted
            assert output.text == decode(output.token_ids), "what was held back is told in the end"
            return
        for part in ("token_ids", "text", "finish_reason", "stop_reason", "seed"):
            assert getattr(output, part) == getattr(expected, part) or (part == "seed" and params["temperature"] == 0)
        assert len(output.provenance) == output.stats.tokens == len(output.token_ids)
        self.happened["finished"] += 1
        self.happened["accepted"] += sum(output.stats.accepted)
        self.happened["stop string"] += isinstance(output.stop_reason, str)
        self.happened["stop token"] += isinstance(output.stop_reason, int)

    def tell(self, num_requests: int) -> Counter[str]:
        while num_requests or self.live:
            if num_requests and self.chooser.random() < 0.4:
                self.add()
                num_requests -= 1
            if self.live and self.chooser.random() < 0.12:
                self.abort()
            if self.chooser.random() < 0.06:
                self.switch()
            check_books(self.llm)
            self.step()
        while self.llm.engine.has_work:
            self.step()
        engine = self.llm.engine
        assert engine.table.num_free == engine.table.num_slots and not self.llm._live
        assert engine.cache.pool.num_available == engine.cache.pool.num_pages
        self.happened["preempted"] = engine.scheduler.num_preemptions
        return self.happened


@pytest.mark.parametrize("number, name", list(enumerate(DRAFTERS)))
def test_stops_aborts_and_switches_at_any_time_change_no_text_and_leave_nothing_behind(number: int, name: str) -> None:
    """Each drafter with few pages, more and many, on a device that is no, one and two rounds behind, in turn."""
    happened: Counter[str] = Counter()
    for place, pages in enumerate((13, 18, 40)):
        behind = (number + place) % 3
        story = Story(name, pages, behind).tell(16)
        assert story["ahead"] == behind
        happened += story
    wanted = {"finished": 20, "stop string": 3, "stop token": 3, "switched": 3, "accepted": 20, "preempted": 1}
    wanted["aborted ahead"] = 2
    assert all(happened[what] >= count for what, count in wanted.items()), happened


@pytest.mark.parametrize("behind", [0, 1, 2])
@pytest.mark.parametrize("name, follows", [("nobody", True), ("ngram", True), ("draft_model", True), ("suffix", False)])
def test_as_many_rounds_are_in_flight_as_the_drafter_can_follow(name: str, follows: bool, behind: int) -> None:
    """One that works on the host has to be told before it is asked again: only a prompt's round waits to be read."""
    llm = make_llm(DRAFTERS[name](recorded()), behind)
    llm.add(Prompt(None, prompts()[0]), SamplingParams(**GREEDY))
    flying = []
    while llm.engine.has_work:
        llm.step()
        flying.append(len(llm.engine._in_flight))
    assert max(flying) == (behind if follows else min(behind, 1)) and flying[-1] == 0


@pytest.mark.parametrize("behind", [1, 2])
def test_the_pages_of_an_aborted_sequence_stay_its_own_until_no_round_writes_there(behind: int) -> None:
    llm = make_llm(behind=behind)
    request = llm.add(Prompt(None, prompts()[0]), SamplingParams(**GREEDY))
    other = llm.add(Prompt(None, prompts()[1]), SamplingParams(**GREEDY))
    for _ in range(4):
        llm.step()
    (sequence,) = llm._live[request]
    pages = list(sequence.pages)
    llm.abort(request)
    assert len(sequence.ahead) == behind and sequence.pages == pages
    steps = 0
    while sequence.ahead:
        assert all(llm.engine.cache.pool.refs(page) for page in pages)
        llm.step()
        check_books(llm)
        steps += 1
    assert steps == behind and sequence.slot is None and not sequence.pages
    (survivor,) = llm._live[other]
    while llm.engine.has_work:
        llm.step()
    assert survivor.output == plain(1, **GREEDY)[0].token_ids


class Failing(Oracle):
    """Fails when it is asked the n-th time."""

    def __init__(self, at: int, failure: BaseException) -> None:
        super().__init__(recorded(), 2)
        self.left, self.failure = at, failure

    def propose(self, context: Context) -> Proposal:
        self.left -= 1
        if self.left == 0:
            raise self.failure
        return super().propose(context)


@pytest.mark.parametrize("behind", [None, 0, 1, 2])
@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("failure", [RuntimeError("broken"), KeyboardInterrupt()])
def test_after_a_failed_round_everybody_starts_over_and_says_the_same(
    failure: BaseException, at: int, behind: int | None
) -> None:
    llm = make_llm(Failing(at, failure), behind, num_pages=20)
    requests = [llm.add(Prompt(None, prompt), SamplingParams(**GREEDY)) for prompt in prompts()]
    said: dict[str, list[int]] = {request: [] for request in requests}
    failed = 0
    while llm.engine.has_work:
        try:
            for update in llm.step():
                said[update.request_id] += update.tokens
        except type(failure):
            failed += 1
            assert not llm.engine._in_flight and llm.engine.table.num_free == llm.engine.table.num_slots
            assert llm.engine.cache.pool.num_available == llm.engine.cache.pool.num_pages
        check_books(llm)
    assert failed == 1
    assert list(said.values()) == [plain(number, **GREEDY)[0].token_ids for number in range(3)]


def test_the_hosts_tables_are_behind_the_devices() -> None:
    """What makes the stories above mean something: the device's own tables do run ahead."""
    llm = make_llm(Oracle(recorded(), 2), 2)
    llm.add(Prompt(None, prompts()[0]), SamplingParams(**GREEDY))
    apart = 0
    table = llm.engine.table
    while llm.engine.has_work:
        llm.step()
        for sequence in llm.engine.scheduler.running:
            length = int(table.lengths[sequence.slot])
            known = torch.tensor(sequence.tokens)
            assert torch.equal(table.tokens.tensor[sequence.slot, : len(known)], known)
            apart = max(apart, length - len(known))
    assert apart == 2 * 3, "two rounds of two drafts and one more"
