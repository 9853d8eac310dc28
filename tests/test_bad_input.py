"""Whatever is wrong is refused in one sentence that says what was given and what is allowed; the engine goes on."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline import LLM, DraftModel, FirstOf, NGram, PacelineError, SamplingParams, Suffix
from paceline.errors import OptionError, VocabularyError
from tests.fakes import Hopeless, tiny_llm, tiny_model
from tests.sentences import assert_sentence
from tests.tokens import NUM_IDS, tokenizer

PROMPT = [5, 9, 22]


def assert_works(llm: LLM) -> None:
    assert not llm.engine.has_work and not llm._live, "a refused request was left behind"
    output = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert output.token_ids == expected() and output.finish_reason == "length"
    llm.engine.scheduler.pool.check()


@functools.cache
def expected() -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, tiny_model()(ids).logits[:, -1].argmax(1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, 3:]]


@functools.cache
def engine() -> LLM:
    return tiny_llm(max_model_len=32)


# Prompts.

PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty": ([[]], ("empty", "at least one token")),
    "too long": ([[1] * 32], ("32 tokens", "max_model_len=32", "31")),
    "id too high": ([[1, 97]], ("97", "0 to 96")),
    "negative id": ([[1, -1]], ("-1", "0 to 96")),
    "text without tokenizer": ("hello", ("no tokenizer", "token ids")),
    "a number": (5, ("int",)),
    "None": (None, ("NoneType",)),
    "floats": ([[1.5, 2.0]], ("1.5", "token ids")),
    "booleans": ([[True]], ("True", "token ids")),
    "text among ids": ([1, "a"], ("token ids",)),
    "wrong dictionary": ({"text": "hello"}, ("'text'", "'prompt'", "'prompt_token_ids'")),
    "nested": ([[[1]]], ("token ids",)),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_bad_prompt_is_refused_and_the_next_one_served(name: str) -> None:
    given, named = PROMPTS[name]
    with pytest.raises(OptionError) as caught:
        engine().generate(given)
    assert_sentence(caught.value, *named)
    assert_works(engine())


def test_one_bad_prompt_among_good_ones_starts_none_of_them() -> None:
    with pytest.raises(OptionError, match="97"):
        engine().generate([PROMPT, [97], PROMPT])
    assert_works(engine())


def test_one_request_with_unusable_words_starts_none_of_the_others() -> None:
    llm = tiny_llm(max_model_len=32)
    with pytest.raises(OptionError, match="no tokenizer"):
        llm.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(bad_words=["no"])])
    assert_works(llm)


@pytest.mark.parametrize("given", [[], [PROMPT, PROMPT]])
def test_a_stream_of_no_prompt_or_two_is_refused(given: Any) -> None:
    with pytest.raises(PacelineError) as caught:
        next(engine().stream(given))
    assert_sentence(caught.value)


@pytest.mark.parametrize("given", [[SamplingParams()] * 2, ["hot"], [{"temperature": 0}]])
def test_wrong_sampling_params_are_refused(given: Any) -> None:
    with pytest.raises(OptionError) as caught:
        engine().generate([PROMPT], given)
    assert_sentence(caught.value)
    assert_works(engine())


CLASSES: dict[str, tuple[Any, str]] = {
    "drafter": (lambda: engine().set_drafter(Suffix), "the class Suffix itself; write Suffix(…)"),
    "a drafter among others": (lambda: engine().set_drafter(FirstOf(NGram(), Suffix)), "write Suffix(…)"),
    "a new engine's drafter": (lambda: LLM(tiny_model(), drafter=NGram), "write NGram(…)"),
    "one beside its length": (lambda: LLM(tiny_model(), drafter=NGram, num_draft_tokens=3), "write NGram(…)"),
    "sampling_params": (lambda: engine().generate([PROMPT], SamplingParams), "write SamplingParams(…)"),
    "sampling_params in a list": (lambda: engine().generate([PROMPT], [SamplingParams]), "write SamplingParams(…)"),
    "model": (lambda: LLM(type(tiny_model())), "the class LlamaForCausalLM itself"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_where_an_object_was_wanted_is_named(name: str) -> None:
    call, said = CLASSES[name]
    with pytest.raises(OptionError) as caught:
        call()
    assert_sentence(caught.value, said)
    assert_works(engine())


def test_empty_prompts_are_refused_alike_and_so_is_half_a_character() -> None:
    model, given = tiny_model(vocab=NUM_IDS), {"tokenizer": tokenizer(), "kernels": "reference", "max_model_len": 64}
    llm, raw = LLM(model, prompt_template="Q: {input_text}", **given), LLM(model, **given)
    half = ("U+DC9F", "half a surrogate pair")
    for call, named in (
        (lambda: raw.generate(""), ("the prompt is empty",)),
        (lambda: raw.generate({"prompt": ""}), ("the prompt is empty",)),
        (lambda: llm.generate(" "), ("the prompt is empty",)),
        (lambda: llm.chat([{"role": "user", "content": "\n"}]), ("the prompt is empty",)),
        (lambda: next(llm.stream([{"role": "user", "content": ""}])), ("the prompt is empty",)),
        (lambda: raw.generate("a\udc9f"), half),
        (lambda: llm.chat([{"role": "user", "content": "\udc9f"}]), half),
        (lambda: SamplingParams(stop=["a", "b\udc9f"]), half),
        (lambda: SamplingParams(bad_words=["\udc9f"]), half),
    ):
        with pytest.raises(OptionError) as caught:
            call()
        assert_sentence(caught.value, *named)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = SamplingParams(
        temperature=np.float32(0),
        top_k=np.int64(3),
        seed=np.int32(4),
        logit_bias={np.int64(4): np.float64(1)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(temperature=0.0, top_k=3, seed=4, logit_bias={4: 1.0})
    assert given == plain and repr(given) == repr(plain)
    same = [SamplingParams(stop_token_ids=ids) for ids in ([1, 2], np.array([1, 2]), [np.int64(1), np.uint8(2)])]
    assert same[0] == same[1] == same[2]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for prompt in (PROMPT, np.array(PROMPT), torch.tensor(PROMPT), [np.int64(token) for token in PROMPT]):
        assert engine().generate(prompt, params)[0].outputs[0].token_ids == expected()
    assert tiny_llm(max_model_len=np.int64(32)).max_model_len == 32
    assert NGram(np.int64(3)) == NGram(3)
    for wrong in (np.float32(1.5), np.bool_(True), np.array([[1]])):
        with pytest.raises(OptionError, match="top_k="):
            SamplingParams(top_k=wrong)  # type: ignore[arg-type]


# Sampling parameters.

PARAMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": math.nan}, ("temperature=nan", "from 0")),
    ({"temperature": -0.1}, ("temperature=-0.1", "from 0")),
    ({"temperature": "hot"}, ("temperature='hot'", "number")),
    ({"temperature": True}, ("temperature=True", "number")),
    ({"temperature": math.inf}, ("temperature=inf",)),
    ({"top_p": 0.0}, ("top_p=0.0", "above 0 up to 1")),
    ({"top_p": 1.1}, ("top_p=1.1", "up to 1")),
    ({"min_p": 2}, ("min_p=2", "up to 1")),
    ({"top_k": -2}, ("top_k=-2", f"-1 to {2**63 - 1}")),
    ({"top_k": 1.5}, ("top_k=1.5", "whole number")),
    ({"presence_penalty": 3.0}, ("presence_penalty=3.0", "2")),
    ({"frequency_penalty": None}, ("frequency_penalty=None",)),
    ({"repetition_penalty": 0.0}, ("repetition_penalty=0.0", "from 1e-06")),
    ({"max_tokens": 0}, ("max_tokens=0", "1 or more")),
    ({"max_tokens": "9"}, ("max_tokens='9'", "whole number")),
    ({"min_tokens": 9, "max_tokens": 4}, ("min_tokens=9", "max_tokens=4")),
    ({"n": 0}, ("n=0", "1 or more")),
    ({"seed": 2**64}, (f"seed={2**64}",)),
    ({"seed": 1.0}, ("seed=1.0", "whole number")),
    ({"logprobs": -1}, ("logprobs=-1", "0 or more")),
    ({"prompt_logprobs": 1001}, ("prompt_logprobs=1001", "0 to 1000")),
    ({"max_draft_tokens": -1}, ("max_draft_tokens=-1", "0 or more")),
    ({"stop": ""}, ("stop=''", "non-empty")),
    ({"stop": ["a", 5]}, ("stop=['a', 5]",)),
    ({"stop_token_ids": [-1]}, ("stop_token_ids=[-1]", "token ids")),
    ({"allowed_token_ids": []}, ("allowed_token_ids=[]", "at least one")),
    ({"allowed_token_ids": ["a"]}, ("allowed_token_ids=['a']",)),
    ({"logit_bias": {1: math.nan}}, ("logit_bias", "nan", "token id → number")),
    ({"logit_bias": {"a": 1.0}}, ("logit_bias", "'a'")),
    ({"bad_words": "word"}, ("bad_words='word'", "list")),
    ({"bad_words": [[]]}, ("bad_words=[[]]", "a list of non-empty words")),
]


@pytest.mark.parametrize("given, named", PARAMS, ids=lambda value: str(value)[:40])
def test_a_bad_sampling_parameter_is_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**given)
    assert_sentence(caught.value, *named)


@pytest.mark.parametrize(
    "given",
    [
        {"stop": 5},
        {"stop_token_ids": 5},
        {"allowed_token_ids": 5},
        {"bad_words": [5]},
        {"logit_bias": [1]},
        {"logit_bias": {1: "much"}},
    ],
    ids=str,
)
def test_a_sampling_parameter_of_the_wrong_kind_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**given)
    assert_sentence(caught.value, next(iter(given)))


@pytest.mark.parametrize(
    "given, named",
    [
        ({"allowed_token_ids": [97]}, ("allowed_token_ids", "97", "0 to 96")),
        ({"stop_token_ids": [500]}, ("stop_token_ids", "500", "0 to 96")),
        ({"logit_bias": {97: 1.0}}, ("logit_bias", "97", "0 to 96")),
        ({"bad_words": [[1, 97]]}, ("bad_words", "97", "0 to 96")),
        ({"bad_words": ["word"]}, ("bad_words", "'word'", "no tokenizer")),
        ({"stop": "word"}, ("stop='word'", "no tokenizer", "stop_token_ids")),
    ],
    ids=str,
)
def test_a_parameter_the_model_cannot_serve_is_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        engine().generate([PROMPT], SamplingParams(**given))
    assert_sentence(caught.value, *named)
    assert_works(engine())


# Engine options.

OPTIONS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"max_modle_len": 32}, ("'max_modle_len'", "max_model_len")),
    ({"qqqqqq": 1}, ("'qqqqqq'", "known:")),
    ({"tensor_parallel_size": 2}, ("tensor_parallel_size=2", "allowed: 1")),
    ({"device": "tpu9"}, ("'tpu9'", "cpu", "cuda")),
    ({"dtype": "float7"}, ("'float7'", "float16", "bfloat16", "float32")),
    ({"gpu_memory_utilization": 1.5}, ("gpu_memory_utilization=1.5", "above 0 up to 1")),
    ({"gpu_memory_utilization": 0}, ("gpu_memory_utilization=0", "above 0 up to 1")),
    ({"gpu_memory_utilization": "all"}, ("gpu_memory_utilization='all'",)),
    ({"max_num_seqs": 0}, ("max_num_seqs=0", "1 or more")),
    ({"block_size": 16.0}, ("block_size=16.0", "whole number")),
    ({"max_model_len": 10_000}, ("max_model_len=10000", "256")),
    ({"max_model_len": 1}, ("max_model_len=1",)),
    ({"num_pages": 2}, ("num_pages=2", "14 pages of 16")),
    ({"acceptance": "maybe"}, ("acceptance='maybe'", "exact", "rejection", "block", "typical")),
    ({"seed": -(2**63) - 1}, (f"seed={-(2**63) - 1}", f"{-(2**63)} to {2**64 - 1}")),
    ({"seed": 2**64}, (f"seed={2**64}", f"{-(2**63)} to {2**64 - 1}")),
    ({"kernels": "magic"}, ("kernels='magic'", "reference")),
    ({"drafter": 5}, ("drafter=5", "ngram", "suffix")),
    ({"prompt_template": "nothing like it"}, ("prompt_template='nothing like it'", "llama", "vicuna", "{input_text}")),
]


@pytest.mark.parametrize("given, named", OPTIONS, ids=lambda value: str(value)[:40])
def test_a_bad_engine_option_is_refused(given: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        tiny_llm(**given)
    assert_sentence(caught.value, *named)


@pytest.mark.parametrize(
    "given", [{"seed": "x"}, {"prompt_template": 5}, {"prompt_template": "x" * 300}, {"dtype": []}], ids=str
)
def test_an_engine_option_of_the_wrong_kind_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(PacelineError) as caught:
        tiny_llm(**given)
    assert_sentence(caught.value, next(iter(given)))


@pytest.mark.parametrize("given", [5, None, {"a": 1}])
def test_a_model_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(OptionError) as caught:
        LLM(given)
    assert_sentence(caught.value, type(given).__name__, "path")


def test_first_of_needs_two_drafters() -> None:
    for given in ((), (NGram(),)):
        with pytest.raises(OptionError) as caught:
            FirstOf(*given)
        assert_sentence(caught.value, "two drafters or more", f"got {len(given)}")
    with pytest.raises(OptionError) as caught:
        FirstOf(NGram(), None)
    assert_sentence(caught.value, "None")


def test_block_acceptance_refuses_a_drafter_of_trees_and_keeps_the_one_it_has() -> None:
    llm = tiny_llm(NGram(2), acceptance="block", max_model_len=32)
    before = llm.engine.drafter
    with pytest.raises(OptionError) as caught:
        llm.set_drafter(Hopeless({}, 4, trees=True))
    assert_sentence(caught.value, "acceptance='block'", "'hopeless'", "trees")
    with pytest.raises(OptionError):
        llm.set_drafter(FirstOf(Suffix(), Hopeless({}, 4, trees=True)))
    assert llm.engine.drafter is before
    assert_works(llm)


class Failing(NGram):
    """A drafter with a bug in it, once."""

    def create(self) -> Any:
        made = super().create()
        propose, left = made.propose, [1]

        def fail_once(context: Any) -> Any:
            if left:
                left.pop()
                raise RuntimeError("a bug in the drafter")
            return propose(context)

        made.propose = fail_once  # type: ignore[method-assign]
        return made


def test_after_a_round_that_failed_the_engine_serves_the_next_request() -> None:
    llm = tiny_llm(Failing(2), max_model_len=32)
    with pytest.raises(RuntimeError, match="a bug in the drafter"):
        llm.generate([PROMPT], SamplingParams(ignore_eos=True))  # an end at once would ask no drafter
    assert_works(llm)


def test_a_draft_model_with_another_vocabulary_is_refused_naming_the_first_id_that_differs() -> None:
    llm = LLM(tiny_model(vocab=NUM_IDS), None, tokenizer(), kernels="reference", max_model_len=32)
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=swapped(tokenizer().backend_tokenizer, 40, 41))
    with pytest.raises(VocabularyError) as caught:
        llm.set_drafter(DraftModel(tiny_model(layers=1, vocab=NUM_IDS), tokenizer=other))
    assert_sentence(caught.value, "id 40", "cross_vocabulary=True")
    assert llm.engine.drafter is None
    assert len(llm.generate([PROMPT], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3


def swapped(backend: Any, one: int, other: int) -> Any:
    """A copy of a tokenizer in which two tokens have changed places."""
    from tokenizers import Tokenizer

    data = json.loads(backend.to_str())
    vocab = data["model"]["vocab"]
    first, second = (next(text for text, index in vocab.items() if index == wanted) for wanted in (one, other))
    vocab[first], vocab[second] = other, one
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("given", [5, {"a": 1}, dict])
def test_what_is_no_tokenizer_is_refused_when_the_model_is_loaded(given: Any) -> None:
    with pytest.raises(OptionError, match="tokenizer must be a name, a path or a tokenizer, not"):
        LLM(tiny_model(), tokenizer=given)


def test_a_text_where_messages_were_wanted_is_refused_by_what_it_is() -> None:
    with pytest.raises(OptionError, match="messages must be a list of messages, or of such lists, not 'Hi'"):
        tiny_llm().chat("Hi", max_tokens=1)  # type: ignore[arg-type]
