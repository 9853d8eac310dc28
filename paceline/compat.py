"""Foreign spellings of options, and only here: what other systems call things, translated into our words."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.drafters.draft_model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.errors import OptionError

log = logging.getLogger("paceline")

# vLLM options with no counterpart here; taken, and said to have no effect.
WITHOUT_EFFECT = (
    "use_v2_block_manager",
    "trust_remote_code",
    "enforce_eager",
    "swap_space",
    "disable_log_stats",
    "speculative_disable_by_batch_size",
    "speculative_max_model_len",
    "disable_logprobs_during_spec_decoding",
    "max_seq_len_to_capture",
)
RENAMED = {
    "enable_prefix_caching": "prefix_caching",
    "num_gpu_blocks_override": "num_pages",
    "max_num_batched_tokens": "max_batched_tokens",
}
_OLD = (
    "speculative_model",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "speculative_draft_tensor_parallel_size",
)
_NEW = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "draft_tensor_parallel_size",
    "use_heterogeneous_vocab",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)


def translate(options: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """vLLM's `LLM(...)` options in our words; an unknown one is refused, naming the nearest."""
    result: dict[str, Any] = {}
    allowed = [*known]
    for name, value in options.items():
        if name in WITHOUT_EFFECT:
            log.warning("%s=%r has no effect here", name, value)
        elif name in RENAMED:
            if RENAMED[name] in options:
                raise OptionError(f"{name} and {RENAMED[name]} are the same option; give one")
            result[RENAMED[name]] = value
        elif name in allowed:
            result[name] = value
        elif name not in (*_OLD, "speculative_config"):
            raise OptionError(unknown_option(name, [*allowed, *RENAMED, *_OLD, "speculative_config"]))
    drafter = _drafter_of(options)
    if drafter is not None:
        if result.get("drafter") is not None:
            raise OptionError("both drafter= and a foreign spelling of it were given; give one")
        result["drafter"] = drafter
    return result


def unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
    return f"option {name!r} is not known; {hint}"


def _drafter_of(options: Mapping[str, Any]) -> Any:
    config = options.get("speculative_config")
    old = {name: options[name] for name in _OLD if options.get(name) is not None}
    if config is not None and old:
        raise OptionError(f"speculative_config and {', '.join(old)} were both given; give one of the two")
    if config is not None:
        return from_speculative_config(config)
    return _from_old(old) if old else None


def _from_old(old: dict[str, Any]) -> Any:
    """vLLM before speculative_config. A maximum alone means a minimum of 1 there."""
    model = old.get("speculative_model")
    if model is None:
        raise OptionError(f"{', '.join(old)} needs speculative_model= (a model, or '[ngram]')")
    _one_rank("speculative_draft_tensor_parallel_size", old.get("speculative_draft_tensor_parallel_size", 1))
    count = old.get("num_speculative_tokens", 5)
    if model == "[ngram]":
        longest = old.get("ngram_prompt_lookup_max")
        if longest is None:
            raise OptionError("speculative_model='[ngram]' needs ngram_prompt_lookup_max=, a whole number of 1 or more")
        return NGram(count, min_match=old.get("ngram_prompt_lookup_min") or 1, max_match=longest)
    for name in ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"):
        if name in old:
            log.warning("%s does not apply to a draft model and is left out", name)
    return DraftModel(model, count)


def from_speculative_config(config: Any) -> Any:
    """vLLM's newer speculative_config={...}."""
    if not isinstance(config, Mapping):
        raise OptionError(f"speculative_config={config!r} is not allowed; allowed: a dictionary")
    for name in config:
        if name not in _NEW:
            raise OptionError("speculative_config: " + unknown_option(name, list(_NEW)))
    model = config.get("model")
    method = config.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model")
    _one_rank("draft_tensor_parallel_size", config.get("draft_tensor_parallel_size") or 1)
    count = config.get("num_speculative_tokens")
    if method == "ngram":
        return NGram(
            5 if count is None else count,
            min_match=config.get("prompt_lookup_min"),
            max_match=config.get("prompt_lookup_max"),
        )
    if method == "suffix":
        names = {
            "suffix_decoding_max_tree_depth": "max_tree_depth",
            "suffix_decoding_max_cached_requests": "max_cached_requests",
            "suffix_decoding_max_spec_factor": "max_spec_factor",
            "suffix_decoding_min_token_prob": "min_token_prob",
        }
        given = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
        return Suffix(**({} if count is None else {"num_draft_tokens": count}), **given)
    if method == "draft_model":
        if model is None:
            raise OptionError("speculative_config needs 'model', the draft model, or a 'method' that has none")
        return DraftModel(
            model, 5 if count is None else count, cross_vocabulary=bool(config.get("use_heterogeneous_vocab", False))
        )
    raise OptionError(f"speculative_config: method {method!r} is not supported; supported: ngram, suffix, draft_model")


def _one_rank(name: str, size: Any) -> None:
    if size != 1:
        raise OptionError(f"{name}={size!r} is not supported yet; allowed: 1")
