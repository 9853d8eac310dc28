"""DFlash: a block of mask tokens that see one another, over keys and values made of the target's states.

    context    c_i = norm(fc(the target's states at i)) for every computed position i; each layer keeps its own keys and
               values of c_i, and no layer changes c_i itself
    block      x_n  M  M  M          at positions n, n+1, …; every row sees all context and all rows of the block
    drafts          d_1 d_2 d_3      (with sample_from_anchor the row of x_n drafts d_1, the first mask d_2 …)

Rows of a block lie where the next tokens will: the context of committed ones is written over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters import speculators
from paceline.drafters.base import Context, Needs, Observation, Taps, Target
from paceline.drafters.block import draw_block, masks
from paceline.drafters.cached import StateReader
from paceline.drafters.checkpoint import Checkpoint, chain_length, check_options, own_or_borrowed
from paceline.drafters.tree import Proposal
from paceline.drafters.vocabulary import VocabularyMap
from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Head, Heads, Inputs, LayerSpec
from paceline.models import llama
from paceline.models.batch import Batch, Work, rows_at
from paceline.models.config import ModelConfig, make_config, read_activation, read_number, read_rope
from paceline.models.layers.linear import Linear
from paceline.models.layers.rope import tables
from paceline.models.weights import Weights


@dataclass(frozen=True)
class DFlash:
    """A DFlash drafter by its folder or hub id.

    num_draft_tokens: None drafts what its files say, else the block it was trained with; fewer make a shorter block.
    quantization: int8 packs the weights at load (native and Triton kernels), int4 too (native), none keeps floats.
    """

    model: str
    num_draft_tokens: int | None = None
    quantization: str = "int8"

    def __post_init__(self) -> None:
        check_options(self.num_draft_tokens, self.quantization)

    def create(self) -> DFlashDrafter:
        return DFlashDrafter(self)


@dataclass(frozen=True)
class Shape:
    """What a DFlash config says beside its layers' sizes."""

    block_size: int
    mask: int
    taps: tuple[int, ...]  # boundaries of the target
    causal: bool
    anchor: bool  # the newest token's row drafts too

    @property
    def most_drafts(self) -> int:
        return self.block_size - (not self.anchor)


class Layer(llama.Layer):
    """Qwen3's, its queries apart from keys and values, which are also made of context."""

    def _load_attention(self, config: ModelConfig, weights: Weights) -> None:
        hidden, head = config.hidden_size, config.head_dim
        queries, shared = config.num_heads * head, config.num_kv_heads * head
        self.query = weights.matrix(["q_proj.weight"], [(queries, hidden)])
        self.keys_values = weights.matrix(["k_proj.weight", "v_proj.weight"], [(shared, hidden)] * 2)
        self.out = Linear(weights.matrix(["o_proj.weight"], [(hidden, queries)]))
        self.norms = weights.whole("q_norm.weight", (head,)), weights.whole("k_norm.weight", (head,))


class Network:
    """The weights, and the forward of a block."""

    def __init__(self, config: ModelConfig, weights: Weights, target: Target, width: int) -> None:
        self.config, self.ops, hidden = config, weights.ops, config.hidden_size
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.fusion = weights.matrix(["fc.weight"], [(hidden, width)])
        self.context_norm = weights.whole("hidden_norm.weight", (hidden,))
        self.layers = [Layer(config, weights.under(f"layers.{i}.")) for i in range(config.num_layers)]
        self.norm = weights.whole("norm.weight", (hidden,))
        large, size = target.model, (target.model.embedding.shape[0], hidden)
        self.embedding = own_or_borrowed(weights, "embed_tokens.weight", size, large.embedding, large.ops, picked=True)
        size = (config.vocab_size, hidden)
        self.head = own_or_borrowed(weights, "lm_head.weight", size, large.head, large.ops)
        cos, sin = tables(config.rope, config.head_dim, target.max_model_len)
        self.turns = cos.to(target.device), sin.to(target.device)
        self.context = ContextNetwork(self, width)

    def describe(self, f: Forward) -> Any:
        eps = self.config.norm_eps
        x = f.embed(self.embedding)
        for number, layer in enumerate(self.layers):
            normed = f.rms_norm(x, layer.attention_norm, eps)
            qkv = f.concat(f.linear(normed, layer.query, None), f.linear(normed, layer.keys_values, None))
            qkv = f.head_norm(qkv, self.heads, *layer.norms, eps)
            qkv = f.rope(qkv, self.heads, *self.turns)
            x = f.add(x, layer.out(f, f.attention(qkv, self.heads, number, None)))
            wide = layer.gate_up(f, f.rms_norm(x, layer.feed_forward_norm, eps))
            x = f.add(x, layer.down(f, f.gated(wide, self.config.activation)))
        return f.rms_norm(x, self.norm, eps)


