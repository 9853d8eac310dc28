"""A Hugging Face folder's config, or a loaded transformers config object, as a ModelConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, first_line
from paceline.models.config import ModelConfig, end_ids, make_config
from paceline.models.families import FAMILIES
from paceline.models.json_file import read_object
from paceline.models.quantised import refuse_config


def read_raw(folder: Path) -> dict[str, Any]:
    """What stands in a Hugging Face folder's config.json."""
    try:
        return read_object(folder / "config.json")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no config.json, so it is not a Hugging Face model folder") from None


def read_config(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    """From the same (and generation_config.json, for the end tokens)."""
    path, kind = folder / "config.json", raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(f"{path} says model_type {kind!r}; model_impl='paceline' runs: {', '.join(FAMILIES)}")
    refuse_config(raw.get("quantization_config"), str(folder))
    from transformers import AutoConfig

    try:
        spelled = FAMILIES[kind].spelled
        if spelled:  # transformers knows no such type
            config = AutoConfig.for_model(spelled, **{name: raw[name] for name in raw if name != "model_type"})
            config.model_type = kind
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ZeroDivisionError:
        raise CheckpointError(f"{path} gives 0 where a count of at least 1 is needed") from None
    except Exception as error:
        raise CheckpointError(f"{path} is not a usable {kind} config: {first_line(error)}") from None
    return from_transformers(config, generation_eos(folder), str(path))


def generation_eos(folder: Path) -> Any:
    try:
        return read_object(folder / "generation_config.json").get("eos_token_id")
    except FileNotFoundError:
        return None


def from_transformers(config: Any, eos: Any = None, label: str = "the config") -> ModelConfig:
    """From a loaded transformers config object."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise CheckpointError(f"the model type is {kind!r}; model_impl='paceline' runs: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    refuse_config(getattr(config, "quantization_config", None), f"the {kind} model")
    try:
        fields = family.read(config)
    except AttributeError as error:
        raise CheckpointError(f"the {kind} config lacks a value: {error}") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the {kind} config has a value that cannot be used: {error}") from None
    dtype = config.dtype if hasattr(config, "dtype") else getattr(config, "torch_dtype", None)
    common = {
        "architecture": kind,
        "eos_ids": end_ids(eos, label) or end_ids(getattr(config, "eos_token_id", None), label),
        "torch_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    return make_config({**common, **fields, **family.traits}, label)
