"""The official client is the test client: what it asks for, it gets, and it gets the text that LLM gives."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline import LLM, NGram, SamplingParams
from tests.server.serving import NAME, Served

PROMPT = "the rider in front breaks the wind and the rider in front"
MESSAGES: Any = [{"role": "user", "content": "the rider in front"}]
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 11}, {"seed": 3}]
NAMES = ["greedy", "nucleus", "plain sampling"]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), NGram(min_match=1), device="cpu") as made:
        yield made


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai() as made:
        yield made


def whole(stream: Any, chat: bool = False) -> str:
    """A stream's text, its chunks checked on the way."""
    parts, reasons = [], []
    for chunk in stream:
        assert chunk.object == ("chat.completion.chunk" if chat else "text_completion") and chunk.model == NAME
        for choice in chunk.choices:
            parts.append((choice.delta.content or "") if chat else choice.text)
            reasons.append(choice.finish_reason)
    assert all(reason is None for reason in reasons[:-1]) and reasons[-1] in ("stop", "length")
    return "".join(parts)


@pytest.mark.parametrize("drafting", [True, False], ids=["with drafter", "without"])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_a_completion_is_the_text_of_the_library(
    client: openai.OpenAI, llm: LLM, settings: dict[str, Any], drafting: bool
) -> None:
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=40, **settings))[0].outputs[0]
    more = {} if drafting else {"speculation": {"enabled": False}}
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, **settings, "extra_body": more}
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert whole(client.completions.create(**asked, stream=True)) == expected.text


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_a_chat_is_the_text_of_the_library(client: openai.OpenAI, llm: LLM, settings: dict[str, Any]) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=40, **settings))[0].outputs[0]
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 40, **settings}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert whole(client.chat.completions.create(**asked, stream=True), chat=True) == expected.text


def test_the_async_client_streams_many_at_once(served: Served, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, seed=seed, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with served.openai_async() as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(12)))

    expected = [llm.generate(PROMPT, SamplingParams(max_tokens=24, seed=n))[0].outputs[0].text for n in range(12)]
    assert asyncio.run(everyone()) == expected


def test_several_answers_to_several_prompts_come_in_order(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [PROMPT, "a line of riders"]
    params = SamplingParams(max_tokens=12, n=3, seed=5)
    expected = [sample.text for output in llm.generate(prompts, params) for sample in output.outputs]
    asked: dict[str, Any] = {"model": NAME, "prompt": prompts, "max_tokens": 12, "n": 3, "seed": 5}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    texts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_a_prompt_may_be_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 8}
    assert client.completions.create(prompt=ids, **asked).choices[0].text == expected
    both = client.completions.create(prompt=[ids, ids], **asked).choices
    assert [choice.text for choice in both] == [expected] * 2


def test_echo_puts_the_prompt_before_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == PROMPT + text
    assert whole(client.completions.create(**asked, echo=True, stream=True)) == PROMPT + text


def test_echo_with_logprobs_tells_the_prompts_too(client: openai.OpenAI, llm: LLM) -> None:
    """As evaluation harnesses ask: how likely is this text?"""
    scored = llm.score(PROMPT)[0]
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2}
    alone = client.completions.create(**asked, max_tokens=0)
    choice: Any = alone.choices[0]
    told = choice.logprobs
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    assert told.tokens == [llm.tokenizer.decode([token]) for token in scored.token_ids]
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(scored.logprobs)
    assert all(len(entry) in (2, 3) for entry in told.top_logprobs[1:])
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    assert "prompt_logprobs" not in (choice.model_extra or {})  # vLLM's own field was not asked for

    longer: Any = client.completions.create(**asked, max_tokens=4).choices[0]
    count = len(scored.token_ids)
    assert longer.logprobs.tokens[:count] == told.tokens and len(longer.logprobs.tokens) == count + 4
    assert longer.text.startswith(PROMPT) and None not in longer.logprobs.token_logprobs[1:]
    for most in (0, 4):
        chunks = [one.choices[0] for one in client.completions.create(**asked, max_tokens=most, stream=True)]
        assert [token for one in chunks if one.logprobs for token in one.logprobs.tokens or []] == (
            longer.logprobs.tokens[: count + most]
        )


