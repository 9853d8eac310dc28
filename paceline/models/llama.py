"""Llama and its kin: Llama 1/2/3, Vicuna, TinyLlama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from paceline.kernels import Ops
from paceline.models.base import Hidden, LayerCache, Plans, Recorder
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.layers.linear import ColumnParallel, RowParallel, VocabularyParallel
from paceline.models.layers.rope import Rope, rotate
from paceline.models.weights import Weights


class Attention:
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, weights: Weights) -> None:
        self.config, self.layer, self.ops = config, layer, ops
        hidden, head = config.hidden_size, config.head_dim
        names = ["q_proj", "k_proj", "v_proj"]
        sizes = [config.num_heads * head, config.num_kv_heads * head, config.num_kv_heads * head]
        bias = weights.rows([f"{name}.bias" for name in names], [(n,) for n in sizes]) if config.qkv_bias else None
        matrix = weights.rows([f"{name}.weight" for name in names], [(n, hidden) for n in sizes])
        self.qkv = ColumnParallel(ops, matrix, bias)
        out_bias = weights.whole("o_proj.bias", (hidden,)) if config.out_bias else None
        self.out = RowParallel(ops, weights.columns("o_proj.weight", (hidden, sizes[0])), out_bias)
        self.q_norm = weights.whole("q_norm.weight", (head,)) if config.qk_norm else None
        self.k_norm = weights.whole("k_norm.weight", (head,)) if config.qk_norm else None

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], plans: Plans, cache: LayerCache) -> Tensor:
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        query, key, value = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query = self.ops.rms_norm(query, self.q_norm, config.norm_eps)
            key = self.ops.rms_norm(key, self.k_norm, config.norm_eps)
        out = plans.attend(self.layer, rotate(query, *rope), rotate(key, *rope), value, cache)
        return self.out(out)


class FeedForward:
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights) -> None:
        self.ops, self.activation = ops, config.activation
        hidden, wide = config.hidden_size, config.intermediate_size
        names = ["gate_proj", "up_proj"]
        bias = weights.rows([f"{name}.bias" for name in names], [(wide,)] * 2) if config.mlp_bias else None
        self.gate_up = ColumnParallel(
            ops, weights.rows([f"{name}.weight" for name in names], [(wide, hidden)] * 2), bias
        )
        down_bias = weights.whole("down_proj.bias", (hidden,)) if config.mlp_bias else None
        self.down = RowParallel(ops, weights.columns("down_proj.weight", (hidden, wide)), down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.ops.activation(gate, self.activation) * up)


class Layer:
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, weights: Weights) -> None:
        self.ops, self.eps = ops, config.norm_eps
        self.attention_norm = weights.whole("input_layernorm.weight", (config.hidden_size,))
        self.attention = Attention(config, layer, ops, weights.under("self_attn."))
        self.feed_forward_norm = weights.whole("post_attention_layernorm.weight", (config.hidden_size,))
        self.feed_forward = FeedForward(config, ops, weights.under("mlp."))

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], plans: Plans, cache: LayerCache) -> Tensor:
        x = x + self.attention(self.ops.rms_norm(x, self.attention_norm, self.eps), rope, plans, cache)
        return x + self.feed_forward(self.ops.rms_norm(x, self.feed_forward_norm, self.eps))


class Llama:
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        body = weights.under("model.")
        self.embedding = VocabularyParallel(
            ops, body.rows(["embed_tokens.weight"], [(config.vocab_size, config.hidden_size)])
        )
        self.layers = [Layer(config, i, ops, body.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = body.whole("norm.weight", (config.hidden_size,))
        self.head = weights.head(self.embedding, "lm_head.weight", config.tie_embeddings)
        frequencies = "rope_freqs.weight"  # only GGUF files carry it
        factors = weights.whole(frequencies, (config.head_dim // 2,)) if weights.has(frequencies) else None
        length = max_position or config.max_position
        self.rope = Rope(config.rope, config.head_dim, length, factors).to(weights.device)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding.embed(ids)

    def forward(self, batch: Batch, caches: SequenceOf[LayerCache], taps: tuple[int, ...] = ()) -> Hidden:
        plans, recorder = Plans(self.ops, self.config, batch), Recorder(taps, self.config.num_layers)
        rope = self.rope.at(batch.positions)
        x = self.embed(batch.ids)
        recorder.at(0, x)
        for index, (layer, cache) in enumerate(zip(self.layers, caches), start=1):
            x = layer(x, rope, plans, cache)
            recorder.at(index, x)
        return recorder.finish(self.ops.rms_norm(x, self.norm, self.config.norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
