"""A GGUF file's metadata as a ModelConfig."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError
from paceline.models.config import LLAMA_LIKE, ModelConfig, RopeConfig
from paceline.models.gguf import GGUFFile

# Families whose attention carries biases on q, k and v.
BIASED = ("qwen2",)


def config_from_gguf(file: GGUFFile, label: str) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    supported = tuple(name for name in LLAMA_LIKE if name != "mistral")  # Mistral files call themselves llama
    if architecture not in supported:
        raise CheckpointError(f"{label} is a {architecture!r} model; supported in GGUF: {', '.join(supported)}")

    def value(key: str, default: Any = None) -> Any:
        found = file.metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise CheckpointError(f"{label} lacks the metadata {architecture}.{key}")
        return found

    hidden, heads = int(value("embedding_length")), int(value("attention.head_count"))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{label} lacks the tensor token_embd.weight, which this model needs")
    ends = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_layers=int(value("block_count")),
        num_heads=heads,
        num_kv_heads=int(value("attention.head_count_kv", heads)),
        head_dim=int(value("attention.key_length", hidden // heads)),
        intermediate_size=int(value("feed_forward_length")),
        max_position=int(value("context_length")),
        norm_eps=float(value("attention.layer_norm_rms_epsilon")),
        activation="silu",
        tie_embeddings="output.weight" not in file.tensors,
        rope=_rope(file, architecture, label),
        qkv_bias=architecture in BIASED,
        qk_norm=architecture == "qwen3",
        eos_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
    )


def _rope(file: GGUFFile, architecture: str, label: str) -> RopeConfig:
    theta = float(file.metadata.get(f"{architecture}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind in ("none", None):
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = float(file.metadata.get(f"{architecture}.rope.scaling.factor", 1.0))
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    raise CheckpointError(f"{label} uses rope scaling {kind!r}; supported in GGUF: none, linear, or rope_freqs.weight")
