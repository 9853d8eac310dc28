"""EAGLE's network: a layer or more over a token's embedding and the state in front of it, and a vocabulary head.

A row is the pair (token x_{i+1}, state f_i) and predicts x_{i+2}. What a row gives beside its logits, its own state, is
fed with the next token in place of the target's. An EAGLE-3 head joins several of the target's states first (`fc`), its
own state never; so it is described twice over the same weights: as it reads pairs, and as it feeds itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Target
from paceline.drafters.checkpoint import Checkpoint, own_or_borrowed
from paceline.drafters.eagle_form import Form, read_vocabulary
from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Head, Hidden, Inputs, LayerCache, LayerSpec
from paceline.models.batch import Batch
from paceline.models.layers.linear import Linear
from paceline.models.layers.rope import tables
from paceline.models.weights import Weights

OWN = 0  # the boundary that is tapped: its own state, as it is fed next
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MAPS = r"d2t|t2d|token_map|mask_hidden"  # read apart


class Block:
    """One layer's weights. `width`: of what its attention reads."""

    def __init__(self, form: Form, weights: Weights, width: int, norm: str | None) -> None:
        hidden, heads = form.hidden, form.heads
        self.norm = None if norm is None else weights.whole(norm, (hidden,))
        self.feed_forward_norm = weights.whole("post_attention_layernorm.weight", (hidden,))
        attention = weights.under("self_attn.")
        sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        self.qkv = _linear(attention, ["q_proj", "k_proj", "v_proj"], sizes, width)
        self.out = _linear(attention, ["o_proj"], [hidden], sizes[0])
        normed = attention.has("q_norm.weight")
        self.q_norm = attention.whole("q_norm.weight", (heads.head_dim,)) if normed else None
        self.k_norm = attention.whole("k_norm.weight", (heads.head_dim,)) if normed else None
        feed_forward = weights.under("mlp.")
        self.gate_up = _linear(feed_forward, ["gate_proj", "up_proj"], [form.wide] * 2, hidden)
        self.down = _linear(feed_forward, ["down_proj"], [hidden], form.wide)


def _linear(weights: Weights, names: list[str], sizes: list[int], columns: int) -> Linear:
    """Stacked matrices; whether they have a bias the file shows."""
    biased = weights.has(f"{names[0]}.bias")
    bias = weights.vectors([f"{name}.bias" for name in names], [(size,) for size in sizes]) if biased else None
    return Linear(weights.matrix([f"{name}.weight" for name in names], [(size, columns) for size in sizes]), bias)


@dataclass(eq=False)
class Reading:
    """The network as it reads pairs (joined: with the target's states), or feeds itself."""

    network: Network
    joined: bool

    def describe(self, f: Forward) -> Any:
        return self.network.describe(f, self.joined)