def test_an_echo_of_token_ids_needs_no_further_token(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    asked: dict[str, Any] = {"model": NAME, "prompt": [ids, ids[:4]], "max_tokens": 0, "echo": True}
    first, second = client.completions.create(**asked, stop=["e"]).choices
    assert first.text == llm.tokenizer.decode(ids) and second.text == llm.tokenizer.decode(ids[:4])
    assert first.logprobs is None and first.finish_reason == second.finish_reason == "length"


def test_logprobs_of_a_completion_are_those_of_the_library(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, seed=2, logprobs=3)
    expected = llm.generate(PROMPT, params)[0].outputs[0]
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 10, "seed": 2, "logprobs": 3}
    told: Any = client.completions.create(**asked).choices[0].logprobs
    own = [entry[token] for token, entry in zip(expected.token_ids, expected.logprobs or [])]
    assert told.tokens == [one.decoded_token for one in own]
    assert told.token_logprobs == pytest.approx([one.logprob for one in own])
    assert [max(entry.values()) for entry in told.top_logprobs] == pytest.approx(
        [max(one.logprob for one in entry.values()) for entry in expected.logprobs or []]
    )
    assert told.text_offset[0] == 0 and told.text_offset == sorted(told.text_offset)
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    assert [token for part in streamed if part for token in part.tokens] == told.tokens
    assert [place for part in streamed if part for place in part.text_offset] == told.text_offset


def test_logprobs_of_a_chat_name_the_alternatives(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=10, seed=2, logprobs=2))[0].outputs[0]
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 10, "seed": 2, "logprobs": True}
    told: Any = client.chat.completions.create(**asked, top_logprobs=2).choices[0].logprobs
    own = [entry[token] for token, entry in zip(expected.token_ids, expected.logprobs or [])]
    assert [one.logprob for one in told.content] == pytest.approx([one.logprob for one in own])
    for one, entry in zip(told.content, expected.logprobs or []):
        ranked = list(one.top_logprobs)
        assert len(ranked) == 2 and bytes(ranked[0].bytes).decode() == ranked[0].token
        best = sorted((other.logprob for other in entry.values()), reverse=True)[:2]
        assert [other.logprob for other in ranked] == pytest.approx(best)
    alone: Any = client.chat.completions.create(**asked).choices[0].logprobs
    assert [one.logprob for one in alone.content] == pytest.approx([one.logprob for one in own])
    assert all(one.top_logprobs == [] for one in alone.content)
    streamed = client.chat.completions.create(**asked, top_logprobs=2, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [one for part in parts if part for one in part.content or []] == told.content


def test_logprobs_of_the_prompt_are_told_as_vllm_tells_them(served: Served, llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    expected = [llm.generate(PROMPT, params)[0].prompt_logprobs, llm.chat(MESSAGES, params)[0].prompt_logprobs]
    asked: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    completion = served.post("/v1/completions", {"prompt": PROMPT, **asked, "n": 2}).json()
    chat = served.post("/v1/chat/completions", {"messages": MESSAGES, **asked}).json()
    assert completion["choices"][0]["prompt_logprobs"] == completion["choices"][1]["prompt_logprobs"]
    for told, own in zip((completion["choices"][0], chat), expected):
        assert own is not None and told["prompt_logprobs"][0] is own[0] is None
        for entry, known in zip(told["prompt_logprobs"][1:], own[1:], strict=True):
            assert known is not None and entry.keys() == {str(token) for token in known}
            for token, one in known.items():
                assert entry[str(token)]["logprob"] == pytest.approx(one.logprob)
                assert (entry[str(token)]["rank"], entry[str(token)]["decoded_token"]) == (one.rank, one.decoded_token)


def test_a_stop_text_ends_the_answer_and_is_named(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=4)
    text = llm.generate(PROMPT, params)[0].outputs[0].text
    stop = text[5:8]
    before = text[: text.index(stop)]
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "seed": 4}
    for given in (stop, ["never said at all", stop]):
        choice: Any = client.completions.create(**asked, stop=given).choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (before, "stop", stop)
    assert whole(client.completions.create(**asked, stop=stop, stream=True)) == before
    kept = client.completions.create(**asked, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == before + stop


def test_the_usage_comes_last_where_it_was_asked_for(client: openai.OpenAI, llm: LLM) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 9, "stream": True}
    assert all(chunk.usage is None and chunk.choices for chunk in client.completions.create(**asked))
    *chunks, last = client.completions.create(**asked, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(llm.tokenizer.encode(PROMPT))
    assert last.usage.completion_tokens <= 9
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


EXTENSIONS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"min_p": 0.2},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.7},
    {"logit_bias": {"40": 5.0, "41": -100.0}},
    {"bad_words": ["rider", "the"]},
    {"allowed_token_ids": [40, 41, 42, 60, 61]},
    {"min_tokens": 20, "stop_token_ids": [40, 41, 42, 43, 44, 45]},
    {"stop_token_ids": list(range(30, 90))},
    {"ignore_eos": True},
    {"skip_special_tokens": False},
    {"max_draft_tokens": 1},
]


