"""Llamas with experts in place of a feed-forward: Mixtral, Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Routing
from paceline.models import llama
from paceline.models.config import MixtureConfig, ModelConfig, is_whole
from paceline.models.gguf_names import More, NumberOf
from paceline.models.layers.experts import NAMES, load_mixture
from paceline.models.weights import Weights

# Where a layer's experts are, and what each calls its matrices: Mixtral's files have names of their own.
PLACES = {"block_sparse_moe.": ("w1", "w3", "w2"), "mlp.": NAMES}


class Layer(llama.Layer):
    """Attention and experts, each behind a norm."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._load_norms(config, weights)
        self._load_attention(config, weights.under("self_attn."))
        place = next((place for place in PLACES if weights.has(f"{place}gate.weight")), "mlp.")
        self.mixture = load_mixture(config, weights.under(place), PLACES[place])

    def feed_forward(self, f: Forward, x: Any) -> Any:
        return self.mixture(f, x)


class MixtureLlama(llama.Llama):
    @staticmethod
    def load_layer(number: int, config: ModelConfig, weights: Weights) -> llama.Layer:
        assert config.mixture is not None, "the config has experts"
        return (llama.Layer if number in config.mixture.dense_layers else Layer)(config, weights)


def read_mixtral(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    routing = Routing(config.num_experts_per_tok, "softmax", normalised=True)
    mixture = MixtureConfig(config.num_local_experts, config.intermediate_size, routing)
    return {**llama.read_mistral(config), "mixture": mixture}


def read_qwen(config: Any) -> dict[str, Any]:
    """Every so many layers have experts, and some are named that have none."""
    step, plain = config.decoder_sparse_step, config.mlp_only_layers or ()
    if not is_whole(step) or step < 1:
        raise CheckpointError(f"a config gives decoder_sparse_step={step!r}; allowed: a whole number from 1 on")
    dense = (n for n in range(config.num_hidden_layers) if n in plain or (n + 1) % step)
    routing = Routing(config.num_experts_per_tok, "softmax", bool(config.norm_topk_prob))
    mixture = MixtureConfig(config.num_experts, config.moe_intermediate_size, routing, tuple(dense))
    return {**llama.read_mistral(config), "mixture": mixture}


def read_gguf(width: str) -> More:
    """Of a GGUF file, which has an expert's width under `width` and leaves the rest to the reader."""

    def read(number_of: NumberOf, num_layers: int) -> dict[str, Any]:
        said: list[Any] = [number_of(key, None) for key in ("expert_count", "expert_used_count", width)]
        count, chosen, wide = (int(number) if number == int(number) else number for number in said)
        return {"mixture": MixtureConfig(count, wide, Routing(chosen, "softmax", normalised=True))}

    return read


GGUF = (
    llama.GGUF[0],
    {
        **llama.GGUF[1],
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
)