class Network:
    def __init__(self, form: Form, checkpoint: Checkpoint, target: Target, quantization: str) -> None:
        weights = checkpoint.weights(target, quantization)
        self.form, self.ops, self.dtype = form, weights.ops, weights.dtype
        self.width = sum(target.model.tap_width(tap) for tap in form.states)
        self._load_vocabulary(checkpoint, weights, target)
        self._load_inputs(checkpoint, weights)
        self._load_blocks(weights)
        self.last_norm = self._vector(weights, form.last_norm)
        cos, sin = tables(form.rope, form.heads.head_dim, target.max_model_len + 1)
        self.cos, self.sin = cos.to(target.device), sin.to(target.device)
        self.mask: Tensor | None = None  # [W] P-EAGLE's state of places that are not known yet
        if form.mask is not None:
            self.mask = checkpoint.tensor("mask_hidden").flatten().to(target.device, weights.dtype)
            checkpoint.check("states of", len(self.mask), self.width)
        # The first layer of EAGLE-1 does without a norm; some files hold one all the same, and a last one.
        unread = rf"{MAPS}|{form.first}input_layernorm\.weight|norm\.weight" if not form.third else MAPS
        checkpoint.finish(weights, unread)
        self.pairs, self.steps = Reading(self, True), Reading(self, not form.third)

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        heads = self.form.heads
        return (LayerSpec.kv(heads.num_kv_heads, heads.head_dim, self.dtype),) * self.form.num_layers

    def _load_vocabulary(self, checkpoint: Checkpoint, weights: Weights, target: Target) -> None:
        model, hidden, size = target.model, self.form.hidden, target.model.config.vocab_size
        rows = checkpoint.matrix(EMBEDDING)[0] if checkpoint.has(EMBEDDING) else size
        checkpoint.check("a vocabulary of", rows, size)
        self.embedding = own_or_borrowed(weights, EMBEDDING, (size, hidden), model.embedding, model.ops, picked=True)
        rows = checkpoint.matrix(HEAD)[0] if checkpoint.has(HEAD) else size
        self.head = own_or_borrowed(weights, HEAD, (rows, hidden), model.head, model.ops)
        ids = read_vocabulary(checkpoint, rows, size)
        self.ids = None if ids is None else ids.to(target.device)  # [Vd] of the target

    def _load_inputs(self, checkpoint: Checkpoint, weights: Weights) -> None:
        form = self.form
        wanted = self.width if form.third else form.hidden + self.width
        self.fusion: Linear | None = None
        if form.fusion is not None:
            read = checkpoint.matrix(f"{form.fusion}weight")[1] - wanted + self.width
            checkpoint.check("states of", read, self.width)
            self.fusion = _linear(weights, [form.fusion.removesuffix(".")], [form.hidden], wanted)
        elif not form.third:
            raise CheckpointError(f"{checkpoint.label} lacks the tensor fc.weight, which this drafter needs")
        else:
            checkpoint.check("a hidden size of", form.hidden, self.width)
        self.embedding_norm = self._vector(weights, form.embedding_norm)
        self.state_norm = self._vector(weights, form.state_norm, self.width)
        self.joint_norm = self._vector(weights, form.joint_norm, self.width)
        each = self.width // len(form.states)
        self.state_norms = [weights.whole(name, (each,)) for name in form.state_norms]

    def _load_blocks(self, weights: Weights) -> None:
        form, first = self.form, weights.under(self.form.first)
        norm = "input_layernorm.weight" if form.third or form.first_norm else None
        self.blocks = [Block(form, first, (1 + form.third) * form.hidden, norm)]
        self.hidden_norm = first.whole("hidden_norm.weight", (form.hidden,)) if form.third else None
        for number in range(1, form.num_layers):
            layer = weights.under(f"layers.{number}.")
            norm = next((name for name in ("input_layernorm.weight", "hidden_norm.weight") if layer.has(name)), None)
            self.blocks.append(Block(form, layer, form.hidden, norm or "input_layernorm.weight"))

    def _vector(self, weights: Weights, name: str | None, width: int | None = None) -> Tensor | None:
        return None if name is None else weights.whole(name, (width or self.form.hidden,))

    def describe(self, f: Forward, joined: bool) -> Any:
        x = self._first_of_third(f, joined) if self.form.third else self._first_of_first(f)
        for number, block in enumerate(self.blocks[1:], 1):
            x = self._layer(f, block, self._norm(f, x, block.norm), x, number)
        last = self._norm(f, x, self.last_norm)
        f.tap(OWN, last if self.form.norm_output else x)
        return last

    def _first_of_first(self, f: Forward) -> Any:
        """EAGLE-1: embedding and state through one linear, then a layer without a norm in front."""
        assert self.fusion is not None
        embedded = self._norm(f, f.embed(self.embedding), self.embedding_norm)
        state = self._norm(f, f.input("states", self.width), self.state_norm)
        x = self.fusion(f, f.concat(embedded, state))
        return self._layer(f, self.blocks[0], self._norm(f, x, self.blocks[0].norm), x, 0)

    def _first_of_third(self, f: Forward, joined: bool) -> Any:
        """EAGLE-3: attention reads embedding and state side by side, each normed; the state alone goes on."""
        state = self._join(f) if joined else f.input("states", self.form.hidden)
        normed = self._norm(f, state, self.hidden_norm)
        embedded = self._norm(f, f.embed(self.embedding), self.blocks[0].norm)
        rest = normed if self.form.norm_before_residual else state
        return self._layer(f, self.blocks[0], f.concat(embedded, normed), rest, 0)

    def _join(self, f: Forward) -> Any:
        states = self._norm(f, f.input("states", self.width), self.joint_norm)
        if self.state_norms:
            parts = f.split(states, [len(norm) for norm in self.state_norms])
            states, *others = [self._norm(f, part, norm) for part, norm in zip(parts, self.state_norms)]
            for other in others:
                states = f.concat(states, other)
        return states if self.fusion is None else self.fusion(f, states)

    def _layer(self, f: Forward, block: Block, read: Any, rest: Any, number: int) -> Any:
        """`read` is what attention reads, `rest` what its result is added to."""
        heads, eps = self.form.heads, self.form.eps
        qkv = block.qkv(f, read)
        if block.q_norm is not None and block.k_norm is not None:
            qkv = f.head_norm(qkv, heads, block.q_norm, block.k_norm, eps)
        qkv = f.rope(qkv, heads, self.cos, self.sin)
        x = f.add(rest, block.out(f, f.attention(qkv, heads, number, None)))
        wide = block.gate_up(f, self._norm(f, x, block.feed_forward_norm))
        return f.add(x, block.down(f, f.gated(wide, self.form.activation)))

    def _norm(self, f: Forward, x: Any, weight: Tensor | None) -> Any:
        return x if weight is None else f.rms_norm(x, weight, self.form.eps)

    def run(self, reading: Reading, batch: Batch, states: Tensor, caches: list[LayerCache], every: bool) -> Hidden:
        """`every`: with the logits of every row. `tapped` is each row's own state, `final` what its head reads."""
        head = Head(self.head, torch.arange(len(states), device=states.device)) if every else None
        inputs = Inputs(batch.ids, batch.layout, {"states": states.to(self.dtype)})
        return self.ops.run(reading, inputs, caches, (OWN,), head)

    def logits(self, finals: Tensor) -> Tensor:
        """[B, h] what the head reads → [B, Vd]."""
        return self.ops.logits(finals, self.head)
