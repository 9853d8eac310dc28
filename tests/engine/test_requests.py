"""What a request may ask for, end to end on tiny models: lengths, stops, samples, figures, batches."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from paceline import LLM, NGram, SamplingParams, Suffix
from paceline.errors import OptionError
from paceline.outputs import CompletionOutput
from paceline.prompts import Prompt
from tests.engine.asking import (
    BEHIND,
    LONG,
    PROMPT,
    Watched,
    assert_empty,
    never_idle,
    plain,
    run,
    shared,
    speaking,
)
from tests.fakes import VOCAB, tiny_llm, tiny_model
from tests.tokens import tokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return tiny_llm()


# Where a text ends.


@BEHIND
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("most", [1, 2, 9])
def test_max_tokens_ends_a_text_exactly(behind: int | None, most: int, drafted: bool) -> None:
    llm = tiny_llm(Watched([PROMPT], 4) if drafted else None, behind)
    output = run(llm, PROMPT, temperature=0.0, max_tokens=most)
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (plain(PROMPT, most), "length", None)
    assert_empty(llm)


def test_max_model_len_ends_a_text_and_drafts_shrink_before_it() -> None:
    drafter = Watched([PROMPT], 5)
    llm = tiny_llm(drafter, max_model_len=len(PROMPT) + 14)
    output = run(llm, PROMPT, temperature=0.0, max_tokens=None)
    assert (output.token_ids, output.finish_reason) == (plain(PROMPT, 14), "length")
    assert all(length + budget + 1 <= llm.max_model_len for length, budget in drafter.seen)
    assert [budget for _, budget in drafter.seen] == [5, 5, 0][: len(drafter.seen)]
    assert output.stats.rounds == 4  # one for the prompt's token, 6, 6, and one


@BEHIND
def test_a_prompt_one_short_of_the_limit_gets_one_token(behind: int | None) -> None:
    llm = tiny_llm(NGram(4), behind, max_model_len=len(LONG) + 1)
    output = run(llm, LONG, temperature=0.0, max_tokens=10)
    assert (output.token_ids, output.finish_reason) == (plain(LONG, 1), "length")


@BEHIND
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_token_ends_a_text_and_is_its_last_token(behind: int | None, drafted: bool) -> None:
    expected = plain(PROMPT, 12)
    stop = expected[6]
    llm = tiny_llm(Watched([PROMPT], 9) if drafted else None, behind)
    output = run(llm, PROMPT, temperature=0.0, max_tokens=20, stop_token_ids=[stop], logprobs=0)
    assert output.token_ids == expected[: expected.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert_empty(llm)


def ending_model(end: int) -> Any:
    model = copy.deepcopy(tiny_model())
    model.generation_config.eos_token_id = model.config.eos_token_id = end
    return model


def test_the_end_token_ends_a_text_unless_it_is_ignored_or_comes_too_early() -> None:
    free = plain(PROMPT, 12)
    end = free[4]
    first = free.index(end)
    llm = LLM(ending_model(end), kernels="reference", max_model_len=64)
    stopped = run(llm, PROMPT, temperature=0.0, max_tokens=12, ignore_eos=False)
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[: first + 1], "stop", None)
    ignored = run(llm, PROMPT, temperature=0.0, max_tokens=12)
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")
    held = run(llm, PROMPT, temperature=0.0, max_tokens=12, min_tokens=8, ignore_eos=False)
    assert len(held.token_ids) >= 8 and end not in held.token_ids[:8]
    assert held.token_ids[:8] == greedy_without(end, 8)


def greedy_without(banned: int, count: int) -> list[int]:
    """transformers' greedy choice with one token ruled out."""
    ids = list(PROMPT)
    for _ in range(count):
        with torch.no_grad():
            logits = tiny_model()(torch.tensor([ids])).logits[0, -1]
        logits[banned] = float("-inf")
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@BEHIND
def test_a_stop_string_cuts_the_text_with_or_without_itself(behind: int | None) -> None:
    whole = run(speaking(behind), PROMPT, temperature=0.0, max_tokens=14)
    assert whole.text == tokenizer().decode(whole.token_ids)
    stop = whole.text[4:7]  # somewhere in the middle, whatever tokens it spans
    place = whole.text.find(stop)
    cut = run(speaking(behind), PROMPT, temperature=0.0, max_tokens=14, stop=["never", stop])
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:place], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 14
    kept = run(speaking(behind), PROMPT, temperature=0.0, max_tokens=14, stop=stop, include_stop_str_in_output=True)
    assert kept.text == whole.text[: place + len(stop)] and kept.token_ids == cut.token_ids
    late = run(speaking(behind), PROMPT, temperature=0.0, max_tokens=14, stop=stop, min_tokens=len(cut.token_ids) + 1)
    assert len(late.token_ids) > len(cut.token_ids)