@pytest.mark.parametrize("given", EXTENSIONS, ids=lambda given: " and ".join(given))
def test_every_sampling_parameter_of_ours_is_passed_on(client: openai.OpenAI, llm: LLM, given: dict[str, Any]) -> None:
    own = (
        {**given, "logit_bias": {int(k): v for k, v in given["logit_bias"].items()}} if "logit_bias" in given else given
    )
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=24, seed=9, **own))[0].outputs[0]
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=24, seed=9, extra_body=given)
    assert answer.choices[0].text == expected.text and answer.choices[0].finish_reason == expected.finish_reason


def test_every_sampling_parameter_has_a_test_here(served: Served) -> None:
    """But functions, which do not travel as JSON, and whether there is a text: here there always is."""
    document = served.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"]
    fields = {name for name, item in SamplingParams.__dataclass_fields__.items() if item.init}
    fields -= {"logits_processors", "detokenize"}
    assert fields <= document.keys()
    source = Path(__file__).read_text()
    assert all(f'"{name}"' in source or f"{name}=" in source for name in fields)


def test_speculation_is_turned_off_or_down_by_a_request(client: openai.OpenAI) -> None:
    def spent(**speculation: Any) -> dict[str, Any]:
        more = {"speculation": speculation} if speculation else {}
        asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        answer: Any = client.completions.create(model=NAME, **asked, extra_body={**more, "ignore_eos": True})
        told: dict[str, Any] = answer.usage.speculation
        assert answer.usage.completion_tokens == 60
        return told

    free, off, little = spent(), spent(enabled=False), spent(max_draft_tokens=2)
    assert free["drafted_tokens"] > 0 and free["target_forwards"] < 60
    assert free["tokens_per_forward"] == pytest.approx(60 / free["target_forwards"], abs=1e-4)
    assert off["drafted_tokens"] == 0 and off["target_forwards"] == 60
    assert len(little["drafted_by_position"]) == 2 < len(free["drafted_by_position"])
    assert free["accepted_tokens"] == sum(free["accepted_by_position"])


def test_the_usage_tells_accepted_and_rejected_drafts_as_openai_does(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    usage: Any = client.completions.create(model=NAME, **asked).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == usage.speculation["accepted_tokens"]
    drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert drafted == usage.speculation["drafted_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_provenance_tells_where_each_token_came_from(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": stream}
    got: Any = client.completions.create(
        model=NAME, **asked, extra_body={"return_provenance": True, "ignore_eos": True}
    )
    choices = [chunk.choices[0] for chunk in got] if stream else got.choices
    origins = [one for choice in choices for one in choice.provenance]
    assert len(origins) == 60
    assert "".join(one["text"] for one in origins) == "".join(choice.text for choice in choices)
    kinds = {one["kind"] for one in origins}
    assert "accepted" in kinds and kinds <= {"accepted", "corrected", "bonus", "plain"}
    assert all((one["drafter"] == "ngram") == (one["kind"] == "accepted") for one in origins)


def test_the_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == [NAME, "other"]
    assert all(model.object == "model" for model in listed)
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_a_served_name_is_the_answers_name_and_default_is_always_one(client: openai.OpenAI) -> None:
    assert client.completions.create(model="other", prompt="a", max_tokens=1).model == "other"
    assert client.completions.create(model="default", prompt="a", max_tokens=1).model == NAME


def test_a_client_whose_base_address_is_the_chat_route_gets_completions(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.address}/v1/chat/completions", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="default", prompt="hello", max_tokens=3)
        assert answer.object == "text_completion" and answer.usage is not None
        chat = client.chat.completions.create(model="default", messages=MESSAGES, max_tokens=3)
        assert chat.object == "chat.completion"


def test_one_text_in_place_of_messages_is_a_users_message(served: Served, llm: LLM) -> None:
    expected = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=6))[0]
    body = {"model": "default", "text": "Hello"}
    assert served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["role"] == "assistant"
    told = served.post("/v1/chat/completions", {**body, "temperature": 0, "max_tokens": 6}).json()
    assert told["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_a_conversation_may_be_given_in_parts_and_go_on(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "the rider"}]}]
    expected = llm.chat([{"role": "user", "content": "the rider"}], params)[0].outputs[0].text
    asked: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": 5}
    assert client.chat.completions.create(messages=parts, **asked).choices[0].message.content == expected
    open_end: Any = [*MESSAGES, {"role": "assistant", "content": "the line"}]
    how = {"continue_final_message": True, "add_generation_prompt": False}
    on = client.chat.completions.create(messages=open_end, extra_body=how, **asked).choices[0].message.content
    assert on == llm.chat(open_end, params, **how)[0].outputs[0].text
