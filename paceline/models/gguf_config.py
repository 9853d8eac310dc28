"""A GGUF file's metadata as a ModelConfig."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig, RopeConfig, end_ids, is_whole, make_config
from paceline.models.families import FAMILIES
from paceline.models.gguf import GGUFFile


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    label, architecture = file.path, file.metadata.get("general.architecture")
    spelt = {(f.gguf.architecture, f.gguf.experts): (f, f.gguf) for f in FAMILIES.values() if f.gguf}
    known = dict.fromkeys(name for name, _ in spelt)
    if not isinstance(architecture, str) or architecture not in known:
        raise CheckpointError(f"{label} is a {_shown(architecture)} model; supported in GGUF: {', '.join(known)}")
    said = _Metadata(file.metadata, architecture, label)
    experts = said.count("expert_count", 0)
    if (architecture, experts > 0) not in spelt:
        raise CheckpointError(f"{label} is a {architecture} model of {experts} experts, which is not supported")
    family, names = spelt[architecture, experts > 0]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{label} lacks the matrix token_embd.weight, which this model needs")
    heads, num_layers = said.count("attention.head_count"), said.count("block_count")
    fields = {
        "architecture": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": said.count("embedding_length"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": said.count("attention.head_count_kv", heads),
        "head_dim": said.count("attention.key_length") if said.has("attention.key_length") else None,
        "intermediate_size": said.count("feed_forward_length"),
        "max_position": said.count("context_length"),
        "norm_eps": said.number("attention.layer_norm_rms_epsilon"),
        "activation": names.activation,
        "tie_embeddings": "output.weight" not in file.tensors,
        "rope": _rope(said),
        "eos_ids": _end_ids(file.metadata, label),
    }
    more = {} if names.more is None else names.more(said.number, num_layers)
    config = make_config({**fields, **more, **family.traits}, label)
    said.check_turns(config.head_dim)
    return config


@dataclass(frozen=True)
class _Metadata:
    """What a file says of its architecture, one number at a time."""

    values: dict[str, Any]
    architecture: str
    label: str

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def get(self, key: str, default: Any) -> Any:
        found = self.values.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{self.label} lacks the metadata {self.architecture}.{key}")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        found = self.get(key, default)
        if not is_whole(found):
            self._refuse(key, found, "one whole number for all layers")
        return int(found)

    def number(self, key: str, default: float | None = None) -> float:
        found = self.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            self._refuse(key, found, "one number above 0")
        return float(found)

    def check_turns(self, head: int) -> None:
        """All of a head turns."""
        turning = self.count("rope.dimension_count", head)
        if turning != head:
            self._refuse("rope.dimension_count", turning, f"a head's width, {head}")

    def _refuse(self, key: str, found: Any, allowed: str) -> NoReturn:
        raise CheckpointError(f"{self.label} gives {self.architecture}.{key} as {_shown(found)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    return f"an array of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)


def _rope(said: _Metadata) -> RopeConfig:
    theta = said.number("rope.freq_base", 10000.0)
    kind = said.get("rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return RopeConfig(theta=theta)
    if isinstance(kind, str) and kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=said.number("rope.scaling.factor", 1.0))
    raise CheckpointError(
        f"{said.label} uses rope scaling {_shown(kind)}; supported in GGUF: none, linear, or rope_freqs.weight"
    )


def _end_ids(metadata: dict[str, Any], label: str) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = [metadata[key] for key in keys if metadata.get(key) is not None]
    return tuple(dict.fromkeys(end_ids(found, label)))