class ContextNetwork:
    """The keys and values of context in every layer."""

    def __init__(self, network: Network, width: int) -> None:
        self.fusion, self.norm, self.layers = network.fusion, network.context_norm, network.layers
        self.turns, self.width, self.eps = network.turns, width, network.config.norm_eps
        self.heads = Heads(network.heads.num_kv_heads, network.heads.num_kv_heads, network.heads.head_dim)

    def describe(self, f: Forward) -> Any:
        context = f.rms_norm(f.linear(f.input("states", self.width), self.fusion, None), self.norm, self.eps)
        half = self.heads.num_kv_heads * self.heads.head_dim
        for number, layer in enumerate(self.layers):
            both = f.linear(context, layer.keys_values, None)
            # Storing asks for queries: the keys again, looking at themselves alone, and nobody at what they saw.
            row = f.concat(f.split(both, [half, half])[0], both)
            row = f.head_norm(row, self.heads, layer.norms[1], layer.norms[1], self.eps)
            f.attention(f.rope(row, self.heads, *self.turns), self.heads, number, 1)
        return context


class DFlashDrafter(StateReader):
    """Keeps the context of every computed position, and drafts a block in one pass."""

    name = "dflash"
    begins = 0  # a state lies at its own place
    max_nodes = 1  # until the checkpoint was read

    def __init__(self, config: DFlash) -> None:
        self.config = config

    def plan(self, target: Target) -> Needs:
        files = Checkpoint(self.config.model, strip=r"model\.")
        with files.reading():
            self._shape = shape = read_shape(files, target)
            width = sum(target.model.tap_width(tap) for tap in shape.taps)
            config = read_sizes(files, target, width)
            said = speculators.draft_length(files.config, speculators.CHAINS, files.label)
        wanted = self.config.num_draft_tokens or (None if said is None else min(said, shape.most_drafts))
        self.max_nodes = chain_length(wanted, shape.most_drafts, files.label)
        self.taps = Taps(hidden=shape.taps)
        weights = files.weights(target, self.config.quantization)
        self.network = Network(config, weights, target, width)
        if not 0 <= shape.mask < self.network.embedding.shape[0]:
            rows = self.network.embedding.shape[0]
            raise CheckpointError(f"{files.label} gives mask_token_id={shape.mask}; its embedding has {rows} rows")
        self.vocabulary = read_vocabulary(files, config, target)
        files.finish(weights, "d2t|t2d")
        spec = LayerSpec.kv(config.num_kv_heads, config.head_dim, target.dtype)
        self._specs = (spec,) * config.num_layers
        return Needs(self._specs, width)

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, self._specs, target.max_model_len)

    def observe(self, seen: Observation) -> None:
        assert seen.states is not None
        batch = rows_at(seen.batch, seen.slots, seen.positions, seen.batch.ids, seen.table)
        context = self.network.context
        self.network.ops.run(context, Inputs(None, batch.layout, {"states": seen.states}), self._caches, (), None)
        self._ready[seen.slots] = True

    def propose(self, context: Context) -> Proposal:
        steps, anchor = min(context.max_nodes, self.max_nodes), int(self._shape.anchor)
        most = self.most_nodes(context).clamp(max=steps)
        batch = self._block(context, steps - anchor, (most - anchor).clamp(min=0))
        head = Head(self.network.head, batch.places.sampled)
        found = self.network.ops.run(self.network, Inputs(batch.ids, batch.layout), self._caches, (), head).logits
        assert found is not None
        logits = self.vocabulary.to_target(found)[batch.places.index][:, 1 - anchor :]  # [B, k, V]
        return draw_block(context, logits, most, self.name)

    def _block(self, context: Context, count: int, sizes: Tensor) -> Batch:
        """The newest token and mask tokens behind it, as rows that see one another."""
        table, nodes, slots = context.table, masks(context, self._shape.mask, count, sizes), context.slots
        if table.apart:
            shape = ((1, count),) * len(context.slot_list)
            batch = self._pack_ahead(context, shape, context.lengths - 1, context.lengths + count, nodes)
        else:
            work = [
                Work(slot, table.length(slot) - 1, 1, size) for slot, size in zip(context.slot_list, sizes.tolist())
            ]
            batch = self._pack(work, table, nodes)
        if not self._shape.causal:
            owner, padding = batch.places.owner, batch.layout.slots == table.null
            batch.layout.until = torch.where(padding, 1, (table.lengths[slots] + sizes)[owner])
        return batch


