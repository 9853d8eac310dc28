"""One engine, several callers: threads, streams that interleave, requests that are aborted by others."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from paceline import NGram, SamplingParams
from paceline.drafters.base import Context, QuietDrafter
from paceline.drafters.tree import Proposal
from paceline.outputs import Chunk, Gathered
from paceline.prompts import Prompt
from tests.drafters.contract import SETTINGS, plain, prompts
from tests.fakes import check_books, tiny_llm

PARAMS = SETTINGS["greedy"]


@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("drafter", [None, NGram(4, min_match=1, max_match=3)])
def test_calls_from_several_threads_give_everybody_their_own_text(drafter: Any, behind: int | None) -> None:
    llm = tiny_llm(drafter, behind, block_size=4)
    wanted = dict(zip(map(tuple, prompts(3)), plain(3, "greedy")))
    found: list[tuple[tuple[int, ...], list[int]]] = []
    faults: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            for turn in range(2):
                prompt = prompts(3)[(number + turn) % 3]
                (output,) = llm.generate([prompt], PARAMS)
                found.append((tuple(prompt), output.outputs[0].token_ids))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and len(found) == 10
    assert all(tokens == wanted[prompt] for prompt, tokens in found)
    check_books(llm)
    assert not llm._live and llm.engine.table.num_free == llm.options.max_num_seqs


def test_a_stream_whose_request_is_aborted_by_id_ends_and_says_so() -> None:
    llm = tiny_llm()
    stream = llm.stream(prompts(1)[0], PARAMS)
    first = next(stream)
    (request,) = llm._live
    llm.abort(request)
    rest = list(stream)
    assert rest[-1].output is not None and rest[-1].output.finish_reason == "abort"
    tokens = [token for chunk in (first, *rest) for token in chunk.token_ids]
    assert tokens == plain(1, "greedy")[0][: len(tokens)]
    assert not llm._live and llm.engine.table.num_free == llm.options.max_num_seqs


def test_a_stream_hears_of_its_own_whoever_asks_for_the_steps() -> None:
    llm = tiny_llm()
    stream = llm.stream(prompts(1)[0], PARAMS)
    chunks = [next(stream)]
    while llm.engine.has_work:
        llm.step()
    chunks += list(stream)
    assert [token for chunk in chunks for token in chunk.token_ids] == plain(1, "greedy")[0]


def test_every_chunk_has_its_own_provenance_when_streams_interleave() -> None:
    llm = tiny_llm(NGram(4, min_match=1, max_match=3))
    streams = [llm.stream(prompt, PARAMS) for prompt in prompts(3)]
    parts: list[list[Chunk]] = [[], [], []]
    for number in (0, 1, 1, 2, 0, 0, 2, 1):
        parts[number].append(next(streams[number]))
    for part, stream in zip(parts, streams):
        part += list(stream)
    for part, wanted in zip(parts, plain(3, "greedy")):
        assert [token for chunk in part for token in chunk.token_ids] == wanted
        assert all(len(chunk.provenance) == len(chunk.token_ids) for chunk in part)
        output = part[-1].output
        assert output is not None and [entry for chunk in part for entry in chunk.provenance] == output.provenance


def test_what_was_added_is_told_to_who_takes_the_steps_whoever_else_asks_for_rounds() -> None:
    """A call in between runs the rounds; their updates wait for the next step."""
    llm = tiny_llm()
    gathered = {llm.add(prompt, PARAMS): Gathered() for prompt in prompts(3)[:2]}
    llm.generate([prompts(3)[2]], PARAMS)
    list(llm.stream(prompts(3)[2], PARAMS))
    done = {}
    while len(done) < 2:
        for update in llm.step():
            output = gathered[update.request_id].add(update)
            if output is not None:
                done[update.request_id] = output.token_ids
    assert [done[request] for request in gathered] == plain(3, "greedy")[:2]


def test_chunks_of_streams_in_several_threads_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(block_size=4)
    real, pauses = llm.engine.step, random.Random(1)

    def dawdle() -> Any:
        updates = real()
        time.sleep(pauses.random() * 0.004)  # between a round's end and the streams hearing of it
        return updates

    monkeypatch.setattr(llm.engine, "step", dawdle)
    found: list[tuple[int, list[int]]] = []

    def ask(number: int) -> None:
        chunks = llm.stream(prompts(3)[number % 3], PARAMS)
        found.append((number % 3, [token for chunk in chunks for token in chunk.token_ids]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(tokens == plain(3, "greedy")[number] for number, tokens in found)


class Tidying(QuietDrafter):
    """Throws a stream away in the middle of a step, as a garbage collector may."""

    name = "tidying"
    max_nodes = 2

    def create(self) -> Tidying:
        return self

    def propose(self, context: Context) -> Proposal:
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        return Proposal.of_trees([([5, 6], [-1, 0])] * len(context.slot_list), context.table.device, self.name)

    stream: Any = None


def test_a_stream_thrown_away_inside_a_step_leaves_nothing_behind() -> None:
    drafter = Tidying()
    llm = tiny_llm(drafter)
    stream = llm.stream(prompts(3)[0], PARAMS)
    next(stream)
    drafter.stream = stream
    (output,) = llm.generate([prompts(3)[1]], PARAMS)
    assert output.outputs[0].token_ids == plain(3, "greedy")[1]
    check_books(llm)
    assert not llm.engine.has_work and not llm._live and not llm.engine.runner.met
    assert llm.engine.table.num_free == llm.options.max_num_seqs


def test_who_takes_the_steps_keeps_no_finished_request_alive() -> None:
    llm = tiny_llm()
    for prompt in prompts(3):
        llm.add(Prompt(None, prompt), PARAMS)
    while llm.engine.has_work:
        llm.step()
    assert not llm._live and not llm._boxes


def test_an_abort_is_told_by_the_next_step_once() -> None:
    llm = tiny_llm()
    request = llm.add(Prompt(None, prompts(1)[0]), SamplingParams(n=2, max_tokens=20))
    llm.step()
    llm.abort(request)
    told = [(update.index, update.finish_reason) for update in llm.step() if update.finished]
    assert told == [(0, "abort"), (1, "abort")]
    assert llm.step() == [] and not llm.engine.has_work


@pytest.mark.parametrize("behind", [None, 1])
def test_a_request_may_be_aborted_under_a_drafter_that_keeps_numbers_of_it(behind: int | None) -> None:
    """What it keeps was made inside a step, and is changed by an abort outside of one."""
    llm = tiny_llm(NGram(4, rule="reference"), behind)
    request = llm.add(prompts(1)[0], PARAMS)
    for _ in range(6):
        llm.step()
    llm.abort(request)
    while llm.engine.has_work:
        llm.step()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts(3), PARAMS)] == plain(3, "greedy")
