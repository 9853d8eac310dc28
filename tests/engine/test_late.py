"""An engine that is always one round late: random arrivals, stops and aborts, and nothing lost or held twice."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.prompts import Prompt
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts, recorded
from tests.fakes import make_late, tiny_llm


def check(llm: Any) -> None:
    """Pages and slots are where the sequences say they are, whoever is in flight."""
    pool, running = llm.engine.cache.pool, llm.engine.scheduler.running
    pool.check()
    held: dict[int, int] = {}
    for sequence in running:
        for page in sequence.pages:
            held[page] = held.get(page, 0) + 1
    assert all(pool.refs(page) == count for page, count in held.items())
    assert sum(pool.refs(page) for page in range(pool.num_pages)) == sum(held.values())
    slots = [sequence.slot for sequence in running]
    assert len(set(slots)) == len(slots) == llm.engine.table.num_slots - llm.engine.table.num_free


@pytest.mark.parametrize("name", ["ngram", "suffix_tree", "draft_model", "replay_tree"])
@pytest.mark.parametrize("seed", range(4))
def test_stops_and_aborts_at_any_time_leave_nothing_behind(name: str, seed: int) -> None:
    chooser = random.Random(seed)
    llm = make_late(tiny_llm(DRAFTERS[name](recorded(3, "greedy")), block_size=4, num_pages=64, max_num_seqs=4))
    wanted = dict(zip(map(tuple, prompts(3)), plain(3, "greedy")))
    live: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
    left, finished = 24, 0
    while left or live:
        if left and chooser.random() < 0.5:
            prompt = chooser.choice(prompts(3))
            stop = chooser.choice([None, wanted[tuple(prompt)][chooser.randrange(24)]])
            params = dataclasses.replace(SETTINGS["greedy"], stop_token_ids=None if stop is None else [stop])
            live[llm.add(Prompt(None, prompt), params)] = (tuple(prompt), params)
            left -= 1
        if live and chooser.random() < 0.1:
            gone = chooser.choice(list(live))
            llm.abort(gone)
            del live[gone]
        for update in llm.step():
            sequence = update.sequence
            assert sequence.request_id in live, "an aborted request spoke"
            if update.finished:
                prompt, params = live.pop(sequence.request_id)
                expected = wanted[prompt]
                if params.stop_token_ids:
                    expected = expected[: expected.index(params.stop_token_ids[0]) + 1]
                assert sequence.output == expected
                finished += 1
        check(llm)
    while llm.engine.has_work:
        llm.step()
        check(llm)
    assert finished >= 8 and llm.engine.table.num_free == 4
