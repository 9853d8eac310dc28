"""A case for every row of the table of spellings.

What a spelling means is written down here once more, by hand: the table is what is tested.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from paceline import DraftModel, Glide, NGram, Pard, Suffix
from paceline.compat.table import OTHER_MTP
from paceline.drafters.table import KINDS, find_method


@dataclass
class Case:
    """What is given, as `name=value` and as `--name value`, and what comes of it."""

    given: dict[str, Any]
    means: dict[str, Any] = field(default_factory=dict)
    request: bool = False  # given to generate rather than to LLM
    call: bool = False  # to the call as a whole
    typed: str | None = None  # unless it is the same words as flags
    options: dict[str, Any] | None = None  # on the command line, unless it means the same there
    notice: str = ""
    refusal: str = ""


def request(given: dict[str, Any], means: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(given, means or {}, request=True, **more)


def call(**given: Any) -> Case:
    """Given to generate, chat or stream for all of its requests."""
    means = {"progress": False} if "use_tqdm" in given else given.get("chat_template_kwargs", given)
    return Case(given, means, call=True, options={"prompt_template": given.get("chat_template")})


def drafts(config: Any, **given: Any) -> Case:
    return Case(given, {"drafter": config})


def config(made: Any, **given: Any) -> Case:
    """Keys of speculative_config."""
    written = ", ".join(f'"{key}": {str(value).lower()}' for key, value in given.items() if not isinstance(value, str))
    text = ", ".join(filter(None, [written, *(f'"{k}": "{v}"' for k, v in given.items() if isinstance(v, str))]))
    typed = shlex.join(["--speculative-config", "{" + text + "}"])
    return Case({"speculative_config": given}, {"drafter": made}, typed=typed)


def as_flags(given: dict[str, Any]) -> str:
    return shlex.join(word for name, value in given.items() for word in (f"--{name}", str(value)))


CASES: dict[str, Case] = {}
SAME = {
    "vLLM": {
        "model": "m",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 64,
        "max_num_seqs": 3,
        "block_size": 8,
        "dtype": "float32",
        "quantization": "int8",
        "seed": 7,
        "model_impl": "transformers",
        "trust_remote_code": True,
        "enforce_eager": True,
        "device": "cpu",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    },
    "LMFlow": {"model": "m"},
    "Colossal-Inference": {"dtype": "fp16", "block_size": 8, "prompt_template": "vicuna"},
    "PaddleNLP": {"dtype": "float16", "block_size": 8},
}
SAME_REQUEST = {
    "vLLM": {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "max_tokens": 5,
        "stop": ["x"],
        "ignore_eos": True,
        "detokenize": False,
        "repetition_penalty": 1.5,
    },
    "LMFlow": {"temperature": 1e-6},
    "PaddleNLP": {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "repetition_penalty": 1.5},
}
for rows, as_request in ((SAME, False), (SAME_REQUEST, True)):
    for system, pairs in rows.items():
        for name, value in pairs.items():  # type: ignore[attr-defined]
            switches = {flag: f"--{flag}" for flag in ("ignore_eos", "trust_remote_code", "enforce_eager")}
            typed = {"stop": "--stop x", **switches}.get(name)
            CASES[f"{system}-{name}"] = Case({name: value}, {name: value}, as_request, typed=typed)

NO_EFFECT = {
    "vLLM": {
        "use_v2_block_manager": True,
        "swap_space": 4,
        "disable_log_stats": True,
        "disable_log_requests": True,
        "enable_chunked_prefill": True,
        "max_seq_len_to_capture": 100,
        "speculative_max_model_len": 100,
        "speculative_disable_by_batch_size": 4,
        "speculative_disable_mqa_scorer": True,
        "disable_logprobs_during_spec_decoding": True,
        "typical_acceptance_sampler_posterior_threshold": 0.1,
        "typical_acceptance_sampler_posterior_alpha": 0.3,
        "tokenizer_mode": "auto",
        "max_logprobs": 20,
        "disable_custom_all_reduce": True,
        "distributed_executor_backend": "mp",
        "priority": [0],
        "cpu_offload_gb": 4,
        "compilation_config": 3,
    },
    "Colossal-Inference": {
        "prefill_ratio": 1.2,
        "verbose": True,
        "glimpse_large_kv": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "use_cache": True,
        "early_stopping": True,
        "pad_input": True,
        "use_cuda_kernel": True,
        "use_cuda_graph": True,
        "use_spec_dec": True,
        "micro_batch_size": 1,
        "micro_batch_buffer_size": 1,
        "high_precision": False,
        "max_context_len_to_capture": 512,
        "start_token_size": 4,
        "generated_token_size": 512,
        "patched_parallelism_size": 1,
        "model_policy": "policy",
    },
    "PaddleNLP": {
        "inference_model": True,
        "append_attn": 1,
        "block_attn": 1,
        "return_full_hidden_states": 1,
        "use_flash_attention": True,
        "speculate_verify_window": 2,
        "speculate_max_candidate_len": 5,
        "benchmark": True,
        "model_type": "llama",
        "dynamic_insert": True,
        "model_prefix": "model",
        "avx_model": True,
        "avx_mode": True,
        "avx_type": "fp16_int8",
        "avx_cachekv_type": "fp16",
        "export_precache": False,
        "serving_mode": True,
        "use_fake_parameter": 1,
        "weightonly_group_size": 64,
        "output_via_mq": True,
    },
}
for system, pairs in NO_EFFECT.items():
    for name, value in pairs.items():  # type: ignore[attr-defined]
        CASES[f"{system}-{name}"] = Case({name: value}, notice="no effect")
IDLE_INSIDE = ("max_model_len", "disable_by_batch_size", "disable_logprobs", "revision", "enforce_eager")
for key in (*IDLE_INSIDE, "attention_backend", "disable_padded_drafter_batch", "draft_sample_method"):
    case = config(NGram(5), method="ngram", **{key: 1})
    case.notice = "no effect"
    CASES[f"vLLM-speculative_config.{key}"] = case

CASES |= {
    "vLLM-enable_prefix_caching": Case({"enable_prefix_caching": False}, {"prefix_caching": False}),
    "vLLM-num_gpu_blocks_override": Case({"num_gpu_blocks_override": 20}, {"num_pages": 20}),
    "vLLM-max_num_batched_tokens": Case({"max_num_batched_tokens": 32}, {"max_batched_tokens": 32}),
    "vLLM-speculative_model": drafts(DraftModel("smollm2-135m"), speculative_model="smollm2-135m"),
    "vLLM-speculative_model-[ngram]": drafts(
        NGram(5, min_match=1, max_match=3), speculative_model="[ngram]", ngram_prompt_lookup_max=3
    ),
    "vLLM-num_speculative_tokens": drafts(DraftModel("d", 3), speculative_model="d", num_speculative_tokens=3),
    "vLLM-ngram_prompt_lookup_max": drafts(
        NGram(4, min_match=1, max_match=3),
        speculative_model="[ngram]",
        num_speculative_tokens=4,
        ngram_prompt_lookup_max=3,
    ),
    "vLLM-ngram_prompt_lookup_min": drafts(
        NGram(5, min_match=2, max_match=4),
        speculative_model="[ngram]",
        ngram_prompt_lookup_max=4,
        ngram_prompt_lookup_min=2,
    ),
    "vLLM-speculative_draft_tensor_parallel_size-1": drafts(
        DraftModel("d"), speculative_model="d", speculative_draft_tensor_parallel_size=1
    ),
    "vLLM-speculative_draft_tensor_parallel_size": Case(
        {"speculative_model": "d", "speculative_draft_tensor_parallel_size": 2}, refusal="only 1 is allowed"
    ),
    "vLLM-speculative_model_quantization": drafts(
        DraftModel("d", quantization="int8"), speculative_model="d", speculative_model_quantization="int8"
    ),
    "vLLM-spec_decoding_acceptance_method-rejection_sampler": Case(
        {"spec_decoding_acceptance_method": "rejection_sampler"}, {"acceptance": "rejection"}
    ),
    "vLLM-spec_decoding_acceptance_method-typical_acceptance_sampler": Case(
        {"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, {"acceptance": "typical"}
    ),
    "vLLM-spec_model": drafts(DraftModel("d"), spec_model="d"),
    "vLLM-spec_tokens": drafts(DraftModel("d", 3), spec_model="d", spec_tokens=3),
    "vLLM-speculative_config.rejection_sample_method-standard": config(
        NGram(), method="ngram", rejection_sample_method="standard"
    ),
    "vLLM-speculative_config.rejection_sample_method-block": config(
        NGram(), method="ngram", rejection_sample_method="block"
    ),
    "vLLM-speculative_config.parallel_drafting-False": config(DraftModel("d"), model="d", parallel_drafting=False),
    "vLLM-speculative_config.parallel_drafting-True": config(Pard("d"), model="d", parallel_drafting=True),
    "vLLM-use_tqdm": call(use_tqdm=False),
    "vLLM-chat_template": call(chat_template="vicuna"),
    "vLLM-add_generation_prompt": call(add_generation_prompt=False),
    "vLLM-continue_final_message": call(continue_final_message=True),
    "vLLM-chat_template_kwargs": call(chat_template_kwargs={"enable_thinking": False}),
    "vLLM-speculative_config": config(
        NGram(6, max_match=4), method="ngram", num_speculative_tokens=6, prompt_lookup_max=4
    ),
    "vLLM-speculative_config.method-ngram": config(NGram(5), method="ngram"),
    "vLLM-speculative_config.method-suffix": config(Suffix(), method="suffix"),
    "vLLM-speculative_config.method-draft_model": config(DraftModel("d"), method="draft_model", model="d"),
    "vLLM-speculative_config.model": config(DraftModel("smollm2-135m"), model="smollm2-135m"),
    "vLLM-speculative_config.num_speculative_tokens": config(DraftModel("d", 2), model="d", num_speculative_tokens=2),
    "vLLM-speculative_config.prompt_lookup_max": config(NGram(5, max_match=4), method="ngram", prompt_lookup_max=4),
    "vLLM-speculative_config.prompt_lookup_min": config(
        NGram(5, min_match=2, max_match=4), method="ngram", prompt_lookup_min=2, prompt_lookup_max=4
    ),
    "vLLM-speculative_config.use_heterogeneous_vocab": config(
        DraftModel("d", cross_vocabulary=True), model="d", use_heterogeneous_vocab=True
    ),
    "vLLM-speculative_config.quantization": config(
        DraftModel("d", quantization="int4"), model="d", quantization="int4"
    ),
    "vLLM-speculative_config.suffix_decoding_max_tree_depth": config(
        Suffix(7, max_tree_depth=12), method="suffix", num_speculative_tokens=7, suffix_decoding_max_tree_depth=12
    ),
    "vLLM-speculative_config.suffix_decoding_max_cached_requests": config(
        Suffix(max_cached_requests=50), method="suffix", suffix_decoding_max_cached_requests=50
    ),
    "vLLM-speculative_config.suffix_decoding_max_spec_factor": config(
        Suffix(max_spec_factor=2.5), method="suffix", suffix_decoding_max_spec_factor=2.5
    ),
    "vLLM-speculative_config.suffix_decoding_min_token_prob": config(
        Suffix(min_token_prob=0.3), method="suffix", suffix_decoding_min_token_prob=0.3
    ),
    "vLLM-speculative_config.draft_tensor_parallel_size-1": config(
        DraftModel("d"), model="d", draft_tensor_parallel_size=1
    ),
    "LMFlow-draft_model": drafts(DraftModel("gpt2"), draft_model="gpt2"),
    "LMFlow-gamma": drafts(DraftModel("gpt2", 4), draft_model="gpt2", gamma=4),
    "LMFlow-max_new_tokens": request({"max_new_tokens": 512}, {"max_tokens": 512}),
    "LMFlow-gpu": Case({"gpu": 1}, {"device": "cuda:1"}),
    "LMFlow-interactive": Case({"interactive": 1}, notice="no effect here; paceline chat goes on asking"),
    "LMFlow-user_input": Case({"user_input": "one two"}, options={"prompt": ["one two"]}),
    "LMFlow-stop_token": request({"stop_token": "END"}, {"stop": ["END"]}),
    "Colossal-Inference-max_batch_size": Case({"max_batch_size": 4}, {"max_num_seqs": 4}),
    "Colossal-Inference-max_input_len": Case({"max_input_len": 64}, {"max_prompt_len": 64}),
    "Colossal-Inference-max_output_len": Case(
        {"max_input_len": 64, "max_output_len": 32},
        {"max_prompt_len": 64, "default_max_tokens": 32, "max_model_len": 96},
        options={"max_prompt_len": 64, "max_tokens": 32, "max_model_len": 96},
    ),
    "Colossal-Inference-tp_size": Case({"tp_size": 1}, {"tensor_parallel_size": 1}),
    "Colossal-Inference-max_n_spec_tokens": drafts(DraftModel("d", 3), drafter_model="d", max_n_spec_tokens=3),
    "Colossal-Inference-n_spec_tokens": drafts(DraftModel("d", 3), drafter_model="d", n_spec_tokens=3),
    "Colossal-Inference-drafter_model": drafts(DraftModel("d"), drafter_model="d"),
    "Colossal-Inference-use_glide_drafter-False": Case({"use_glide_drafter": False}),
    "Colossal-Inference-use_glide_drafter-True": drafts(Glide("d"), drafter_model="d", use_glide_drafter=True),
    "Colossal-Inference-generation_config": request(
        {"generation_config": {"max_new_tokens": 9, "top_k": 3, "do_sample": False}},
        {"max_tokens": 9, "top_k": 3, "temperature": 0.0},
    ),
    "Colossal-Inference-max_length": request({"max_length": 30}, {"max_tokens": 20}, notice="counts the prompt"),
    "Colossal-Inference-max_new_tokens": request({"max_new_tokens": 8}, {"max_tokens": 8}),
    "Colossal-Inference-do_sample-False": request({"do_sample": False}, {"temperature": 0.0}),
    "Colossal-Inference-do_sample-True": request({"do_sample": True}, {}, options={"temperature": 1.0}),
    "Colossal-Inference-eos_token_id": request(
        {"eos_token_id": [3, 4]}, {"stop_token_ids": [3, 4]}, typed="--eos_token_id 3,4"
    ),
    "Colossal-Inference-min_new_tokens": request({"min_new_tokens": 3}, {"min_tokens": 3}),
    "Colossal-Inference-num_return_sequences": request({"num_return_sequences": 2}, {"n": 2}),
    "Colossal-Inference-stop_strings": request({"stop_strings": "END"}, {"stop": ["END"]}),
    "PaddleNLP-device": Case({"device": "gpu"}, {"device": "gpu"}),
    "PaddleNLP-mla_use_matrix_absorption": Case(
        {"mla_use_matrix_absorption": False}, {"mla_use_matrix_absorption": False}
    ),
    "PaddleNLP-model_name_or_path": Case({"model_name_or_path": "m"}, {"model": "m"}),
    "PaddleNLP-speculate_method-None": drafts(None, speculate_method="None"),
    "PaddleNLP-speculate_method-inference_with_reference": drafts(
        NGram(rule="reference"), speculate_method="inference_with_reference"
    ),
    "PaddleNLP-speculate_method-draft_model": drafts(
        DraftModel("d"), speculate_method="draft_model", draft_model_name_or_path="d"
    ),
    "PaddleNLP-speculate_max_draft_token_num": drafts(
        NGram(4, rule="reference"), speculate_method="inference_with_reference", speculate_max_draft_token_num=4
    ),
    "PaddleNLP-speculate_max_ngram_size": drafts(
        NGram(5, max_match=2, rule="reference"),
        speculate_method="inference_with_reference",
        speculate_max_draft_token_num=5,
        speculate_max_ngram_size=2,
    ),
    "PaddleNLP-draft_model_name_or_path": drafts(DraftModel("d"), draft_model_name_or_path="d"),
    "PaddleNLP-total_max_length": Case({"total_max_length": 128}, {"max_model_len": 128}),
    "PaddleNLP-max_length": request({"max_length": 30}, {"max_tokens": 30}, notice="counts new tokens"),
    "PaddleNLP-min_length": request({"min_length": 3}, {"min_tokens": 3}),
    "PaddleNLP-src_length": Case({"src_length": 64}, {"max_prompt_len": 64}),
    "PaddleNLP-batch_size": Case({"batch_size": 2}, {"max_num_seqs": 2}),
    "PaddleNLP-decode_strategy-greedy_search": request({"decode_strategy": "greedy_search"}, {"temperature": 0.0}),
    "PaddleNLP-decode_strategy-sampling": request({"decode_strategy": "sampling"}, {}, options={"temperature": 1.0}),
    "PaddleNLP-decode_strategy-beam_search": request({"decode_strategy": "beam_search"}, refusal="no beam search"),
}
# The one value that is allowed, another, and why not.
ONLY: dict[str, tuple[Any, Any, str]] = {
    "vLLM-pipeline_parallel_size": (1, 2, "only 1 is allowed"),
    "vLLM-enable_lora": (False, True, "merge the adapter"),
    "vLLM-kv_cache_dtype": ("auto", "fp8", "the model's type"),
    "Colossal-Inference-pp_size": (1, 2, "only 1 is allowed"),
    "Colossal-Inference-num_beams": (1, 4, "there is no beam search"),
    "Colossal-Inference-beam_width": (1, 2, "there is no beam search"),
    "Colossal-Inference-no_repeat_ngram_size": (0, 3, "only 0 is allowed"),
    "Colossal-Inference-enable_streamingllm": (False, True, "not there yet"),
    "PaddleNLP-mode": ("dynamic", "static", "not there yet; models cannot be exported"),
}
for row, (allowed, other, why) in ONLY.items():
    name = row.removeprefix("Colossal-Inference-").rpartition("-")[2]
    CASES[f"{row}-{allowed}"] = Case({name: allowed})
    CASES[f"{row}-static" if name == "mode" else row] = Case({name: other}, refusal=why)
REFUSED: dict[str, tuple[Any, str]] = {
    "vLLM-lora_request": (object(), "merge the adapter"),
    "vLLM-revision": ("main", "the hub's newest"),
    "Colossal-Inference-forced_eos_token_id": (2, "ends where it is cut"),
    "Colossal-Inference-kv_cache_dtype": ("fp8", "the model's type"),
    "PaddleNLP-output_path": ("inference", "not there yet; models cannot be exported; generate with the model itself"),
    "PaddleNLP-lora_path": ("lora", "merge the adapter"),
    "PaddleNLP-prefix_path": ("prefix", "merge the adapter"),
    "PaddleNLP-data_file": ("dev.json", "paceline batch"),
    "PaddleNLP-output_file": ("out.json", "paceline batch"),
    "PaddleNLP-cachekv_int8_type": ("static", "the model's type"),
    "PaddleNLP-weight_block_size": (128, "how weights are packed"),
    "PaddleNLP-moe_quant_type": ("weight_only_int8", "how weights are packed"),
}
for row, (given, why) in REFUSED.items():
    CASES[row] = Case({row.removeprefix("Colossal-Inference-").rpartition("-")[2]: given}, refusal=why)
for rule, theirs in (("rejection", "standard"), ("block", "block")):
    CASES[f"vLLM-speculative_config.rejection_sample_method-{theirs}"].means["acceptance"] = rule
for key, value, why in (("draft_tensor_parallel_size", 2, "only 1 is allowed"),):
    later = config(None, model="d", **{key: value})
    later.refusal = why
    CASES[f"vLLM-speculative_config.{key}"] = later
for kind in KINDS:  # of a drafter with weights the spelling needs no more than its row
    for method in kind.methods:
        case = config(kind.make({"model": "d"}) if kind.loads and kind.has_model else None, method=method, model="d")
        case.refusal = "" if kind.loads else "not there yet; supported: ngram, suffix"
        CASES.setdefault(f"vLLM-speculative_config.method-{method}", case)
        named = {"spec_method": method, **({"spec_model": "d"} if not kind.loads or kind.has_model else {})}
        made = kind.make({"model": "d"} if kind.has_model else {}) if kind.loads else None
        CASES[f"vLLM-spec_method-{method}"] = Case(named, {"drafter": made}, refusal=case.refusal)
for method in OTHER_MTP:
    for name in ("spec_method", "speculative_config.method"):
        case = Case({name: method}) if name == "spec_method" else config(None, method=method, model="d")
        case.refusal = "is not supported; supported: ngram, suffix"
        CASES[f"vLLM-{name}-{method}"] = case
for method in ("mtp", "eagle"):
    kind, given = find_method(method), {"speculate_method": method, "draft_model_name_or_path": "d"}
    CASES[f"PaddleNLP-speculate_method-{method}"] = (
        drafts(kind.make({"model": "d"}), **given) if kind.loads else Case(given, refusal="not there yet")
    )
for bits in ("int8", "int4"):
    CASES[f"PaddleNLP-quant_type-weight_only_{bits}"] = Case(
        {"quant_type": f"weight_only_{bits}"}, {"quantization": bits}
    )
    CASES[f"PaddleNLP-draft_model_quant_type-weight_only_{bits}"] = drafts(
        DraftModel("d", quantization=bits),
        draft_model_name_or_path="d",
        draft_model_quant_type=f"weight_only_{bits}",
    )
for kind in ("a8w8", "a8w8c8", "a8w8_fp8", "a8w8c8_fp8"):
    for name in ("quant_type", "draft_model_quant_type"):
        CASES[f"PaddleNLP-{name}-{kind}"] = Case({name: kind}, refusal="supported: weight_only_int8")
