"""Colossal-Inference's engine: what its methods return and keep, on a tiny model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Glide, SamplingParams
from paceline.compat import colossal
from paceline.compat.colossal import (
    DistCoordinator,
    GenerationConfig,
    InferenceConfig,
    InferenceEngine,
    NoPaddingLlamaModelInferPolicy,
)
from paceline.errors import OptionError
from tests.cli.checkpoints import make_model, make_tokenizer
from tests.drafters.tiny_readers import glide_state, write_glide

PROMPTS = ["the rider in front", "a line of riders"]
# Every field of their InferenceConfig, at its default.
FIELDS = {
    "max_batch_size": 8,
    "max_output_len": 256,
    "max_input_len": 256,
    "dtype": torch.float16,
    "kv_cache_dtype": None,
    "prompt_template": None,
    "do_sample": False,
    "beam_width": 1,
    "prefill_ratio": 1.2,
    "pad_input": False,
    "early_stopping": False,
    "top_k": 50,
    "top_p": 1.0,
    "temperature": 1.0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
    "forced_eos_token_id": None,
    "ignore_eos": False,
    "use_spec_dec": False,
    "max_n_spec_tokens": 5,
    "glimpse_large_kv": False,
    "block_size": 16,
    "tp_size": 1,
    "pp_size": 1,
    "micro_batch_size": 1,
    "micro_batch_buffer_size": None,
    "use_cuda_kernel": False,
    "high_precision": False,
    "use_cuda_graph": False,
    "max_context_len_to_capture": 512,
    "enable_streamingllm": False,
    "start_token_size": 4,
    "generated_token_size": 512,
    "patched_parallelism_size": 1,
}


def make_engine(**options: Any) -> InferenceEngine:
    tokenizer = make_tokenizer()
    config = InferenceConfig(**{"max_input_len": 64, "max_output_len": 12, **options})
    return InferenceEngine(make_model(len(tokenizer)), tokenizer, config)


def test_the_texts_begin_with_their_prompts_and_go_on_with_the_likeliest_tokens() -> None:
    engine = make_engine()
    expected = engine.llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    texts, tokens = engine.generate(PROMPTS, return_token_ids=True)
    assert tokens == [output.outputs[0].token_ids for output in expected]
    assert texts == [f"{output.prompt}{output.outputs[0].text}" for output in expected]
    assert engine.generate(prompts=PROMPTS[0]) == texts[:1]
    ids = [output.prompt_token_ids for output in expected]
    assert engine.generate(prompts_token_ids=ids) == texts
    assert engine.generate(prompts_token_ids=[torch.tensor(one) for one in ids]) == texts
    assert engine.generate(prompts=PROMPTS, request_ids=[7, 3]) == texts[::-1]


def test_what_the_config_says_of_sampling_holds_for_calls_without_a_generation_config() -> None:
    engine = make_engine(do_sample=True, temperature=0.5, top_k=1, ignore_eos=True)
    greedy = GenerationConfig(max_new_tokens=12, do_sample=False)
    assert engine.generate(PROMPTS) == make_engine(ignore_eos=True).generate(PROMPTS)
    assert engine.generate(PROMPTS, generation_config=greedy) == make_engine().generate(PROMPTS)


def test_a_drafter_is_kept_while_it_is_off_and_forgotten_when_it_is_cleared() -> None:
    engine = make_engine(max_n_spec_tokens=3)
    plain = engine.generate(PROMPTS)
    with pytest.raises(OptionError, match="enable_spec_dec needs a drafter model"):
        engine.enable_spec_dec()
    draft = make_model(len(make_tokenizer()), seed=1)
    lengths = []
    for given in ((draft,), (), (None, 2)):
        engine.enable_spec_dec(*given)
        assert engine.llm.engine.drafter is not None
        lengths.append(engine.llm.engine.drafter.max_nodes)
        assert engine.generate(PROMPTS) == plain
        engine.disable_spec_dec()
        assert engine.llm.engine.drafter is None
    assert lengths == [3, 3, 2]
    engine.clear_spec_dec()
    with pytest.raises(OptionError, match="enable_spec_dec needs a drafter model"):
        engine.enable_spec_dec()


def test_a_glide_drafter_drafts_and_no_other_is_taken_for_one(tmp_path: Path) -> None:
    size = len(make_tokenizer())
    folder = write_glide(tmp_path, state=glide_state(vocab=size), num_attention_heads=None)
    sizes = colossal.GlideLlamaConfig(intermediate_size=8192, large_hidden_size=4096, num_attention_heads=2)
    drafter = colossal.GlideLlamaForCausalLM.from_pretrained(str(folder), config=sizes)
    assert drafter == Glide(str(folder), num_attention_heads=2)
    engine = make_engine(max_n_spec_tokens=3)
    plain = engine.generate(PROMPTS)
    lengths = []
    for given in ((drafter, None, True), (drafter, 2, True), (drafter,)):
        engine.enable_spec_dec(*given)
        assert engine.llm.engine.drafter is not None and engine.llm.engine.drafter.name == "glide"
        lengths.append(engine.llm.engine.drafter.max_nodes)
        assert engine.generate(PROMPTS) == plain
    assert lengths == [3, 2, 3]
    with pytest.raises(OptionError, match="use_glide_drafter=True needs a GLIDE drafter"):
        engine.enable_spec_dec(make_model(size), use_glide_drafter=True)


def test_every_field_of_their_config_is_known_at_its_default() -> None:
    assert make_engine(**{**FIELDS, "dtype": "fp32", "max_input_len": 64, "max_output_len": 12}).llm.max_model_len == 76
    assert InferenceConfig(max_input_len=64).max_output_len == FIELDS["max_output_len"]


def test_a_field_that_is_not_known_names_the_nearest() -> None:
    with pytest.raises(OptionError, match="option 'max_input_length' is not known; did you mean 'max_input_len'"):
        make_engine(max_input_length=64)


def test_a_call_without_prompts_says_what_is_missing() -> None:
    with pytest.raises(OptionError, match="generate needs prompts or prompts_token_ids"):
        make_engine().generate()


def test_the_parts_of_their_example_that_do_nothing_here_are_there(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, policy = make_tokenizer(), NoPaddingLlamaModelInferPolicy()
    with caplog.at_level(logging.WARNING, "paceline"):
        config = InferenceConfig(max_input_len=64, max_output_len=12)
        InferenceEngine(make_model(len(tokenizer)), tokenizer, config, model_policy=policy, verbose=True)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "verbose=True",
        "model_policy=SimpleNamespace",
    ]
    DistCoordinator().print_on_master("one")
    assert capsys.readouterr().out == "one\n"
