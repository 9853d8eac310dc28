"""GLIDE: a small Llama whose layers also look at the target's own keys and values; CAPE: siblings where it is unsure.

The target's pages are read in place. A row sees the target's positions before its own and before the newest token:
positions 0 … n-1 for the newest token x_n and for every draft behind it.

    Glide with a CAPE (Du et al. 2024, https://arxiv.org/abs/2402.02082)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Needs, Taps, Target
from paceline.drafters.chain import ChainReader
from paceline.drafters.checkpoint import Checkpoint, check_packing, own_or_borrowed
from paceline.drafters.tree import PADDING, Proposal
from paceline.drafters.vocabulary import match
from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Head, Heads, Hidden, Inputs
from paceline.models import llama
from paceline.models.base import Model
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig, make_config, read_activation, read_number, read_rope
from paceline.models.layers.rope import tables
from paceline.models.weights import Weights
from paceline.params import check_count, check_flag, check_number

# CAPE: by tenths of the likeliest token's probability, how many tokens are tried at that depth.
TRIED = (8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2)
MORE = (1, 2, 2, 2)  # siblings drawn at a time: 2, 4, 6 and 8 of them with the first


@dataclass(frozen=True)
class Glide:
    """A GLIDE drafter by its folder or hub id.

    cape: try more tokens at depths where it is unsure, up to eight; num_draft_tokens is then the depth.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    The rest overrides what its config.json says or lacks; what tensors say cannot be overridden.
    """

    model: str
    num_draft_tokens: int = 5
    cape: bool = False
    quantization: str = "int8"
    large_hidden_size: int | None = None
    large_num_attention_heads: int | None = None
    num_attention_heads: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        check_count("num_draft_tokens", self.num_draft_tokens, 1)
        check_flag("cape", self.cape)
        check_packing(self.quantization)
        for name in ("large_hidden_size", "large_num_attention_heads", "num_attention_heads"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        for name, most in (("rms_norm_eps", 1.0), ("rope_theta", 1e12)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, most, open_below=True)

    def create(self) -> GlideDrafter:
        return GlideDrafter(self)


class Layer(llama.Layer):
    """Llama's, with queries of its own to a layer of the target's; no norm in front of them."""

    def __init__(self, config: ModelConfig, weights: Weights, wide: int) -> None:
        super().__init__(config, weights)
        cross = weights.under("cross_attn.")
        self.query = cross.matrix(["q_proj.weight"], [(wide, config.hidden_size)])
        self.answer = cross.matrix(["o_proj.weight"], [(config.hidden_size, wide)])


class Network(Model):
    """Its own cache layers come first, then the target's last ones, one for each of its own."""

    def __init__(self, config: ModelConfig, weights: Weights, target: Target) -> None:
        self.config, self.ops = config, weights.ops
        large, lent = target.model.config, target.model
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.large = Heads(large.num_heads, large.num_kv_heads, large.head_dim)
        body, shape = weights.under("model."), (config.vocab_size, config.hidden_size)
        self.embedding = own_or_borrowed(body, "embed_tokens.weight", shape, lent.embedding, lent.ops, picked=True)
        self.head = self.embedding
        if not config.tie_embeddings:
            self.head = own_or_borrowed(weights, "lm_head.weight", shape, lent.head, lent.ops)
        wide = large.num_heads * large.head_dim
        self.layers = [Layer(config, body.under(f"layers.{i}."), wide) for i in range(config.num_layers)]
        self.norm = body.whole("norm.weight", (config.hidden_size,))
        cos, sin = tables(config.rope, config.head_dim, target.max_model_len)
        self.turns = cos.to(target.device), sin.to(target.device)
        self.large_turns = lent.key_turns()

    def describe(self, f: Forward) -> Any:
        eps, queries = self.config.norm_eps, Heads(self.large.num_heads, 0, self.large.head_dim)
        x = f.embed(self.embedding)
        for number, layer in enumerate(self.layers):
            qkv = f.rope(layer.qkv(f, f.rms_norm(x, layer.attention_norm, eps)), self.heads, *self.turns)
            x = f.add(x, layer.out(f, f.attention(qkv, self.heads, number, None)))
            q = f.rope(f.linear(x, layer.query, None), queries, *self.large_turns)
            seen = f.cross_attention(q, self.large, len(self.layers) + number, "below")
            x = f.add(x, f.linear(seen, layer.answer, None))
            wide = layer.gate_up(f, f.rms_norm(x, layer.feed_forward_norm, eps))
            x = f.add(x, layer.down(f, f.gated(wide, self.config.activation)))
        return f.rms_norm(x, self.norm, eps)


