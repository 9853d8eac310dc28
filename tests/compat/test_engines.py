"""A whole engine, asked in other systems' words."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, FirstOf, NGram, SamplingParams, Suffix
from paceline.compat import translate
from paceline.errors import OptionError
from tests.cli.checkpoints import make_model, make_tokenizer
from tests.compat.probe import KNOWN, PROMPT
from tests.fakes import tiny_llm, tiny_model


def test_our_own_options_pass_untouched() -> None:
    given = {"dtype": "float32", "drafter": "ngram", "prefix_caching": False}
    assert translate(given, KNOWN) == given
    assert translate({"drafter": None}, KNOWN) == {"drafter": None}


def test_an_engine_understands_foreign_spellings(caplog: pytest.LogCaptureFixture) -> None:
    given = {"model": tiny_model(layers=1), "num_speculative_tokens": 2}
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = tiny_llm(
            speculative_config=given,
            enable_prefix_caching=False,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=20,
            enforce_eager=True,
            swap_space=4,
        )
    drafter, scheduler = llm.engine.drafter, llm.engine.scheduler
    assert drafter is not None and (drafter.name, drafter.max_nodes) == ("draft_model", 2)
    assert (scheduler.prefix_caching, scheduler.max_batched_tokens, scheduler.pool.num_pages) == (False, 32, 20)
    assert llm.options.enforce_eager and "swap_space" in caplog.text


def test_a_colossal_script_runs_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """A loaded model and tokenizer, a template, a config for each call, and a drafter switched on and off between."""
    tokenizer = make_tokenizer()
    model, draft = make_model(len(tokenizer)), make_model(len(tokenizer), seed=1)
    engine = LLM(
        model,
        tokenizer=tokenizer,
        dtype=torch.float32,
        max_batch_size=4,
        max_input_len=160,
        max_output_len=40,
        prefill_ratio=1.2,
        block_size=16,
        max_n_spec_tokens=3,
        prompt_template="vicuna",
        verbose=True,
    )
    assert (engine.max_model_len, engine.options.max_num_seqs) == (200, 4)
    generation_config = transformers.GenerationConfig(
        pad_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id, max_length=180, do_sample=False
    )
    plain = engine.generate(prompts=["the rider"], generation_config=generation_config)
    engine.set_drafter(draft)
    assert engine.engine.drafter is not None and engine.engine.drafter.max_nodes == 3
    drafted = engine.generate(prompts=["the rider"], generation_config=generation_config)
    engine.set_drafter(None)
    assert engine.engine.drafter is None
    expected = engine.generate(
        "the rider", SamplingParams(temperature=0, max_tokens=180 - len(plain[0].prompt_token_ids))
    )
    assert "USER: the rider ASSISTANT:" in str(plain[0].prompt)
    for output in (plain, drafted):
        assert output[0].outputs[0].token_ids == expected[0].outputs[0].token_ids
    assert sum(drafted[0].outputs[0].stats.proposed) > 0


def test_the_longest_prompt_and_the_usual_answer_hold_for_requests_that_say_nothing() -> None:
    llm = tiny_llm(max_input_len=8, max_output_len=5, max_model_len=None)
    quiet = {"ignore_eos": True, "seed": 1}
    assert llm.max_model_len == 13
    assert len(llm.generate([PROMPT], **quiet)[0].outputs[0].token_ids) == 5
    assert len(llm.generate([PROMPT], max_new_tokens=2, **quiet)[0].outputs[0].token_ids) == 2
    assert len(llm.generate([PROMPT], SamplingParams(max_tokens=7, **quiet))[0].outputs[0].token_ids) == 7  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the prompt has 9 tokens; max_prompt_len=8 allows no more"):
        llm.generate([[5] * 9])


def test_requests_by_other_names_are_the_same_requests() -> None:
    llm = tiny_llm()
    ours = SamplingParams(temperature=0.8, top_k=9, max_tokens=12, seed=3, stop_token_ids=[11])
    expected = llm.generate([PROMPT], ours)[0].outputs[0].token_ids
    theirs: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 9, "seed": 3, "eos_token_id": 11}
    assert llm.generate([PROMPT], max_new_tokens=12, **theirs)[0].outputs[0].token_ids == expected
    assert llm.generate([PROMPT], max_length=12 + len(PROMPT), **theirs)[0].outputs[0].token_ids == expected
    streamed = [token for chunk in llm.stream(PROMPT, max_new_tokens=12, **theirs) for token in chunk.token_ids]
    assert streamed == expected
    given = transformers.GenerationConfig(do_sample=True, temperature=0.8, top_k=9, max_new_tokens=12, eos_token_id=11)
    assert llm.generate([PROMPT], generation_config=given, seed=3)[0].outputs[0].token_ids == expected


def test_max_length_counts_each_prompt_for_itself() -> None:
    llm = tiny_llm()
    outputs = llm.generate([PROMPT, PROMPT[:2]], max_length=9, ignore_eos=True, seed=1)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 7]


def test_an_end_by_id_stands_beside_the_models_own() -> None:
    llm = tiny_llm()
    plain = llm.generate([PROMPT], temperature=0, max_tokens=8, ignore_eos=True)[0].outputs[0].token_ids
    cut = llm.generate([PROMPT], temperature=0, max_tokens=8, eos_token_id=plain[3])[0].outputs[0]
    assert cut.token_ids == plain[: plain.index(plain[3]) + 1] and cut.finish_reason == "stop"
    own = llm.generate([PROMPT], max_tokens=8, eos_token_id=9, logit_bias={2: 100.0})[0].outputs[0]
    assert (own.token_ids, own.finish_reason) == ([2], "stop")


def test_sampling_parameters_and_spellings_together_are_refused() -> None:
    with pytest.raises(OptionError, match="sampling_params and max_new_tokens were both given"):
        tiny_llm().generate([PROMPT], SamplingParams(), max_new_tokens=4)


@pytest.mark.parametrize("given", [transformers.GenerationConfig(), {"max_tokens": 4}, 5])
def test_only_sampling_parameters_are_sampling_parameters(given: Any) -> None:
    with pytest.raises(OptionError, match=f"sampling_params must be SamplingParams, not {type(given).__name__}"):
        tiny_llm().generate([PROMPT], given)


def test_chat_takes_spellings_and_a_special_token_can_be_stopped_at() -> None:
    tokenizer = make_tokenizer()
    llm = LLM(make_model(len(tokenizer)), tokenizer=tokenizer, kernels="reference", max_model_len=200)
    asked = [{"role": "user", "content": "the rider"}]
    ours = llm.chat(asked, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
    assert llm.chat(asked, do_sample=False, max_new_tokens=6)[0].outputs[0].token_ids == ours
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    biased = {"logit_bias": {start: 100.0}, "max_new_tokens": 6, "do_sample": False}
    assert len(llm.chat(asked, **biased)[0].outputs[0].token_ids) == 6  # type: ignore[arg-type]
    stopped = llm.chat(asked, stop_token="<|im_start|>", **biased)[0].outputs[0]  # type: ignore[arg-type]
    assert (stopped.token_ids, stopped.finish_reason) == ([start], "stop")


def test_a_draft_length_holds_for_drafters_that_do_not_bring_their_own() -> None:
    llm = tiny_llm("ngram", num_draft_tokens=3)
    assert llm.engine.drafter is not None and llm.engine.drafter.max_nodes == 3
    for given, length in (("suffix", 3), (tiny_model(layers=1), 3), (Suffix(9), 9), (FirstOf(NGram(2), Suffix(4)), 4)):
        llm.set_drafter(given)
        assert llm.engine.drafter.max_nodes == length


def test_a_model_may_be_named_as_others_name_it() -> None:
    llm = LLM(model_name_or_path=tiny_model(), kernels="reference", max_model_len=64)
    assert llm.generate([PROMPT], temperature=0, max_tokens=4)[0].outputs[0].token_ids
    with pytest.raises(OptionError, match=r"model='smollm2-135m' and model_name_or_path='other' contradict"):
        LLM("smollm2-135m", model_name_or_path="other")
