"""GPT-2: learned positions, one fused attention matrix, weights stored input-first."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from torch import Tensor

from paceline.kernels import Ops
from paceline.models.base import Hidden, LayerCache, Plans, Recorder
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.layers.linear import ColumnParallel, RowParallel, VocabularyParallel
from paceline.models.weights import Weights


class Layer:
    def __init__(self, config: ModelConfig, layer: int, ops: Ops, weights: Weights) -> None:
        self.config, self.layer, self.ops = config, layer, ops

        hidden, wide = config.hidden_size, config.intermediate_size

        def linear(name: str, out: int, width: int, kind: type[ColumnParallel]) -> ColumnParallel:
            return kind(ops, weights.transposed(f"{name}.weight", (out, width)), weights.whole(f"{name}.bias", (out,)))

        self.qkv = linear("attn.c_attn", 3 * hidden, hidden, ColumnParallel)
        self.out = linear("attn.c_proj", hidden, hidden, RowParallel)
        self.up = linear("mlp.c_fc", wide, hidden, ColumnParallel)
        self.down = linear("mlp.c_proj", hidden, wide, RowParallel)
        self.norms = [
            (weights.whole(f"ln_{i}.weight", (hidden,)), weights.whole(f"ln_{i}.bias", (hidden,))) for i in (1, 2)
        ]

    def __call__(self, x: Tensor, plans: Plans, cache: LayerCache) -> Tensor:
        config, ops = self.config, self.ops
        qkv = self.qkv(ops.layer_norm(x, *self.norms[0], config.norm_eps))
        query, key, value = qkv.view(x.shape[0], 3, config.num_heads, config.head_dim).unbind(1)
        x = x + self.out(plans.attend(self.layer, query, key, value, cache))
        wide = self.up(ops.layer_norm(x, *self.norms[1], config.norm_eps))
        return x + self.down(ops.activation(wide, config.activation))


class GPT2:
    def __init__(self, config: ModelConfig, ops: Ops, weights: Weights, max_position: int | None = None) -> None:
        self.config, self.ops = config, ops
        body = weights.under("transformer." if weights.has("transformer.wte.weight") else "")
        self.embedding = VocabularyParallel(ops, body.rows(["wte.weight"], [(config.vocab_size, config.hidden_size)]))
        self.positions = body.whole("wpe.weight", (config.max_position, config.hidden_size))
        self.layers = [Layer(config, i, ops, body.under(f"h.{i}.")) for i in range(config.num_layers)]
        self.norm = (body.whole("ln_f.weight", (config.hidden_size,)), body.whole("ln_f.bias", (config.hidden_size,)))
        self.head = weights.head(self.embedding, "lm_head.weight", config.tie_embeddings)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding.embed(ids)

    def forward(self, batch: Batch, caches: SequenceOf[LayerCache], taps: tuple[int, ...] = ()) -> Hidden:
        plans, recorder = Plans(self.ops, self.config, batch), Recorder(taps, self.config.num_layers)
        x = self.embed(batch.ids) + self.positions[batch.positions]
        recorder.at(0, x)
        for index, (layer, cache) in enumerate(zip(self.layers, caches), start=1):
            x = layer(x, plans, cache)
            recorder.at(index, x)
        return recorder.finish(self.ops.layer_norm(x, *self.norm, self.config.norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)
