"""Which models the fallback takes, and how they are read: a folder or an object of transformers, whole.

What cannot be right is refused here by what configs and classes say, before a weight is read; what they do not say is
found out by `fallback_proof`.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, OptionError, first_line
from paceline.kernels import KERNELS, Ops, select
from paceline.models.config import ModelConfig, end_ids, make_config
from paceline.models.fallback import Fallback, find_body
from paceline.models.fallback_proof import measure, prove
from paceline.models.families import FAMILIES
from paceline.models.quantised import refuse_config
from paceline.models.transformers_config import from_transformers

log = logging.getLogger("paceline")

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local")
# Names of config values that only models with a running state have.
STATES = re.compile(
    r"^(mamba|ssm|rwkv|wkv|xlstm|lru|recurrent|conv|linear_(conv|num|key|value|attn)|time_(mix|step))_?"
)
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
UNSCALED = "original_max_position_embeddings"
UNSAID_POSITIONS = 2048  # of models that say nothing, such as BLOOM, whose ALiBi has no end


@dataclass(frozen=True)
class FallbackSource:
    """A model to be read: transformers' config, and the folder or the object it is in."""

    config: Any
    label: str
    folder: Path | None = None
    module: Any = None
    trust: bool = False


def find_folder(folder: Path, raw: Mapping[str, Any], trust: bool) -> FallbackSource:
    """By its config.json. Code that comes with it is run only if it is trusted."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, path, own = raw.get("model_type"), folder / "config.json", raw.get("auto_map")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    runs = known and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    foreign = not runs and isinstance(own, Mapping) and "AutoModelForCausalLM" in own
    if foreign and not trust:
        raise CheckpointError(
            f"{folder} comes with code of its own for model_type {kind!r}; such code is run only with "
            "trust_remote_code=True (--trust-remote-code)"
        )
    if not known and not foreign:
        raise CheckpointError(
            f"{path} says model_type {kind!r}, which transformers does not know; paceline's own: {', '.join(FAMILIES)}"
        )
    refuse_config(raw.get("quantization_config"), str(folder))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=foreign)
    except Exception as error:
        raise CheckpointError(f"{path} is not a usable {kind} config: {first_line(error)}") from None
    source = FallbackSource(config, str(folder), folder, trust=foreign)
    refuse(source)
    return source


def find_object(module: Any) -> FallbackSource:
    """A user's own, by the config it carries."""
    source = FallbackSource(module.config, f"the {type(module).__name__} object", module=module)
    refuse_config(getattr(module.config, "quantization_config", None), source.label)
    refuse(source)
    return source


def refuse(source: FallbackSource) -> None:
    """What no cache of keys and values can run, by name."""
    config, kind = source.config, source.config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{source.label} is a {kind} model, an encoder with a decoder; only decoders can be run")
    text = config.get_text_config(decoder=True)  # the config itself, unless the model reads pictures too
    found = next((one for part in (config, text) for one in _states(part, _class(source))), None)
    if found is not None:
        raise CheckpointError(
            f"{source.label} is a {kind} model, whose layers keep a state besides keys and values ({found}); such "
            "recurrent and hybrid models cannot be rolled back by length when drafts are refused, so they are not run"
        )


