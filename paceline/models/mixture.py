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
        place = next((place for place in PLACES if weights.any_under(place)), "mlp.")
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


def read_grouped(config: Any) -> MixtureConfig:
    """DeepSeek's experts, and GLM's: chosen by sigmoids within the best groups, beside some that every row passes."""
    scoring, kind = getattr(config, "scoring_func", "sigmoid"), config.model_type
    if scoring != "sigmoid":
        raise CheckpointError(f"the {kind} config gives scoring_func={scoring!r}; allowed: 'sigmoid'")
    first, step = config.first_k_dense_replace, getattr(config, "moe_layer_freq", 1)
    shared, groups, kept = (
        unsaid if value is None else value
        for value, unsaid in ((config.n_shared_experts, 0), (config.n_group, 1), (config.topk_group, 1))
    )
    said = ("first_k_dense_replace", first, 0), ("moe_layer_freq", step, 1), ("n_shared_experts", shared, 0)
    for name, value, least in said:
        if not is_whole(value) or value < least:
            raise CheckpointError(f"the {kind} config gives {name}={value!r}; allowed: a whole number from {least} on")
    normalised, scale = bool(config.norm_topk_prob), float(config.routed_scaling_factor)
    routing = Routing(config.num_experts_per_tok, scoring, normalised, scale, groups, kept)
    dense = tuple(n for n in range(config.num_hidden_layers) if n < first or n % step)
    width = config.moe_intermediate_size
    return MixtureConfig(config.n_routed_experts, width, routing, dense, shared * width)


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
