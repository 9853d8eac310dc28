"""DeepSeek V3 and R1: keys and values made of one narrow row that all heads share, which alone is cached.

A head's key is [the part that turns | the plain part], files have them the other way round. The row is
[the part that turns | the latent], and a layer's matrix `kv_b` makes of the latent, for each head, a plain key and a
value. Two forms compute the same:

    absorbed   a query's plain part goes through its head's key matrix and meets the latent itself; what a head sees,
               a latent, goes through its value matrix. The cache holds the row: rank + rope_dim values
    naive      keys and values of every head are made and cached: the reference
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Forward, Heads, LayerSpec, Part, Weight
from paceline.models import llama
from paceline.models.base import Model
from paceline.models.config import Latent, ModelConfig, is_whole, yarn_growth
from paceline.models.layers.experts import check_biases, load_mixture
from paceline.models.layers.linear import Linear
from paceline.models.layers.rope import tables
from paceline.models.mixture import read_grouped
from paceline.models.weights import Weights

LATENT_EPS = 1e-6  # of the norms inside attention, whatever the config says


class Layer(llama.Layer):
    """Attention through a latent, and a feed-forward or experts, each behind a norm."""

    def __init__(self, config: ModelConfig, weights: Weights, dense: bool) -> None:
        self._load_norms(config, weights)
        self._load_attention(config, weights.under("self_attn."))
        self.mixture = None if dense else load_mixture(config, weights.under("mlp."))
        if dense:
            self._load_feed_forward(config, weights.under("mlp."))

    def feed_forward(self, f: Forward, x: Any) -> Any:
        return super().feed_forward(f, x) if self.mixture is None else self.mixture(f, x)

    def _load_attention(self, config: ModelConfig, weights: Weights) -> None:
        latent = config.latent
        assert latent is not None
        hidden, heads, head = config.hidden_size, config.num_heads, config.head_dim
        self.query_down, self.query_norm = None, None
        name, given = "q_proj.weight", hidden
        if latent.query_rank is not None:
            name, given = "q_b_proj.weight", latent.query_rank
            bias = weights.whole("q_a_proj.bias", (given,)) if config.qkv_bias else None
            self.query_down = Linear(weights.matrix(["q_a_proj.weight"], [(given, hidden)]), bias)
            self.query_norm = weights.whole("q_a_layernorm.weight", (given,))
        shape = heads * head, given
        self.query = Linear(weights.derived(name, shape, shape, "turned", lambda w: [turning_first(w, latent, heads)]))
        self._load_latent(config, latent, weights)
        out_bias = weights.whole("o_proj.bias", (hidden,)) if config.out_bias else None
        self.out = Linear(weights.matrix(["o_proj.weight"], [(hidden, heads * latent.value_dim)]), out_bias)

    def _load_latent(self, config: ModelConfig, latent: Latent, weights: Weights) -> None:
        name, width, heads = "kv_a_proj_with_mqa", latent.rank + latent.rope_dim, config.num_heads
        bias = weights.whole(f"{name}.bias", (width,)) if config.qkv_bias else None
        shape = width, config.hidden_size
        matrix = weights.derived(f"{name}.weight", shape, shape, "turned", lambda w: [turning_first(w, latent, 1)])
        self.down_latent = Linear(matrix, None if bias is None else turning_first(bias[:, None], latent, 1)[:, 0])
        self.latent_norm = weights.whole("kv_a_layernorm.weight", (latent.rank,))
        each = latent.plain_dim + latent.value_dim
        both = "kv_b_proj.weight", (heads * each, latent.rank)

        def split(matrix: Tensor) -> tuple[Tensor, Tensor]:
            rows = matrix.view(heads, each, -1)
            return rows[:, : latent.plain_dim], rows[:, latent.plain_dim :]

        self.keys_values: Weight | None = None  # of all heads: the naive form
        if latent.absorbed:
            sizes = (heads * latent.rank, latent.plain_dim), (heads * latent.value_dim, latent.rank)
            self.keys = weights.derived(
                *both, sizes[0], "keys", lambda w: list(split(w)[0].transpose(1, 2)), picked=True
            )
            self.values = weights.derived(*both, sizes[1], "values", lambda w: list(split(w)[1]), picked=True)
        else:
            size = heads * (config.head_dim + latent.value_dim), width
            self.keys_values = weights.derived(*both, size, "both", lambda w: expand(*split(w), latent.rope_dim))


def turning_first(matrix: Tensor, latent: Latent, heads: int) -> Tensor:
    """Rows of each head: those that turn, its last in a file, before the plain ones, and in halves.

    Where a file has pairs that turn against one another, the first of all come first. Scores stay what they are, since
    queries and keys are put into the same order.
    """
    rows = matrix.view(heads, -1, matrix.shape[1])
    plain, turning = rows[:, : -latent.rope_dim], rows[:, -latent.rope_dim :]
    if latent.interleaved:
        turning = torch.cat([turning[:, 0::2], turning[:, 1::2]], dim=1)
    return torch.cat([turning, plain], dim=1).reshape(matrix.shape)


def expand(keys: Tensor, values: Tensor, turning: int) -> list[Tensor]:
    """The matrix that makes keys and values of all heads from the row, the part that turns being copied to each."""
    heads, plain, rank = keys.shape
    made = keys.new_zeros(heads, turning + plain, turning + rank)
    made[:, :turning, :turning] = torch.eye(turning)
    made[:, turning:, turning:] = keys
    return [made.flatten(0, 1), torch.nn.functional.pad(values.flatten(0, 1), (turning, 0))]


class DeepSeek(Model):
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        assert config.latent is not None and config.mixture is not None, "the config has both"
        self.latent, dense = config.latent, config.mixture.dense_layers
        body, shape = weights.under("model."), (config.vocab_size, config.hidden_size)
        names = (body.prefix + "embed_tokens.weight", "lm_head.weight")
        self.embedding, self.head = weights.vocabulary(*names, shape, config.tie_embeddings)
        self.layers = [Layer(config, body.under(f"layers.{i}."), i in dense) for i in range(config.num_layers)]
        check_biases(self.layers, body.under("layers."))
        self.norm = body.whole("norm.weight", (config.hidden_size,))
        cos, sin = tables(config.rope, self.latent.rope_dim, max_position or config.max_position)
        self.cos, self.sin = cos.to(weights.device), sin.to(weights.device)
        body.leave_out_modules(config.num_layers)

    def layer_specs(self, dtype: torch.dtype) -> list[LayerSpec]:
        return [self._forms(dtype)[self.latent.absorbed]] * self.config.num_layers

    def _forms(self, dtype: torch.dtype) -> dict[bool, LayerSpec]:
        """A cache layer, by whether the matrices are absorbed."""
        latent, heads = self.latent, self.config.num_heads
        naive = Part(heads, self.config.head_dim, dtype), Part(heads, latent.value_dim, dtype)
        return {True: LayerSpec((Part(1, latent.rope_dim + latent.rank, dtype),)), False: LayerSpec(naive)}

    def cache_bytes(self, dtype: torch.dtype) -> dict[str, int]:
        forms, own = self._forms(dtype), self.latent.absorbed
        names = {True: "latent rows", False: "keys and values of every head"}
        return {names[form]: forms[form].row_bytes * self.config.num_layers for form in (own, not own)}

    def describe(self, f: Forward) -> Any:
        x = f.embed(self.embedding)
        f.tap(0, x)
        for number, layer in enumerate(self.layers):
            x = self.run_layer(f, layer, x, number)
            f.tap(number + 1, x)
        return f.rms_norm(x, self.norm, self.config.norm_eps)

    def run_layer(self, f: Forward, layer: Layer, x: Any, number: int, window: int | None = None) -> Any:
        """One of its own, or an extra one, looking at cache layer `number`; no layer has a window."""
        eps = self.config.norm_eps
        x = f.add(x, layer.out(f, self._look(f, layer, f.rms_norm(x, layer.attention_norm, eps), number)))
        return f.add(x, layer.feed_forward(f, f.rms_norm(x, layer.feed_forward_norm, eps)))

    def extra_layer(self, weights: Weights) -> Layer:
        """A layer as stands behind the last, for a module that is made of one."""
        return Layer(self.config, weights, dense=False)

    def _look(self, f: Forward, layer: Layer, x: Any, number: int) -> Any:
        """What every head sees: [T, heads · value_dim]."""
        latent, heads, head = self.latent, self.config.num_heads, self.config.head_dim
        scale = self.config.attention_scale
        assert scale is not None
        q = x
        if layer.query_down is not None and layer.query_norm is not None:
            q = f.rms_norm(layer.query_down(f, x), layer.query_norm, LATENT_EPS)
        q = f.rope(layer.query(f, q), Heads(heads, 0, head), self.cos, self.sin)
        turning, plain = f.split(layer.down_latent(f, x), [latent.rope_dim, latent.rank])
        row = f.concat(turning, f.rms_norm(plain, layer.latent_norm, LATENT_EPS))
        row = f.rope(row, Heads(1, 0, latent.rope_dim + latent.rank), self.cos, self.sin)
        if layer.keys_values is not None:
            qkv = f.concat(q, f.linear(row, layer.keys_values, None))
            return f.attention(qkv, Heads(heads, heads, head, latent.value_dim), number, None, scale)
        q = f.per_head(q, layer.keys, heads)
        return f.per_head(f.latent_attention(q, row, heads, latent.rank, number, scale), layer.values, heads)


def read(config: Any) -> dict[str, Any]:
    """The fields of a ModelConfig in a transformers config."""
    fields = llama.read(config)
    if fields["num_kv_heads"] != fields["num_heads"]:
        raise CheckpointError(
            f"the {config.model_type} config gives num_key_value_heads={fields['num_kv_heads']}; allowed: as many as "
            f"there are heads ({fields['num_heads']})"
        )
    latent = _read_latent(config)
    width = latent.plain_dim + latent.rope_dim
    scaled = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    growth = yarn_growth(fields["rope"].factor, float(scaled.get("mscale_all_dim") or 0))
    scale = width**-0.5 * growth * growth
    mixture = read_grouped(config)
    return {**fields, "head_dim": width, "latent": latent, "attention_scale": scale, "mixture": mixture}


def _read_latent(config: Any) -> Latent:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    rank, plain, turning, value, query_rank = (getattr(config, name) for name in names)
    kind = config.model_type
    for name, width in zip(names, (rank, plain, turning, value, 1 if query_rank is None else query_rank)):
        if not is_whole(width) or width < 1:
            raise CheckpointError(f"the {kind} config gives {name}={width!r}; allowed: a whole number above 0")
    if turning % 2:
        raise CheckpointError(f"the {kind} config gives qk_rope_head_dim={turning}; allowed: an even number")
    return Latent(rank, query_rank, plain, turning, value, bool(getattr(config, "rope_interleave", True)))