def read_shape(files: Checkpoint, target: Target) -> Shape:
    """Of the native config, or of one in the speculators format, whose layer ids are boundaries already."""
    said = files.config
    inner: Mapping[str, Any] = said.get("dflash_config") or {}
    both = {**said, **inner}
    ids, shift = (inner.get("target_layer_ids"), 1) if inner else (said.get("aux_hidden_state_layer_ids"), 0)
    for name, value in (("block_size", both.get("block_size")), ("mask_token_id", both.get("mask_token_id"))):
        if not isinstance(value, int):
            raise CheckpointError(f"{files.label} gives {name}={value!r}; a DFlash drafter needs a number")
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) for one in ids):
        raise CheckpointError(f"{files.label} does not say which layers of the target it reads (target_layer_ids)")
    kinds = both.get("layer_types") or speculators.layer_fields(said).get("layer_types") or ()
    if both.get("use_swa") or both.get("sliding_window_non_causal") or "sliding_attention" in kinds:
        raise CheckpointError(f"{files.label} is a DFlash drafter with sliding windows, which are not supported")
    taps, layers = tuple(one + shift for one in ids), target.model.config.num_layers
    if not 0 <= min(taps) <= max(taps) <= layers:
        raise CheckpointError(f"{files.label} reads layers {ids} of its target, but this one has {layers}")
    causal, anchor = bool(both.get("causal")), bool(both.get("sample_from_anchor"))
    found = Shape(both["block_size"], both["mask_token_id"], taps, causal, anchor)
    if found.most_drafts < 1:
        raise CheckpointError(f"{files.label} gives block_size={found.block_size}, in which there is no draft")
    return found


def read_sizes(files: Checkpoint, target: Target, width: int) -> ModelConfig:
    """Of its layers: what tensors say, the rest from the config."""
    said = speculators.layer_fields(files.config) or files.config
    hidden, states = files.matrix("fc.weight")
    files.check("states of together", states, width)
    if not (files.has("embed_tokens.weight") and files.has("lm_head.weight")):  # else nothing of the target's is used
        files.check("hidden size", hidden, target.model.config.hidden_size)
    first = "layers.0."
    head = files.vector(f"{first}self_attn.q_norm.weight")
    vocabulary = files.matrix("lm_head.weight")[0] if files.has("lm_head.weight") else target.model.config.vocab_size
    fields = {
        "architecture": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_layers": len(files.names(r"layers\.\d+\.self_attn\.q_proj\.weight")),
        "num_heads": files.matrix(f"{first}self_attn.q_proj.weight")[0] // head,
        "num_kv_heads": files.matrix(f"{first}self_attn.k_proj.weight")[0] // head,
        "head_dim": head,
        "intermediate_size": files.matrix(f"{first}mlp.gate_proj.weight")[0],
        "max_position": 2048,
        "norm_eps": read_number(said, "rms_norm_eps", 1e-6),
        "activation": read_activation(said.get("hidden_act") or "silu"),
        "tie_embeddings": False,
        "rope": read_rope(SimpleNamespace(**{"max_position_embeddings": 2048, **said})),
        "qk_norm": True,
    }
    return make_config(fields, files.label)


def read_vocabulary(files: Checkpoint, config: ModelConfig, target: Target) -> VocabularyMap:
    """Its own ids beside the target's: d2t says how much is added to each; without it they are the same."""
    sizes = (target.model.config.vocab_size, config.vocab_size)
    own = torch.arange(config.vocab_size)
    if not files.has("d2t"):
        files.check("a vocabulary of", config.vocab_size, sizes[0])
        return VocabularyMap((own, own), sizes, 0, target.device)
    theirs = files.token_ids("d2t", config.vocab_size, sizes[0])
    return VocabularyMap((own, theirs), sizes, 0, target.device)
