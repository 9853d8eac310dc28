"""The one table: what other systems call things, and what each is here.

A row's `to` is where its value goes: an option of the engine or of a request by our name, `draft.NAME` for an option of
the drafter, `NAME=VALUE` where the spelling means one value of ours. A row with a `value` is about that value alone.
Documentation and tests are made from these rows. This module knows words only; it must not import anything heavy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.drafters.table import KINDS, MODEL, find, find_method, listed, loadable

LIBRARY, COMMAND_LINE, BOTH = "library", "command line", "both"
VLLM, LMFLOW, COLOSSAL, PADDLE = "vLLM", "LMFlow", "Colossal-Inference", "PaddleNLP"
SAME, RENAMED, NO_EFFECT, REFUSED, LATER = "same", "renamed", "no effect", "refused", "later"

# What to type for a part of a drafter, in the library and on the command line, where no row of its table says it.
PARTS = {
    "num_draft_tokens": ("the drafter's num_draft_tokens=…", "--num-draft-tokens"),
    "quantization": ("DraftModel(quantization=…)", "--drafter-quantization"),
    "method=none": ("drafter=None", "--drafter none"),
    "method=reference": ("drafter=NGram(rule='reference')", "--drafter ngram:rule=reference"),
}
FLAGS = {"prompt_template": "--template", "stop_token_ids": "--stop-token-id", "default_max_tokens": "--max-tokens"}


@dataclass(frozen=True)
class Spelling:
    """How one system calls something. note: why it is refused or has no effect, or what else a user should know."""

    system: str
    name: str
    to: str
    effect: str
    where: str = BOTH
    value: str = ""
    note: str = ""

    @property
    def ours(self) -> str:
        """What to type instead; nothing where there is nothing to type."""
        if not self.to:
            return ""
        library, flag = self._words()
        return {LIBRARY: library, COMMAND_LINE: flag, BOTH: f"{library}, {flag}"}[self.where]

    @property
    def test(self) -> str:
        """The test that holds this row."""
        return f"tests/test_compat.py::test_a_spelling_means_what_the_table_says[{self.id}]"

    @property
    def id(self) -> str:
        return "-".join(part for part in (self.system, self.name, self.value) if part)

    def holds(self, where: str) -> bool:
        return self.where in (where, BOTH)

    def _words(self) -> tuple[str, str]:
        name, equals, value = self.to.partition("=")
        if name.startswith("draft."):
            part = self.to.removeprefix("draft.")
            return PARTS.get(part) or PARTS.get(name.removeprefix("draft.")) or _of_drafter(part)
        flag = FLAGS.get(name, "--" + name.replace("_", "-"))
        return (f"{name}={value}", f"{flag} {value}") if equals else (name, flag)


def _of_drafter(part: str) -> tuple[str, str]:
    """A kind of drafter, or an option of the kind that has it; a model is what draft models have."""
    name, _, method = part.partition("=")
    if name in ("method", "model"):
        kind = find(method) or MODEL
        return f"drafter={kind.config.__name__}(…)", f"--drafter {kind.word}{':model=…' if kind.has_model else ''}"
    kind = next(kind for kind in loadable() if name in kind.options)
    return f"drafter={kind.config.__name__}({name}=…)", f"--drafter {kind.word}:{name}=…"


def named(name: str, where: str) -> list[Spelling]:
    """The rows of one spelling, as far as they hold in the library or on the command line."""
    return [row for row in SPELLINGS if row.name == name and row.holds(where)]


def names(where: str) -> list[str]:
    """Every spelling there, but not the keys inside speculative_config."""
    return list(dict.fromkeys(row.name for row in SPELLINGS if row.holds(where) and "." not in row.name))


def _vllm() -> Iterator[Spelling]:
    yield Spelling(VLLM, "model", "model", SAME)
    for name in ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "max_num_seqs", "block_size"):
        yield Spelling(VLLM, name, name, SAME)
    for name in ("dtype", "quantization", "seed"):
        yield Spelling(VLLM, name, name, SAME)
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "ignore_eos", "repetition_penalty"):
        yield Spelling(VLLM, name, name, SAME)
    yield Spelling(VLLM, "enable_prefix_caching", "prefix_caching", RENAMED)
    yield Spelling(VLLM, "num_gpu_blocks_override", "num_pages", RENAMED)
    yield Spelling(VLLM, "max_num_batched_tokens", "max_batched_tokens", RENAMED)
    yield Spelling(VLLM, "speculative_model", "draft.model", RENAMED)
    yield Spelling(VLLM, "speculative_model", "draft.method=ngram", RENAMED, value="[ngram]")
    yield Spelling(VLLM, "num_speculative_tokens", "draft.num_draft_tokens", RENAMED)
    yield Spelling(VLLM, "ngram_prompt_lookup_max", "draft.max_match", RENAMED)
    yield Spelling(VLLM, "ngram_prompt_lookup_min", "draft.min_match", RENAMED, note="1 unless given")
    one = "a drafter runs on one device; only 1 is allowed"
    yield Spelling(VLLM, "speculative_draft_tensor_parallel_size", "", SAME, value="1")
    yield Spelling(VLLM, "speculative_draft_tensor_parallel_size", "", LATER, note=one)
    yield Spelling(VLLM, "speculative_model_quantization", "draft.quantization", RENAMED)
    rejection, typical = "rejection_sampler", "typical_acceptance_sampler"
    yield Spelling(VLLM, "spec_decoding_acceptance_method", "acceptance=rejection", RENAMED, value=rejection)
    yield Spelling(VLLM, "spec_decoding_acceptance_method", "acceptance=typical", RENAMED, value=typical)
    yield from _speculative_config()
    for name in (
        "use_v2_block_manager",
        "trust_remote_code",
        "enforce_eager",
        "swap_space",
        "disable_log_stats",
        "disable_log_requests",
        "enable_chunked_prefill",
        "max_seq_len_to_capture",
        "speculative_max_model_len",
        "speculative_disable_by_batch_size",
        "speculative_disable_mqa_scorer",
        "disable_logprobs_during_spec_decoding",
        "typical_acceptance_sampler_posterior_threshold",
        "typical_acceptance_sampler_posterior_alpha",
    ):
        yield Spelling(VLLM, name, "", NO_EFFECT)


def _speculative_config() -> Iterator[Spelling]:
    yield Spelling(VLLM, "speculative_config", "drafter", RENAMED, note="a dictionary, or its JSON")

    def key(name: str, to: str, effect: str = RENAMED, value: str = "", note: str = "") -> Spelling:
        return Spelling(VLLM, f"speculative_config.{name}", to, effect, value=value, note=note)

    methods = {method: kind for kind in KINDS for method in kind.methods}
    supported = f"supported: {', '.join(method for method, kind in methods.items() if kind.loads)}"
    for method, kind in methods.items():
        if kind.loads:
            yield key("method", f"draft.method={kind.word}", value=method)
        else:
            yield key("method", "", LATER, method, supported)
    yield key("model", "draft.model")
    yield key("num_speculative_tokens", "draft.num_draft_tokens")
    yield key("prompt_lookup_max", "draft.max_match")
    yield key("prompt_lookup_min", "draft.min_match")
    yield key("use_heterogeneous_vocab", "draft.cross_vocabulary")
    yield key("quantization", "draft.quantization")
    for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob"):
        yield key(f"suffix_decoding_{name}", f"draft.{name}")
    one = "a drafter runs on one device; only 1 is allowed"
    yield key("draft_tensor_parallel_size", "", SAME, "1")
    yield key("draft_tensor_parallel_size", "", LATER, note=one)
    for name in ("max_model_len", "disable_by_batch_size", "disable_logprobs", "revision", "enforce_eager"):
        yield key(name, "", NO_EFFECT)


def _lmflow() -> Iterator[Spelling]:
    yield Spelling(LMFLOW, "model", "model", SAME)
    yield Spelling(LMFLOW, "draft_model", "draft.model", RENAMED)
    yield Spelling(LMFLOW, "temperature", "temperature", SAME, note="at or below 1e-6 the likeliest token is taken")
    yield Spelling(LMFLOW, "gamma", "draft.num_draft_tokens", RENAMED)
    yield Spelling(LMFLOW, "max_new_tokens", "max_tokens", RENAMED)
    yield Spelling(LMFLOW, "gpu", "device=cuda:N", RENAMED)
    yield Spelling(LMFLOW, "stop_token", "stop", RENAMED, note="a text; a number is a token id")


def _colossal() -> Iterator[Spelling]:
    yield Spelling(COLOSSAL, "dtype", "dtype", SAME, note="fp16, bf16, fp32 and torch's own, too")
    for name in ("block_size", "prompt_template"):
        yield Spelling(COLOSSAL, name, name, SAME)
    yield Spelling(COLOSSAL, "max_batch_size", "max_num_seqs", RENAMED)
    yield Spelling(COLOSSAL, "max_input_len", "max_prompt_len", RENAMED, note="a longer prompt is refused")
    sums = "with max_input_len the sum is max_model_len"
    yield Spelling(COLOSSAL, "max_output_len", "default_max_tokens", RENAMED, note=sums)
    yield Spelling(COLOSSAL, "tp_size", "tensor_parallel_size", RENAMED)
    yield Spelling(COLOSSAL, "max_n_spec_tokens", "draft.num_draft_tokens", RENAMED)
    yield Spelling(COLOSSAL, "n_spec_tokens", "draft.num_draft_tokens", RENAMED)
    yield Spelling(COLOSSAL, "drafter_model", "draft.model", RENAMED, note="on a live engine: llm.set_drafter(…)")
    greedy = "a dictionary or an object; as in transformers the likeliest token is taken unless do_sample=True is in it"
    yield Spelling(COLOSSAL, "generation_config", "sampling_params", RENAMED, LIBRARY, note=greedy)
    counts = "counts the prompt, as in transformers; max_tokens counts new tokens only"
    yield Spelling(COLOSSAL, "max_length", "max_tokens", RENAMED, LIBRARY, note=counts)
    yield Spelling(COLOSSAL, "max_new_tokens", "max_tokens", RENAMED)
    yield Spelling(COLOSSAL, "do_sample", "temperature=0", RENAMED, value="False")
    yield Spelling(COLOSSAL, "do_sample", "temperature", RENAMED, value="True", note="1 unless given")
    yield Spelling(COLOSSAL, "eos_token_id", "stop_token_ids", RENAMED, note="beside the model's own")
    yield Spelling(COLOSSAL, "min_new_tokens", "min_tokens", RENAMED)
    yield Spelling(COLOSSAL, "num_return_sequences", "n", RENAMED, LIBRARY)
    yield Spelling(COLOSSAL, "stop_strings", "stop", RENAMED)
    beams = "there is no beam search; only 1 is allowed"
    for name in ("num_beams", "beam_width"):
        yield Spelling(COLOSSAL, name, "", SAME, value="1")
        yield Spelling(COLOSSAL, name, "", REFUSED, note=beams)
    yield Spelling(COLOSSAL, "pad_token_id", "", NO_EFFECT, note="nothing is padded")
    for name in ("prefill_ratio", "verbose", "bos_token_id", "use_cache", "early_stopping", "pad_input"):
        yield Spelling(COLOSSAL, name, "", NO_EFFECT)
    for name in ("use_cuda_kernel", "use_cuda_graph"):
        yield Spelling(COLOSSAL, name, "", NO_EFFECT)
    for name in ("use_glide_drafter", "glimpse_large_kv"):
        yield Spelling(COLOSSAL, name, "", SAME, value="False")
        yield Spelling(COLOSSAL, name, "", LATER, note=f"drafters that load: {listed()}")


def _paddle() -> Iterator[Spelling]:
    yield Spelling(PADDLE, "model_name_or_path", "model", RENAMED)
    for name in ("dtype", "temperature", "top_p", "top_k", "repetition_penalty", "block_size"):
        yield Spelling(PADDLE, name, name, SAME)
    yield Spelling(PADDLE, "speculate_method", "draft.method=none", RENAMED, value="None")
    reference = "inference_with_reference"
    yield Spelling(PADDLE, "speculate_method", "draft.method=reference", RENAMED, value=reference)
    methods = {method: find_method(method) for method in ("draft_model", "mtp", "eagle")}
    supported = ", ".join([reference, *(method for method, kind in methods.items() if kind.loads)])
    for method, kind in methods.items():
        if kind.loads:
            yield Spelling(PADDLE, "speculate_method", f"draft.method={kind.word}", RENAMED, value=method)
        else:
            yield Spelling(PADDLE, "speculate_method", "", LATER, value=method, note=f"supported: {supported}")
    yield Spelling(PADDLE, "speculate_max_draft_token_num", "draft.num_draft_tokens", RENAMED)
    yield Spelling(PADDLE, "speculate_max_ngram_size", "draft.max_match", RENAMED)
    yield Spelling(PADDLE, "draft_model_name_or_path", "draft.model", RENAMED)
    supported = "supported: weight_only_int8, weight_only_int4"
    for name, to in (("quant_type", "quantization"), ("draft_model_quant_type", "draft.quantization")):
        for bits in ("int8", "int4"):
            yield Spelling(PADDLE, name, f"{to}={bits}", RENAMED, value=f"weight_only_{bits}")
        for bits in ("a8w8", "a8w8c8", "a8w8_fp8"):
            yield Spelling(PADDLE, name, "", REFUSED, value=bits, note=supported)
    yield Spelling(PADDLE, "total_max_length", "max_model_len", RENAMED)
    counts = "counts new tokens, as PaddleNLP's predictor counts"
    yield Spelling(PADDLE, "max_length", "max_tokens", RENAMED, COMMAND_LINE, note=counts)
    yield Spelling(PADDLE, "min_length", "min_tokens", RENAMED, COMMAND_LINE, note=counts)
    yield Spelling(PADDLE, "src_length", "max_prompt_len", RENAMED, note="a longer prompt is refused, not cut")
    yield Spelling(PADDLE, "batch_size", "max_num_seqs", RENAMED)
    yield Spelling(PADDLE, "decode_strategy", "temperature=0", RENAMED, value="greedy_search")
    yield Spelling(PADDLE, "decode_strategy", "temperature", RENAMED, value="sampling", note="1 unless given")
    beams = "there is no beam search; supported: sampling, greedy_search"
    yield Spelling(PADDLE, "decode_strategy", "", REFUSED, value="beam_search", note=beams)
    yield Spelling(PADDLE, "mode", "", SAME, value="dynamic")
    exported = "models cannot be exported; leave it out or give dynamic"
    yield Spelling(PADDLE, "mode", "", LATER, value="static", note=exported)
    for name in ("inference_model", "append_attn", "block_attn", "return_full_hidden_states"):
        yield Spelling(PADDLE, name, "", NO_EFFECT)
    for name in ("mla_use_matrix_absorption", "use_flash_attention"):
        yield Spelling(PADDLE, name, "", NO_EFFECT)
    for name in ("speculate_verify_window", "speculate_max_candidate_len"):
        yield Spelling(PADDLE, name, "", NO_EFFECT, note="the acceptance rule checks drafts")


SPELLINGS: tuple[Spelling, ...] = (*_vllm(), *_lmflow(), *_colossal(), *_paddle())

# Flags that may stand alone; a word after one is its value only if it says yes or no.
SWITCHES = frozenset(
    {
        "use_v2_block_manager",
        "trust_remote_code",
        "enforce_eager",
        "disable_log_stats",
        "disable_log_requests",
        "disable_logprobs_during_spec_decoding",
        "speculative_disable_mqa_scorer",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "ignore_eos",
        "do_sample",
        "verbose",
        "use_cache",
        "early_stopping",
        "pad_input",
        "use_cuda_kernel",
        "use_cuda_graph",
        "use_glide_drafter",
        "glimpse_large_kv",
        "inference_model",
        "append_attn",
        "block_attn",
        "return_full_hidden_states",
        "mla_use_matrix_absorption",
        "use_flash_attention",
    }
)
