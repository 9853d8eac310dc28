"""`logits_processors`: users' functions, called for every row with its history; no drafter changes text or error."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.outputs import CompletionOutput
from paceline.sampling.rules import RULES
from tests.drafters.contract import DRAFTERS, SETTINGS, plain, prompts
from tests.fakes import VOCAB, Recorded, Replay, check_books, tiny_llm


def lean(output: list[int], logits: Tensor) -> Tensor:
    """Depends on all of the output: one token more, or in another place, and it favours others."""
    favoured = sum((place + 3) * token for place, token in enumerate(output)) % VOCAB
    logits[favoured] += 4.0
    logits[output[-2:]] = float("-inf")
    return logits


def lean_on_prompt(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    logits = logits.clone()
    logits[(sum(prompt) + len(output)) % VOCAB] += 3.0
    prompt.clear()  # its own copies
    output.clear()
    return logits


def with_functions(setting: str, *functions: Any, **changes: Any) -> SamplingParams:
    return dataclasses.replace(SETTINGS[setting], logits_processors=functions, **changes)


def ask(llm: LLM, batch: int, params: Any) -> list[CompletionOutput]:
    outputs = [output.outputs[0] for output in llm.generate(prompts(batch), params)]
    check_books(llm)
    assert not llm.engine.has_work and llm.engine.table.num_free == llm.options.max_num_seqs
    return outputs


def tokens_of(outputs: list[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def undrafted(batch: int, params: SamplingParams) -> list[list[int]]:
    return tokens_of(ask(tiny_llm(), batch, params))


@functools.cache
def leaning(batch: int, setting: str) -> list[list[int]]:
    return undrafted(batch, with_functions(setting, lean, lean_on_prompt))


def known(batch: int, said: list[list[int]]) -> Recorded:
    return {tuple(prompt): prompt + own for prompt, own in zip(prompts(batch), said)}


@pytest.mark.parametrize("number, name", list(enumerate(DRAFTERS)))
def test_a_drafter_changes_no_token_of_a_request_with_functions(number: int, name: str) -> None:
    """With batches, settings and a device behind in turn."""
    batch, setting, behind = (1, 3)[number % 2], list(SETTINGS)[number % 3], (None, 1, 2)[number // 2 % 3]
    params = with_functions(setting, lean, lean_on_prompt)
    wanted = leaning(batch, setting)
    assert wanted != plain(batch, setting), "the functions must matter"
    llm = tiny_llm(DRAFTERS[name](known(batch, wanted)), behind, block_size=4)
    assert tokens_of(ask(llm, batch, params)) == wanted


@pytest.mark.parametrize("behind", [None, 2])
@pytest.mark.parametrize("trees", [False, True])
def test_functions_see_each_nodes_own_history_and_what_they_favour_is_accepted(trees: bool, behind: int | None) -> None:
    wanted = leaning(3, "seeded")
    replay = Replay(known(3, wanted), seed=1, trees=trees)
    assert tokens_of(ask(tiny_llm(replay, behind), 3, with_functions("seeded", lean, lean_on_prompt))) == wanted
    assert max(replay.histogram.lengths) >= 3, "drafts must be accepted for this to say anything"


def test_the_text_is_that_of_a_loop_that_asks_for_one_token_at_a_time() -> None:
    llm, prompt = tiny_llm(), prompts(1)[0]
    heard: list[tuple[int, ...]] = []

    def listen(output: list[int], logits: Tensor) -> Tensor:
        heard.append(tuple(output))
        return lean(output, logits)

    (said,) = undrafted(1, with_functions("greedy", listen))
    assert heard == [tuple(said[:count]) for count in range(len(said))]
    output: list[int] = []
    while len(output) < 6:
        one = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
        (answer,) = llm.generate([prompt + output], one)
        (told,) = answer.outputs[0].logprobs or ()
        raw = torch.tensor([told[token].logprob for token in range(VOCAB)])
        output.append(int(lean(output, raw).argmax()))
    assert output == said[:6]


def test_requests_without_functions_say_in_one_batch_what_they_say_alone() -> None:
    mixed = [SETTINGS["seeded"], with_functions("seeded", lean), SETTINGS["greedy"]]
    found = tokens_of(ask(tiny_llm(), 3, mixed))
    assert [found[0], found[2]] == [plain(3, "seeded")[0], plain(3, "greedy")[2]]
    assert found[1] == undrafted(3, mixed[1])[1]


def test_what_is_not_allowed_stays_so_whatever_a_function_says() -> None:
    def insist(output: list[int], logits: Tensor) -> Tensor:
        logits[40] = 1e9
        return logits

    (said,) = undrafted(1, with_functions("greedy", insist, allowed_token_ids=[3, 4, 5]))
    assert set(said) <= {3, 4, 5}
    assert set(undrafted(1, with_functions("greedy", insist))[0]) == {40}


# Errors


def failing_after(count: int) -> Any:
    def fail(output: list[int], logits: Tensor) -> Tensor:
        if len(output) == count:
            raise KeyError("no such state")
        return logits

    return fail


@pytest.mark.parametrize("behind", [None, 1, 2])
@pytest.mark.parametrize("name", [None, "oracle", "replay_tree", "draft_is_target"])
def test_a_function_that_fails_ends_its_request_alone_and_the_same_under_every_drafter(
    name: str | None, behind: int | None
) -> None:
    llm = tiny_llm(None if name is None else DRAFTERS[name](known(3, plain(3, "seeded"))), behind)
    failing = with_functions("seeded", failing_after(5))
    first, second, third = ask(llm, 3, [SETTINGS["seeded"], failing, SETTINGS["seeded"]])
    assert tokens_of([first, third]) == [plain(3, "seeded")[0], plain(3, "seeded")[2]]
    assert second.finish_reason == "error" and second.token_ids == plain(3, "seeded")[1][:5]
    assert second.error == "logits_processors[0] failed after 5 tokens of output: KeyError: 'no such state'"


@pytest.mark.parametrize("name", ["hopeless", "hopeless_tree", "replay_tree", "ngram"])
def test_a_function_may_fail_on_what_nobody_says(name: str) -> None:
    """Drafts show it histories that plain decoding never has; those end nothing."""
    texts, failed = known(3, plain(3, "seeded")), 0

    def pick_at(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        nonlocal failed
        said = texts[tuple(prompt)][len(prompt) :]
        if output != said[: len(output)]:
            failed += 1
            raise ValueError("this was never said")
        return logits

    assert tokens_of(ask(tiny_llm(DRAFTERS[name](texts)), 3, with_functions("seeded", pick_at))) == plain(3, "seeded")
    assert failed > 0, "the drafter must propose something wrong"


@pytest.mark.parametrize(
    "returned, said",
    [
        (lambda logits: None, "not NoneType"),
        (lambda logits: logits.tolist(), "not list"),
        (lambda logits: logits[:-1], f"not torch.float32 [{VOCAB - 1}]"),
        (lambda logits: logits[None], f"not torch.float32 [1, {VOCAB}]"),
        (lambda logits: logits.long(), f"not torch.int64 [{VOCAB}]"),
    ],
)
def test_what_is_no_row_of_logits_ends_the_request_with_a_sentence(returned: Any, said: str) -> None:
    (output,) = ask(tiny_llm(), 1, with_functions("greedy", lambda output, logits: returned(logits)))
    wanted = f"TypeError: it must return {VOCAB} logits as a float tensor, {said}"
    assert output.error == f"logits_processors[0] failed after 0 tokens of output: {wanted}"
    assert output.finish_reason == "error" and output.token_ids == []


def test_other_float_types_are_taken() -> None:
    params = with_functions("greedy", lambda output, logits: logits.double())
    assert undrafted(1, params) == plain(1, "greedy")


def test_a_function_that_calls_the_engine_is_told_so() -> None:
    llm = tiny_llm()

    def call(output: list[int], logits: Tensor) -> Tensor:
        llm.generate([[5]], SETTINGS["greedy"])
        return logits

    (output,) = ask(llm, 1, with_functions("greedy", call))
    assert "the engine was called from inside one of its own rounds" in (output.error or "")


def test_samples_of_one_request_each_have_their_own_history() -> None:
    params = with_functions("seeded", lean, n=3)
    (wanted,) = tiny_llm().generate([prompts(1)[0]], params)
    llm = tiny_llm(DRAFTERS["ngram"]({}), block_size=4)
    (found,) = llm.generate([prompts(1)[0]], params)
    texts = [output.token_ids for output in found.outputs]
    assert texts == [output.token_ids for output in wanted.outputs] and len({tuple(text) for text in texts}) == 3


@pytest.mark.parametrize("rule", RULES)
def test_a_function_that_fails_ends_its_request_under_every_acceptance_rule(rule: str) -> None:
    llm = tiny_llm(DRAFTERS["draft_is_target"]({}), acceptance=rule)
    output, other = ask(llm, 3, [with_functions("seeded", failing_after(5)), *[SETTINGS["seeded"]] * 2])[:2]
    assert output.finish_reason == "error" and len(output.token_ids) == 5 and "no such state" in (output.error or "")
    assert other.finish_reason == "length"
