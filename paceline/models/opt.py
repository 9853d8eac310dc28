"""OPT: learned positions that start at 2; in the 350m size a narrower embedding and norms after the blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from paceline.kernels import Ops
from paceline.models.base import Hidden, LayerCache, Plans, Recorder
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.layers.linear import ColumnParallel, RowParallel, VocabularyParallel
from paceline.models.weights import Weights

POSITION_OFFSET = 2


class Layer:
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, weights: Weights) -> None:
        self.config, self.layer, self.ops = config, layer, ops
        hidden, wide = config.hidden_size, config.intermediate_size
        attention = weights.under("self_attn.")
        names = ["q_proj", "k_proj", "v_proj"]
        self.qkv = ColumnParallel(
            ops,
            attention.rows([f"{name}.weight" for name in names], [(hidden, hidden)] * 3),
            attention.rows([f"{name}.bias" for name in names], [(hidden,)] * 3),
        )
        out = attention.columns("out_proj.weight", (hidden, hidden))
        self.out = RowParallel(ops, out, attention.whole("out_proj.bias", (hidden,)))
        self.up = ColumnParallel(
            ops, weights.rows(["fc1.weight"], [(wide, hidden)]), weights.rows(["fc1.bias"], [(wide,)])
        )
        self.down = RowParallel(
            ops, weights.columns("fc2.weight", (hidden, wide)), weights.whole("fc2.bias", (hidden,))
        )
        self.norms = [
            (weights.whole(f"{name}.weight", (hidden,)), weights.whole(f"{name}.bias", (hidden,)))
            for name in ("self_attn_layer_norm", "final_layer_norm")
        ]

    def _norm(self, x: Tensor, which: int) -> Tensor:
        return self.ops.layer_norm(x, *self.norms[which], self.config.norm_eps)

    def __call__(self, x: Tensor, plans: Plans, cache: LayerCache) -> Tensor:
        config, first = self.config, self.config.norm_first
        qkv = self.qkv(self._norm(x, 0) if first else x)
        query, key, value = qkv.view(x.shape[0], 3, config.num_heads, config.head_dim).unbind(1)
        x = x + self.out(plans.attend(self.layer, query, key, value, cache))
        x = x if first else self._norm(x, 0)
        wide = self.up(self._norm(x, 1) if first else x)
        x = x + self.down(self.ops.activation(wide, config.activation))
        return x if first else self._norm(x, 1)


class OPT:
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        body = weights.under("model.decoder." if weights.has("model.decoder.embed_tokens.weight") else "decoder.")
        hidden, narrow = config.hidden_size, config.embed_size or config.hidden_size
        self.embedding = VocabularyParallel(ops, body.rows(["embed_tokens.weight"], [(config.vocab_size, narrow)]))
        self.positions = body.whole("embed_positions.weight", (config.max_position + POSITION_OFFSET, hidden))
        self.layers = [Layer(config, i, ops, body.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = None
        if config.norm_first:
            self.norm = (
                body.whole("final_layer_norm.weight", (hidden,)),
                body.whole("final_layer_norm.bias", (hidden,)),
            )
        self.project_in = self.project_out = None
        if narrow != hidden:
            self.project_in = ColumnParallel(ops, body.whole("project_in.weight", (hidden, narrow)))
            self.project_out = ColumnParallel(ops, body.whole("project_out.weight", (narrow, hidden)))
        self.head = weights.head(self.embedding, "lm_head.weight", config.tie_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding.embed(ids)
        return x if self.project_in is None else self.project_in(x)

    def forward(self, batch: Batch, caches: SequenceOf[LayerCache], taps: tuple[int, ...] = ()) -> Hidden:
        plans, recorder = Plans(self.ops, self.config, batch), Recorder(taps, self.config.num_layers)
        x = self.embed(batch.ids) + self.positions[batch.positions + POSITION_OFFSET]
        recorder.at(0, x)
        for index, (layer, cache) in enumerate(zip(self.layers, caches), start=1):
            x = layer(x, plans, cache)
            recorder.at(index, x)
        if self.norm is not None:
            x = self.ops.layer_norm(x, *self.norm, self.config.norm_eps)
        return recorder.finish(x if self.project_out is None else self.project_out(x))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