@BEHIND
def test_a_stop_token_is_in_the_text_only_if_asked_for(behind: int | None) -> None:
    whole = run(speaking(behind), PROMPT, temperature=0.0, max_tokens=14)
    stop = whole.token_ids[8]
    first = whole.token_ids.index(stop)
    texts = [
        run(
            speaking(behind),
            PROMPT,
            temperature=0.0,
            max_tokens=14,
            stop_token_ids=[stop],
            include_stop_str_in_output=asked,
        ).text
        for asked in (False, True)
    ]
    assert texts == [tokenizer().decode(whole.token_ids[: first + extra]) for extra in (0, 1)]


def test_nothing_after_a_stop_inside_an_accepted_run_is_ever_reported() -> None:
    expected = plain(PROMPT, 16)
    stop = next(token for n, token in enumerate(expected) if 3 <= n < 7 and token not in expected[:n])
    count = expected.index(stop) + 1
    llm = tiny_llm(Watched([PROMPT], 12))
    chunks = list(
        llm.stream(
            PROMPT, SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[stop], logprobs=2, ignore_eos=True)
        )
    )
    output = chunks[-1].output
    assert output is not None and [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    assert output.token_ids == expected[:count] and output.logprobs is not None
    assert len(output.logprobs) == len(output.provenance) == output.stats.tokens == count
    assert sum(output.stats.accepted) == count - 1 == sum(told.kind == "accepted" for told in output.provenance)
    assert llm.engine.stats.emitted == count
    assert [record.emitted for record in llm.engine.stats.recent] == [1, count - 1]
    assert_empty(llm)


@BEHIND
def test_the_engines_record_of_a_round_stops_where_the_text_does(behind: int | None) -> None:
    llm = tiny_llm(Watched([PROMPT], 12), behind)
    run(llm, PROMPT, temperature=0.0, max_tokens=20, stop_token_ids=plain(PROMPT, 5)[4:])
    assert all(record.accepted <= record.emitted for record in llm.engine.stats.recent)


# Samples and seeds.


@BEHIND
def test_samples_differ_and_each_is_what_its_own_index_gives_alone(behind: int | None) -> None:
    llm = tiny_llm(behind=behind)
    params = SamplingParams(temperature=1.2, max_tokens=8, n=3, seed=11, ignore_eos=True)
    outputs = llm.generate([LONG], params)[0].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert [output.stats.prefix_hit for output in outputs] == [0, 32, 32], "samples share the pages of the prompt"
    for index, output in enumerate(outputs):
        alone = tiny_llm()
        request = alone.add(Prompt(None, LONG), SamplingParams(temperature=1.2, max_tokens=8, seed=11, ignore_eos=True))
        (sequence,) = alone._live[request]
        sequence.index = index
        while sequence.finish_reason is None:
            alone.step()
        assert sequence.output == output.token_ids


def test_a_seed_that_was_drawn_is_reported_and_brings_the_text_back(llm: LLM) -> None:
    first, second = (run(llm, PROMPT, temperature=1.5, max_tokens=8) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    assert run(llm, PROMPT, temperature=1.5, max_tokens=8, seed=first.seed).token_ids == first.token_ids


def test_an_engines_seed_seeds_the_run_and_each_request_in_it_differently() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)

    def speak(seed: int) -> list[CompletionOutput]:
        llm = tiny_llm(seed=seed)
        return [item.outputs[0] for _ in range(2) for item in llm.generate([PROMPT] * 3, params)]

    first, again, other = speak(0), speak(0), speak(1)
    assert len({tuple(output.token_ids) for output in first}) == 6, "the same prompt, six texts"
    assert [output.token_ids for output in again] == [output.token_ids for output in first]
    assert not {output.seed for output in other} & {output.seed for output in first}
    for output in first:
        assert run(tiny_llm(), PROMPT, temperature=1.5, max_tokens=8, seed=output.seed).token_ids == output.token_ids


@pytest.mark.parametrize("refused", [{"prompts": [PROMPT, []]}, {"prompts": [PROMPT], "bad_words": ["word"]}])
def test_a_refused_call_leaves_the_seeds_of_later_requests_as_they_were(refused: dict[str, Any]) -> None:
    llm = tiny_llm(seed=5)
    with pytest.raises(OptionError):
        llm.generate(**refused)
    assert run(llm, PROMPT, max_tokens=1).seed == run(tiny_llm(seed=5), PROMPT, max_tokens=1).seed


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_an_end_id_the_model_cannot_say_holds_nothing_back(min_tokens: int) -> None:
    llm = LLM(ending_model(VOCAB + 5), kernels="reference", max_model_len=64)
    output = run(llm, PROMPT, temperature=0.0, max_tokens=8, min_tokens=min_tokens, ignore_eos=False)
    assert output.token_ids == plain(PROMPT, 8)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_that_passed_before_min_tokens_ends_nothing_later_and_the_stream_is_the_text(
    include: bool, drafted: bool
) -> None:
    free = run(speaking(), LONG, temperature=0.0, max_tokens=12)
    early = next(letter for letter in free.text[: len(free.text) // 2] if free.text.count(letter) == 1)
    stops = [early, "never said, but longer than all of the text"]
    llm = speaking.__wrapped__()
    llm.set_drafter(Suffix() if drafted else None)
    wishes = {"temperature": 0.0, "max_tokens": 12, "min_tokens": 9, "stop": stops, "ignore_eos": True}
    params = SamplingParams(include_stop_str_in_output=include, **wishes)  # type: ignore[arg-type]
    chunks = list(llm.stream(LONG, params))
    assert "".join(chunk.text for chunk in chunks) == free.text
    last = chunks[-1].output
    assert last is not None and (last.text, last.finish_reason) == (free.text, "length")


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_works(llm: LLM, seed: int) -> None:
    assert run(llm, PROMPT, max_tokens=2, seed=seed).seed == seed


# What is told about a text.


@pytest.mark.parametrize("drafter", [None, "ngram", "suffix", "oracle"])
def test_figures_and_provenance_agree_with_the_text(drafter: str | None) -> None:
    llm = tiny_llm(Watched([LONG], 3) if drafter == "oracle" else drafter)
    output = run(llm, LONG, temperature=0.0, max_tokens=12)
    stats, told = output.stats, output.provenance
    assert output.token_ids == plain(LONG, 12)
    assert len(told) == stats.tokens == 12 and stats.rounds == told[-1].round + 1
    accepted = [item for item in told if item.kind == "accepted"]
    assert len(accepted) == sum(stats.accepted) and all(a <= p for a, p in zip(stats.accepted, stats.proposed))
    assert all((item.drafter is None) == (item.kind != "accepted") for item in told)
    rounds = [[item for item in told if item.round == number] for number in range(stats.rounds)]
    for items in rounds:
        assert [item.depth for item in items] == list(range(1, len(items) + 1))
        assert all(item.kind == "accepted" for item in items[:-1])
    assert stats.tokens_per_forward == 12 / stats.rounds
    if drafter == "oracle":
        assert stats.acceptance == 1.0 == min(stats.acceptance_by_position) and {i.drafter for i in accepted} == {
            "oracle"
        }
        assert [items[-1].kind for items in rounds] == ["plain", "bonus", "bonus", "bonus"][: len(rounds)]


# Company in the batch.


@BEHIND
def test_a_prefix_hit_changes_nothing_but_the_work(behind: int | None) -> None:
    llm = tiny_llm(Suffix(), behind)
    first = run(llm, LONG, temperature=0.7, seed=4, max_tokens=8)
    again = run(llm, LONG, temperature=0.7, seed=4, max_tokens=8)
    turn = [*LONG, *first.token_ids, 1, 2]
    longer = run(llm, turn, temperature=0.7, seed=4, max_tokens=8)
    assert (first.stats.prefix_hit, again.stats.prefix_hit, longer.stats.prefix_hit) == (0, 32, 32)
    assert again.token_ids == first.token_ids
    assert (
        longer.token_ids == run(tiny_llm(prefix_caching=False), turn, temperature=0.7, seed=4, max_tokens=8).token_ids
    )
    cold = run(tiny_llm(prefix_caching=False), LONG, temperature=0.7, seed=4, max_tokens=8)
    assert cold.token_ids == first.token_ids


@BEHIND
@pytest.mark.parametrize("drafted", [False, True])
def test_preempted_requests_say_the_same(behind: int | None, drafted: bool) -> None:
    prompts = [LONG[n : n + 10] for n in range(4)]
    drafter = Watched(prompts, 3) if drafted else None
    llm = tiny_llm(drafter, behind, block_size=4, num_pages=10, max_model_len=34)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    results = llm.generate(prompts, params)
    assert sum(result.outputs[0].stats.preemptions for result in results) > 0
    for prompt, result in zip(prompts, results):
        output = result.outputs[0]
        assert output.token_ids == plain(prompt, 20) and output.logprobs is not None
        assert len(output.logprobs) == len(output.provenance) == output.stats.tokens == 20
        assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 10
    assert_empty(llm)


def test_the_engine_counts_preemptions() -> None:
    llm = tiny_llm(block_size=4, num_pages=10, max_model_len=34)
    prompts = [LONG[n : n + 10] for n in range(4)]
    results = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert llm.engine.scheduler.num_preemptions == sum(result.outputs[0].stats.preemptions for result in results) > 0


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 1, "top_k": 5},
    {"temperature": 0.8, "seed": 2, "top_p": 0.7, "max_draft_tokens": 1},
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "seed": 4, "min_p": 0.2, "logit_bias": {4: 3.0}, "max_tokens": 4},
    {"temperature": 0.0, "allowed_token_ids": [3, 5, 8, 13, 21], "bad_words": [[5, 8]]},
    {"temperature": 0.0, "max_draft_tokens": 0, "logprobs": 2},
]