class GlideDrafter(ChainReader):
    """A draft model that glances at the target's keys and values."""

    name = "glide"

    def __init__(self, config: Glide) -> None:
        super().__init__(config.num_draft_tokens)
        self.config, self.trees = config, config.cape
        if config.cape:
            self.max_nodes = self.depth * max(TRIED)

    def plan(self, target: Target) -> Needs:
        files = Checkpoint(self.config.model, strip=r"small_model\.", only=r"(?!large_model\.)")
        with files.reading():
            config = read_sizes(files, self.config)
        check(files, config, self.config, target)
        weights = files.weights(target, self.config.quantization)
        self.model: Network = Network(config, weights, target)
        files.finish(weights)
        large, own = target.model.config.num_layers, config.num_layers
        self.taps = Taps(kv=tuple(range(large - own, large)))
        # With one layer a row's keys and values depend on its token alone. With more they depend on what it saw of the
        # target, and a draft saw less than the committed token it became: it is read again.
        self.keeps_drafts = own == 1
        sizes = (config.vocab_size, config.vocab_size)
        self.vocabulary = match(None, None, sizes, False, target.device)
        self._specs = tuple(self.model.layer_specs(target.dtype))
        return Needs(self._specs)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open(target, cache, self._specs, target.max_model_len)
        self._tried = torch.tensor(TRIED).to(target.device)

    def propose(self, context: Context) -> Proposal:
        self._lengths = context.table.lengths
        if not self.config.cape:
            return context.drawn(self.name, most=self.draft_chain(context))
        self._draw_siblings(context, *self.draw_steps(context, self.begin(context)))
        return context.drawn(self.name, chain=False)

    def chain_inputs(self, context: Context) -> dict[str, Tensor]:
        return {"below": context.lengths - 1}

    def run(self, batch: Batch, rows: Tensor | None) -> Hidden:
        layout = batch.layout
        below = torch.minimum(layout.positions, self._lengths[layout.slots] - 1)
        head = None if rows is None else Head(self.model.head, rows)
        return self.model.ops.run(self.model, Inputs(batch.ids, layout, {"below": below}), self._caches, (), head)

    def _draw_siblings(self, context: Context, tokens: Tensor, logits: Tensor) -> None:
        """The next likely tokens beside each of the chain's, none of them gone on from: a comb.

        The chain comes first, then the second tokens of all depths, and so on: a small budget cuts the unlikely ones.
        """
        confidence = torch.softmax(logits.float(), dim=-1).amax(-1)  # [B, D]
        totals = self._tried[(10 * confidence).long().clamp(0, 10)]
        parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
        left, count = logits.scatter(2, tokens[:, :, None], float("-inf")), 1
        for more in MORE:
            count += more
            asked = torch.where(totals >= count, parents, PADDING)
            drawn = context.draw(left, asked, more, likeliest=True)  # what is left was not all drawn from alike
            left = left.scatter(2, drawn.tokens, float("-inf"))


def read_sizes(files: Checkpoint, given: Glide) -> ModelConfig:
    """What the tensors say; the rest from the user, else from its config."""
    said = files.config
    first = "model.layers.0."
    vocabulary, hidden = files.matrix("model.embed_tokens.weight")
    heads = given.num_attention_heads or said.get("num_attention_heads")
    if heads is None:
        raise CheckpointError(f"{files.label} says nowhere how many heads it has; give num_attention_heads")
    queries = files.matrix(f"{first}self_attn.q_proj.weight")[0]
    if not isinstance(heads, int) or heads < 1 or queries % heads:
        raise CheckpointError(f"{files.label}: num_attention_heads={heads!r} is no divisor of its {queries} queries")
    rope = read_rope(SimpleNamespace(**{"max_position_embeddings": 2048, **said}))
    tied = bool(said.get("tie_word_embeddings")) and not files.has("lm_head.weight")
    if not tied:
        files.matrix("lm_head.weight")  # the target's is none of its own, even where it would fit
    fields = {
        "architecture": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_layers": len(files.names(r"model\.layers\.\d+\.cross_attn\.q_proj\.weight")),
        "num_heads": heads,
        "num_kv_heads": files.matrix(f"{first}self_attn.k_proj.weight")[0] // (queries // heads),
        "head_dim": queries // heads,
        "intermediate_size": files.matrix(f"{first}mlp.gate_proj.weight")[0],
        "max_position": 2048,
        "norm_eps": given.rms_norm_eps or read_number(said, "rms_norm_eps", 1e-6),
        "activation": read_activation(said.get("hidden_act") or "silu"),
        "tie_embeddings": tied,
        "rope": rope if given.rope_theta is None else replace(rope, theta=float(given.rope_theta)),
        "qkv_bias": files.has(f"{first}self_attn.q_proj.bias"),
        "out_bias": files.has(f"{first}self_attn.o_proj.bias"),
        "mlp_bias": files.has(f"{first}mlp.gate_proj.bias"),
    }
    return make_config(fields, files.label)


def check(files: Checkpoint, config: ModelConfig, given: Glide, target: Target) -> None:
    """It was made for such a target: its queries have the shape of the target's."""
    large = target.model.config
    if large.latent is not None:
        raise CheckpointError(
            f"{files.label} is a GLIDE drafter, which looks at its target's keys and values; a {large.architecture} "
            "model makes them of one row for all heads"
        )
    if large.local_rope is not None or any(0 < (width or 0) < target.max_model_len for width in large.windows):
        raise CheckpointError(
            f"{files.label} is a GLIDE drafter, whose targets see all positions; this one has windows"
        )
    target.model.key_turns()  # refused there, if anywhere, before sizes are compared
    wide = files.matrix("model.layers.0.cross_attn.q_proj.weight")[0]
    if given.large_hidden_size not in (None, wide):
        raise CheckpointError(f"{files.label}: its tensors say large_hidden_size={wide}, not {given.large_hidden_size}")
    files.check("large_hidden_size", wide, large.num_heads * large.head_dim)
    heads = given.large_num_attention_heads or files.config.get("large_num_attention_heads") or large.num_heads
    files.check("large_num_attention_heads", heads, large.num_heads)
    files.check("a vocabulary of", config.vocab_size, large.vocab_size)
    if config.num_layers > large.num_layers:
        raise CheckpointError(
            f"{files.label} has {config.num_layers} layers and looks at as many of the target, which has "
            f"{large.num_layers}"
        )


def training_bound(positions: Tensor, block_size: int) -> Tensor:
    """Below which target position a row sees in training: blocks before its own; the first block's rows see causally.

    So a row learns to do with what was there before the last verification.
    """
    return torch.where(positions < block_size, positions + 1, positions // block_size * block_size)