def _class(source: FallbackSource) -> Any:
    """transformers' class for it; None: its code comes with it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if source.module is not None:
        return type(source.module)
    if source.trust:
        return None
    if type(source.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = source.config.model_type
        raise CheckpointError(f"{source.label} is a {kind} model, which generates no text by itself")
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(source.config)]


def _states(config: Any, kind: Any) -> Iterator[str]:
    """What shows that a model keeps more than keys and values."""
    if getattr(kind, "_is_stateful", False):
        yield f"{kind.__name__} is stateful"
    for name in ("layer_types", "layers_block_type", "block_types", "layer_block_types", "attention_types"):
        listed = getattr(config, name, None)
        if isinstance(listed, list | tuple):
            yield from (f"layers of {one}" for one in listed if isinstance(one, str) and one not in ATTENTION)
    for name, value in config.to_dict().items():
        if STATES.match(name) and value:
            yield f"its config has {name}"


def read_config(source: FallbackSource, eos: Any) -> ModelConfig:
    """The counts that an engine asks for, wherever the config keeps them. What a layer is made of is measured later."""
    if source.config.model_type in FAMILIES:
        with suppress(CheckpointError):  # a kind of rope that is not ours, say
            return from_transformers(source.config, eos, source.label)
    config = source.config.get_text_config(decoder=True)
    try:
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        vocabulary, width = config.vocab_size, hidden // heads or 1
    except Exception as error:
        raise CheckpointError(f"the {config.model_type} config lacks a value: {first_line(error)}") from None
    dtype = getattr(config, "dtype", None)
    fields = {
        "architecture": source.config.model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": width,
        "intermediate_size": 4 * hidden,
        "max_position": find_positions(config),
        "norm_eps": 0.0,
        "activation": "",
        "tie_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "learned_positions": True,  # nothing is promised beyond the last one
        "eos_ids": end_ids(eos, source.label) or end_ids(getattr(config, "eos_token_id", None), source.label),
        "torch_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    return make_config(fields, source.label)


def find_positions(config: Any) -> int:
    """The most positions whose keys stay right: rope that changes with the text's length is held to its first form."""
    most: int = next((value for name in POSITIONS if (value := getattr(config, name, None))), UNSAID_POSITIONS)
    said = getattr(config, "rope_parameters", None) or {}
    nested = [one for one in said.values() if isinstance(one, Mapping)]
    for rope in nested or [said]:
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            first = rope.get(UNSCALED) or getattr(config, UNSCALED, None) or most
            if first < most:
                log.warning("rope scaling %r begins at position %d: that is where this model ends here", kind, first)
                most = first
    return int(most)


def build(
    source: FallbackSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    quantization: str | None,
) -> Fallback:
    """Read the weights, and hold the module to what it has to do."""
    ops = find_ops(kernels, device, dtype, quantization)
    module = read_folder(source, dtype) if source.module is None else place(source.module, dtype, device)
    name = type(module.to(device).eval()).__name__
    try:
        body = find_body(module)
        if body is None or module.get_output_embeddings() is None:
            raise CheckpointError(f"{source.label}: {name} is not made of tokens, layers and a head")
        vocabulary = module.get_output_embeddings().weight.shape[0]  # as many as there are logits, whatever was said
        model = Fallback(replace(config, vocab_size=vocabulary), ops, module, body)
        model.specs = measure(model)
        prove(model)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{source.label}: {name} cannot be run: {first_line(error)}") from None
    log.warning(
        "%s (model type %s) is run by transformers' %s, the fallback: slower than code of ours. Drafters without a "
        "model, draft models, and heads that read states can draft for it",
        source.label,
        config.architecture,
        name,
    )
    return model


def find_ops(kernels: str, device: torch.device, dtype: torch.dtype, quantization: str | None) -> Ops:
    """auto: torch."""
    if quantization is not None:
        raise OptionError(
            f"quantization={quantization!r} needs a model type with code of ours; transformers runs this one"
        )
    if kernels == "native":
        allowed = ", ".join(name for name in KERNELS if name != "native")
        raise OptionError(f"kernels='native' cannot run a model of transformers' own code; allowed: {allowed}")
    return select("torch" if kernels == "auto" else kernels, device, dtype)


def read_folder(source: FallbackSource, dtype: torch.dtype) -> Any:
    """The module with every weight of the folder; what is missing is refused, what is left over told."""
    from transformers import AutoModelForCausalLM

    try:
        how = {"config": source.config, "dtype": dtype, "local_files_only": True, "output_loading_info": True}
        with quietly():
            module, told = AutoModelForCausalLM.from_pretrained(source.folder, trust_remote_code=source.trust, **how)
    except Exception as error:
        raise CheckpointError(f"{source.label} cannot be read by transformers: {first_line(error)}") from None
    missing = sorted(told["missing_keys"]) + [name for name, *_ in told.get("mismatched_keys", ())]
    if missing:
        raise CheckpointError(f"{source.label} lacks {missing[0]}, or has it in another shape ({len(missing)} in all)")
    unused = sorted(told["unexpected_keys"])
    if unused:
        log.warning("%s holds tensors this model does not use: %s", source.label, ", ".join(unused[:5]))
    return module


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars and reports: what matters of them is told in our words."""
    from transformers.utils import logging as reports

    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()


def place(module: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A user's object as it is, where type and device fit; else a copy. Tables that are not weights keep their type."""
    weights = list(module.parameters())
    if all(one.dtype == dtype and one.device.type == device.type for one in weights) and not module.training:
        return module
    copied = copy.deepcopy(module)
    for one in copied.parameters():
        one.data = one.data.to(device, dtype)
    return copied