@BEHIND
def test_every_request_of_a_mixed_batch_says_what_it_says_alone(behind: int | None) -> None:
    llm = tiny_llm(NGram(3, min_match=1, max_match=2), behind)
    params = [SamplingParams(**{"max_tokens": 9, "ignore_eos": True, **own}) for own in MIXED]
    prompts = [LONG[n : n + 12] for n in range(len(MIXED))]
    together = [result.outputs[0] for result in llm.generate(prompts, params)]
    alone = [shared().generate([prompt], own)[0].outputs[0] for prompt, own in zip(prompts, params)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert together[6].logprobs == alone[6].logprobs
    assert set(together[5].token_ids) <= {3, 5, 8, 13, 21}
    assert sum(together[6].stats.proposed) == 0 and len(together[2].stats.proposed) <= 1


@pytest.mark.parametrize("most, longest", [(0, 0), (2, 2), (9, 4), (None, 4)])
def test_a_request_may_ask_for_shorter_drafts(most: int | None, longest: int) -> None:
    drafter = Watched([PROMPT], 4)
    output = run(tiny_llm(drafter), PROMPT, temperature=0.0, max_tokens=12, max_draft_tokens=most)
    assert output.token_ids == plain(PROMPT, 12)
    assert len(output.stats.proposed) == longest == max((budget for _, budget in drafter.seen), default=0)
    if most == 0:
        assert {told.kind for told in output.provenance} == {"plain"} and output.stats.rounds == 12


@BEHIND
def test_the_drafter_may_change_in_the_middle_of_a_stream(behind: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = never_idle(tiny_llm(behind=behind), monkeypatch)
    turns: list[Any] = [Watched([LONG], 2), "suffix", None, NGram(2, max_match=1), Watched([LONG], 3)]
    tokens: list[list[int]] = [[], []]
    told: set[str | None] = set()
    for chunk in llm.stream(LONG, SamplingParams(temperature=0.0, max_tokens=20, n=2, ignore_eos=True)):
        tokens[chunk.index] += chunk.token_ids
        told |= {item.drafter for item in chunk.provenance}
        if turns and len(tokens[1]):
            llm.set_drafter(turns.pop(0))
    assert tokens == [plain(LONG, 20)] * 2
    assert not turns and told >= {None, "oracle"}


@BEHIND
def test_a_request_that_rules_out_every_token_ends_alone_with_a_sentence(behind: int | None) -> None:
    llm = tiny_llm(Watched([PROMPT, LONG], 3), behind)
    impossible = SamplingParams(temperature=0.0, allowed_token_ids=[4], bad_words=[[4]], max_tokens=5)
    good = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first, bad, last = (result.outputs[0] for result in llm.generate([PROMPT, LONG, LONG], [good, impossible, good]))
    assert (bad.finish_reason, bad.token_ids, bad.provenance) == ("error", [], [])
    assert bad.error is not None and "rule out every token" in bad.error and str(len(LONG)) in bad.error
    assert (first.token_ids, first.error) == (plain(PROMPT, 6), None)
    assert last.token_ids == plain(LONG, 6)
    assert_empty(llm)


@BEHIND
def test_a_request_that_runs_out_of_tokens_later_keeps_what_it_had(behind: int | None) -> None:
    llm = tiny_llm(behind=behind)
    output = run(
        llm, PROMPT, temperature=0.0, allowed_token_ids=[4, 6], bad_words=[[4, 4], [4, 6], [6, 6], [6, 4]], max_tokens=5
    )
    assert (output.finish_reason, len(output.token_ids), output.stats.tokens, len(output.provenance)) == (
        "error",
        1,
        1,
        1,
    )
    assert_empty(llm)


@pytest.mark.parametrize("collects", [False, True])
def test_only_young_garbage_is_collected_while_answers_are_made_and_afterwards_all_is_as_before(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    collected: list[int] = []

    def look(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return logits

    llm, before = tiny_llm(None), gc.isenabled()
    monkeypatch.setattr("paceline.llm.YOUNG", 2)
    monkeypatch.setattr(gc, "collect", collected.append)
    (gc.enable if collects else gc.disable)()
    try:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, logits_processors=[look]))
        assert seen and not any(seen)
        assert bool(collected) == collects and set(collected) <= {1}
        assert gc.isenabled() == collects, "what the caller wants of it stays so"
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("where", ["gc.disable", "LLM._take_turn", "LLM._drop"])
def test_wherever_ctrl_c_strikes_garbage_is_collected_afterwards_as_before(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, before, disable = tiny_llm(None), gc.isenabled(), gc.disable

    def strike(*given: object) -> None:
        if where == "gc.disable":
            disable()  # a signal is looked for behind a call, when that is done
        raise KeyboardInterrupt

    gc.enable()
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"paceline.llm.{where}", strike)
            llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
