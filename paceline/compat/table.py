"""The one table: what other systems call things, and what each is here.

A row's `to` is where its value goes: an option of the engine or of a request by our name, `draft.NAME` for an option of
the drafter, `NAME=VALUE` where the spelling means one value of ours. A row with a `value` is about that value alone.
Documentation and tests are made from these rows. This module knows words only; it must not import anything heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.drafters.table import KINDS, find_method

LIBRARY, COMMAND_LINE, BOTH = "library", "command line", "both"
VLLM, LMFLOW, COLOSSAL, PADDLE = "vLLM", "LMFlow", "Colossal-Inference", "PaddleNLP"
SAME, RENAMED, NO_EFFECT, REFUSED, LATER = "same", "renamed", "no effect", "refused", "later"
SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-q": "--quantization"}  # vLLM's


@dataclass(frozen=True)
class Spelling:
    """How one system calls something.

    note: why it is refused or has no effect, or what else a user should know.
    switch: a flag that may stand alone; a word after it is its value only if it says yes or no.
    """

    system: str
    name: str
    to: str
    effect: str
    where: str = BOTH
    value: str = ""
    note: str = ""
    switch: bool = False

    @property
    def id(self) -> str:
        return "-".join(part for part in (self.system, self.name, self.value) if part)

    def holds(self, where: str) -> bool:
        return self.where in (where, BOTH)


def named(name: str, where: str) -> list[Spelling]:
    """The rows of one spelling, as far as they hold in the library or on the command line."""
    return [row for row in SPELLINGS if row.name == name and row.holds(where)]


def names(where: str) -> list[str]:
    """Every spelling there, but not the keys inside speculative_config."""
    return list(dict.fromkeys(row.name for row in SPELLINGS if row.holds(where) and "." not in row.name))


def _rows(system: str, effect: str, names: str, **more: Any) -> Iterator[Spelling]:
    """A row for each of several names that are ours too, or that go nowhere."""
    for name in names.split():
        yield Spelling(system, name, name if effect == SAME else "", effect, **more)


def _renamed(system: str, pairs: str, inside: str = "") -> Iterator[Spelling]:
    """A row for each `theirs=ours`. inside: what the names begin with."""
    for name, to in (pair.split("=") for pair in pairs.split()):
        yield Spelling(system, inside + name, to, RENAMED)


def _only(system: str, name: str, value: str, note: str, effect: str = LATER) -> Iterator[Spelling]:
    """One value is what happens anyway; no other is allowed."""
    yield Spelling(system, name, "", SAME, value=value, switch=value == "False")
    yield Spelling(system, name, "", effect, note=note)


def _methods(
    system: str, name: str, methods: Iterable[str], others: Iterable[str] = (), refused: Iterable[str] = ()
) -> Iterator[Spelling]:
    """What a system calls the kinds of drafters. others: methods that have rows of their own."""
    kinds = {method: find_method(method) for method in methods}
    supported = f"supported: {', '.join([*others, *(method for method, kind in kinds.items() if kind.loads)])}"
    for method, kind in kinds.items():
        if kind.loads:
            yield Spelling(system, name, f"draft.method={kind.word}", RENAMED, value=method)
        else:
            yield Spelling(system, name, "", LATER, value=method, note=supported)
    for method in refused:
        yield Spelling(system, name, "", REFUSED, value=method, note=supported)


OTHER_MTP = ("qwen3_next_mtp", "ernie_mtp")  # vLLM's, of targets that are no families here
ONE_DEVICE = "one device; only 1 is allowed"
NO_BEAMS = "there is no beam search"
ADAPTERS = "merge the adapter into the weights first"
CACHE = "the cache is kept in the model's type"


def _vllm() -> Iterator[Spelling]:
    yield from _rows(VLLM, SAME, "model tensor_parallel_size gpu_memory_utilization max_model_len max_num_seqs dtype")
    yield from _rows(VLLM, SAME, "block_size quantization seed temperature top_p top_k min_p max_tokens stop")
    yield from _rows(VLLM, SAME, "repetition_penalty")
    yield from _rows(VLLM, SAME, "ignore_eos trust_remote_code enforce_eager", switch=True)
    yield from _rows(VLLM, SAME, "device", note="auto, cpu, cuda, cuda:N")
    yield from _rows(VLLM, SAME, "model_impl", note="auto and transformers; what is vllm there is paceline here")
    yield from _rows(VLLM, SAME, "load_format", note="auto and dummy; files show themselves how they are written")
    yield from _rows(VLLM, SAME, "skip_tokenizer_init detokenize", where=LIBRARY)
    yield Spelling(VLLM, "enable_prefix_caching", "prefix_caching", RENAMED, switch=True)
    yield from _renamed(VLLM, "num_gpu_blocks_override=num_pages max_num_batched_tokens=max_batched_tokens")
    yield from _renamed(VLLM, "speculative_model=draft.model num_speculative_tokens=draft.num_draft_tokens")
    yield from _renamed(VLLM, "ngram_prompt_lookup_max=draft.max_match spec_tokens=draft.num_draft_tokens")
    yield from _renamed(VLLM, "speculative_model_quantization=draft.quantization spec_model=draft.model")
    yield Spelling(VLLM, "ngram_prompt_lookup_min", "draft.min_match", RENAMED, note="1 unless given")
    yield Spelling(VLLM, "speculative_model", "draft.method=ngram", RENAMED, value="[ngram]")
    yield from _only(VLLM, "speculative_draft_tensor_parallel_size", "1", f"a drafter runs on {ONE_DEVICE}")
    yield from _only(VLLM, "pipeline_parallel_size", "1", f"a model runs on {ONE_DEVICE}")
    for rule, theirs in (("rejection", "rejection_sampler"), ("typical", "typical_acceptance_sampler")):
        yield Spelling(VLLM, "spec_decoding_acceptance_method", f"acceptance={rule}", RENAMED, value=theirs)
    for rule, theirs in (("rejection", "standard"), ("block", "block")):
        yield Spelling(VLLM, "speculative_config.rejection_sample_method", f"acceptance={rule}", RENAMED, value=theirs)
    yield Spelling(VLLM, "use_tqdm", "progress", RENAMED, LIBRARY)
    jinja = "of one conversation: a Jinja text or file, llama, vicuna, or a text with {input_text} in it"
    yield Spelling(VLLM, "chat_template", "chat_template", SAME, note=jinja)
    yield from _rows(VLLM, SAME, "add_generation_prompt continue_final_message chat_template_kwargs", where=LIBRARY)
    yield from _rows(VLLM, LATER, "lora_request", where=LIBRARY, note=f"None is allowed; {ADAPTERS}")
    yield from _only(VLLM, "enable_lora", "False", ADAPTERS)
    yield from _only(VLLM, "kv_cache_dtype", "auto", CACHE, REFUSED)
    yield from _rows(VLLM, LATER, "revision", note="the hub's newest is taken; give the folder of another")
    yield from _rows(VLLM, NO_EFFECT, "swap_space max_seq_len_to_capture tokenizer_mode max_logprobs")
    yield from _rows(VLLM, NO_EFFECT, "cpu_offload_gb compilation_config")
    yield from _rows(VLLM, NO_EFFECT, "speculative_max_model_len speculative_disable_by_batch_size")
    yield from _rows(VLLM, NO_EFFECT, "typical_acceptance_sampler_posterior_threshold distributed_executor_backend")
    yield from _rows(VLLM, NO_EFFECT, "typical_acceptance_sampler_posterior_alpha")
    idle = "use_v2_block_manager disable_log_stats disable_log_requests "
    idle += "enable_chunked_prefill speculative_disable_mqa_scorer disable_logprobs_during_spec_decoding "
    yield from _rows(VLLM, NO_EFFECT, idle + "disable_custom_all_reduce", switch=True)
    yield from _rows(VLLM, NO_EFFECT, "priority", where=LIBRARY, note="the first to come is the first served")
    yield Spelling(VLLM, "speculative_config", "drafter", RENAMED, note="a dictionary, or its JSON")
    inside = "speculative_config."
    for name in ("spec_method", f"{inside}method"):
        methods = [method for kind in KINDS for method in kind.methods]
        yield from _methods(VLLM, name, methods, refused=OTHER_MTP)
    yield from _renamed(VLLM, "model=draft.model num_speculative_tokens=draft.num_draft_tokens", inside)
    yield from _renamed(VLLM, "prompt_lookup_max=draft.max_match prompt_lookup_min=draft.min_match", inside)
    yield from _renamed(VLLM, "use_heterogeneous_vocab=draft.cross_vocabulary quantization=draft.quantization", inside)
    for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob"):
        yield Spelling(VLLM, f"{inside}suffix_decoding_{name}", f"draft.{name}", RENAMED)
    yield from _only(VLLM, f"{inside}draft_tensor_parallel_size", "1", f"a drafter runs on {ONE_DEVICE}")
    yield Spelling(VLLM, f"{inside}parallel_drafting", "", SAME, value="False")
    pard = "a draft model is taken for a PARD drafter; drafters of other kinds show in their files how they draft"
    yield Spelling(VLLM, f"{inside}parallel_drafting", "draft.method=pard", RENAMED, value="True", note=pard)
    idle = "max_model_len disable_by_batch_size disable_logprobs revision enforce_eager attention_backend "
    for name in f"{idle} disable_padded_drafter_batch draft_sample_method".split():
        yield Spelling(VLLM, inside + name, "", NO_EFFECT)


def _lmflow() -> Iterator[Spelling]:
    yield Spelling(LMFLOW, "model", "model", SAME)
    yield Spelling(LMFLOW, "temperature", "temperature", SAME, note="at or below 1e-6 the likeliest token is taken")
    yield from _renamed(LMFLOW, "draft_model=draft.model gamma=draft.num_draft_tokens max_new_tokens=max_tokens")
    yield Spelling(LMFLOW, "gpu", "device=cuda:N", RENAMED)
    yield Spelling(LMFLOW, "stop_token", "stop", RENAMED, note="a text; a number is a token id")
    asks = "paceline chat goes on asking, paceline generate takes one text"
    yield Spelling(LMFLOW, "interactive", "", NO_EFFECT, COMMAND_LINE, note=asks, switch=True)
    yield Spelling(LMFLOW, "user_input", "prompt", RENAMED, COMMAND_LINE)


def _colossal() -> Iterator[Spelling]:
    yield Spelling(COLOSSAL, "dtype", "dtype", SAME, note="fp16, bf16, fp32 and torch's own, too")
    yield from _rows(COLOSSAL, SAME, "block_size prompt_template")
    yield from _renamed(COLOSSAL, "max_batch_size=max_num_seqs tp_size=tensor_parallel_size stop_strings=stop")
    yield from _renamed(COLOSSAL, "max_n_spec_tokens=draft.num_draft_tokens n_spec_tokens=draft.num_draft_tokens")
    yield from _renamed(COLOSSAL, "max_new_tokens=max_tokens min_new_tokens=min_tokens")
    yield Spelling(COLOSSAL, "max_input_len", "max_prompt_len", RENAMED, note="a longer prompt is refused")
    sums = "with max_input_len the sum is max_model_len"
    yield Spelling(COLOSSAL, "max_output_len", "default_max_tokens", RENAMED, note=sums)
    yield from _only(COLOSSAL, "pp_size", "1", f"a model runs on {ONE_DEVICE}")
    yield Spelling(COLOSSAL, "drafter_model", "draft.model", RENAMED, note="on a live engine: llm.set_drafter(…)")
    greedy = "a dictionary or an object; as in transformers the likeliest token is taken unless do_sample=True is in it"
    yield Spelling(COLOSSAL, "generation_config", "sampling_params", RENAMED, LIBRARY, note=greedy)
    counts = "counts the prompt, as in transformers; max_tokens counts new tokens only"
    yield Spelling(COLOSSAL, "max_length", "max_tokens", RENAMED, LIBRARY, note=counts)
    yield Spelling(COLOSSAL, "do_sample", "temperature=0", RENAMED, value="False", switch=True)
    yield Spelling(COLOSSAL, "do_sample", "temperature", RENAMED, value="True", note="1 unless given")
    yield Spelling(COLOSSAL, "eos_token_id", "stop_token_ids", RENAMED, note="beside the model's own")
    yield Spelling(COLOSSAL, "num_return_sequences", "n", RENAMED, LIBRARY)
    for name in ("num_beams", "beam_width"):
        yield from _only(COLOSSAL, name, "1", f"{NO_BEAMS}; only 1 is allowed", REFUSED)
    yield from _only(COLOSSAL, "no_repeat_ngram_size", "0", "only 0 is allowed; repetition_penalty is there")
    yield from _rows(COLOSSAL, REFUSED, "forced_eos_token_id", note="an answer that is cut off ends where it is cut")
    yield from _only(COLOSSAL, "enable_streamingllm", "False", "a longer text than max_model_len is refused")
    yield from _rows(COLOSSAL, REFUSED, "kv_cache_dtype", note=CACHE)
    yield from _rows(COLOSSAL, NO_EFFECT, "pad_token_id", note="nothing is padded")
    yield from _rows(COLOSSAL, NO_EFFECT, "use_spec_dec", note="a drafter turns it on", switch=True)
    idle = "prefill_ratio bos_token_id micro_batch_size micro_batch_buffer_size max_context_len_to_capture "
    idle += "start_token_size generated_token_size patched_parallelism_size model_policy"
    yield from _rows(COLOSSAL, NO_EFFECT, idle)
    idle = "verbose use_cache early_stopping pad_input use_cuda_kernel use_cuda_graph high_precision"
    yield from _rows(COLOSSAL, NO_EFFECT, idle, switch=True)
    yield Spelling(COLOSSAL, "use_glide_drafter", "", SAME, value="False", switch=True)
    yield Spelling(COLOSSAL, "use_glide_drafter", "draft.method=glide", RENAMED, value="True")
    yield from _rows(COLOSSAL, NO_EFFECT, "glimpse_large_kv", note="a GLIDE drafter always does", switch=True)


def _paddle() -> Iterator[Spelling]:
    yield from _rows(PADDLE, SAME, "dtype temperature top_p top_k repetition_penalty block_size")
    yield from _rows(PADDLE, SAME, "mla_use_matrix_absorption", switch=True)
    yield from _renamed(PADDLE, "model_name_or_path=model total_max_length=max_model_len batch_size=max_num_seqs")
    yield from _renamed(PADDLE, "speculate_max_draft_token_num=draft.num_draft_tokens")
    yield from _renamed(PADDLE, "speculate_max_ngram_size=draft.max_match draft_model_name_or_path=draft.model")
    yield Spelling(PADDLE, "device", "device", SAME, note="gpu is cuda; others are taken where PyTorch has them")
    yield Spelling(PADDLE, "speculate_method", "draft.method=none", RENAMED, value="None")
    reference = "inference_with_reference"
    yield Spelling(PADDLE, "speculate_method", "draft.rule=reference", RENAMED, value=reference)
    yield from _methods(PADDLE, "speculate_method", ("draft_model", "mtp", "eagle"), [reference])
    supported = "supported: weight_only_int8, weight_only_int4"
    for name, to in (("quant_type", "quantization"), ("draft_model_quant_type", "draft.quantization")):
        for bits in ("int8", "int4"):
            yield Spelling(PADDLE, name, f"{to}={bits}", RENAMED, value=f"weight_only_{bits}")
        for bits in ("a8w8", "a8w8c8", "a8w8_fp8", "a8w8c8_fp8"):
            yield Spelling(PADDLE, name, "", REFUSED, value=bits, note=supported)
    counts = "counts new tokens, as PaddleNLP's predictor counts"
    yield Spelling(PADDLE, "max_length", "max_tokens", RENAMED, COMMAND_LINE, note=counts)
    yield Spelling(PADDLE, "min_length", "min_tokens", RENAMED, COMMAND_LINE, note=counts)
    yield Spelling(PADDLE, "src_length", "max_prompt_len", RENAMED, note="a longer prompt is refused, not cut")
    yield Spelling(PADDLE, "decode_strategy", "temperature=0", RENAMED, value="greedy_search")
    yield Spelling(PADDLE, "decode_strategy", "temperature", RENAMED, value="sampling", note="1 unless given")
    beams = f"{NO_BEAMS}; supported: sampling, greedy_search"
    yield Spelling(PADDLE, "decode_strategy", "", REFUSED, value="beam_search", note=beams)
    yield Spelling(PADDLE, "mode", "", SAME, value="dynamic")
    exported = "models cannot be exported"
    yield Spelling(PADDLE, "mode", "", LATER, value="static", note=f"{exported}; leave it out or give dynamic")
    yield from _rows(PADDLE, LATER, "output_path", note=f"{exported}; generate with the model itself")
    yield from _rows(PADDLE, LATER, "lora_path prefix_path", note=ADAPTERS)
    yield from _rows(PADDLE, REFUSED, "data_file output_file", note="paceline batch runs a file of prompts")
    yield from _rows(PADDLE, REFUSED, "cachekv_int8_type", note=CACHE)
    yield from _rows(PADDLE, REFUSED, "weight_block_size moe_quant_type", note="quant_type says how weights are packed")
    yield from _rows(PADDLE, NO_EFFECT, "benchmark", note="paceline compare measures", switch=True)
    yield from _rows(PADDLE, NO_EFFECT, "model_type", note="the model's config says it")
    rule = "the acceptance rule checks drafts"
    yield from _rows(PADDLE, NO_EFFECT, "speculate_verify_window speculate_max_candidate_len", note=rule)
    yield from _rows(PADDLE, NO_EFFECT, "model_prefix avx_type avx_cachekv_type weightonly_group_size")
    idle = "inference_model append_attn block_attn return_full_hidden_states dynamic_insert "
    idle += "use_flash_attention avx_model avx_mode export_precache serving_mode use_fake_parameter output_via_mq"
    yield from _rows(PADDLE, NO_EFFECT, idle, switch=True)


SPELLINGS: tuple[Spelling, ...] = (*_vllm(), *_lmflow(), *_colossal(), *_paddle())
SWITCHES = frozenset(row.name for row in SPELLINGS if row.switch)
# PaddleNLP's parser takes the word behind a switch for its value, whatever it is; where it counts, so do we.
VALUED = frozenset(row.name for row in SPELLINGS if row.switch and row.system == PADDLE and row.effect == SAME)
ARGUMENTS = frozenset(row.name for row in SPELLINGS if row.to == "prompt")  # flags whose value is the argument
