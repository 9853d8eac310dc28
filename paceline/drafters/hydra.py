"""Hydra heads: Medusa's, where each also reads the tokens drafted before its own.

Head i reads the target's final state in front of the newest token, then the target's embeddings of the newest token and
of the i drafts behind it. In the kind `prefix-mlp` a layer of attention, with a cache layer, reads the states first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.slots import Slots
from paceline.drafters import table
from paceline.drafters.base import FINAL, Context, Needs, Taps, Target
from paceline.drafters.cached import StateReader
from paceline.drafters.checkpoint import Checkpoint
from paceline.drafters.heads import (
    StaticHeads,
    draw_at_once,
    draw_next,
    newest_tokens,
    run_head,
)
from paceline.drafters.static_tree import Seats, StaticTree
from paceline.drafters.tree import Proposal
from paceline.errors import CheckpointError
from paceline.kernels.chain import Link
from paceline.kernels.ops import Forward, Heads, Inputs, LayerSpec, Weight
from paceline.models.batch import Batch
from paceline.models.config import ModelConfig
from paceline.models.layers.linear import Linear
from paceline.models.layers.rope import tables
from paceline.models.llama import Layer
from paceline.models.weights import Weights

GROWN = 0  # the boundary that gives a row with its newest token
KINDS = ("mlp", "prefix-mlp")
PREFIX = "prefix_embeding_layer."  # as it is published
UNUSED = r"input_embed_fn\.weight|prefix_embeding_layer\.embed_tokens\.weight"  # the target's, copied


@dataclass(frozen=True)
class Hydra(StaticHeads):
    """A checkpoint of Hydra heads as the drafter; the options are those of `StaticHeads`."""

    def create(self) -> HydraDrafter:
        return HydraDrafter(self)


@dataclass(eq=False)
class HydraHead:
    """Blocks on a row of state and embeddings; the first makes it as wide as the state. `head` gives the logits."""

    residual: Linear | None  # of the first block; None: the state alone is read
    blocks: list[Linear]
    head: Weight
    bias: Tensor | None

    def describe(self, f: Forward) -> Any:
        return self.read(f, f.input("states", self.blocks[0].weight.shape[1]))

    def read(self, f: Forward, x: Any) -> Any:
        for number, block in enumerate(self.blocks):
            beside = self.residual(f, x) if number == 0 and self.residual is not None else x
            x = f.add(beside, f.activation(block(f, x), "silu"))
        return x


@dataclass(eq=False)
class HydraStep:
    """A head fed its row's newest token: the row grows by its embedding, and behind it there is room for those to come.
    So every step reads and gives a row of one width."""

    own: HydraHead
    embedding: Weight  # the target's
    filled: int
    width: int

    def describe(self, f: Forward) -> Any:
        each = self.embedding.shape[1]
        parts = [self.filled, each, self.width - self.filled - each]
        before, _, *room = f.split(f.input("states", self.width), parts if parts[-1] else parts[:-1])
        row = f.concat(before, f.embed(self.embedding))
        f.tap(GROWN, f.concat(row, room[0]) if room else row)
        return self.own.read(f, row)


class Prefix:
    """One Llama layer and a norm over the target's states, in place of tokens."""

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        self.config = config
        self.heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.layer = Layer(config, weights.under("layers.0."))
        self.norm = weights.whole("norm.weight", (config.hidden_size,))
        cos, sin = tables(config.rope, config.head_dim, max_position)
        self.cos, self.sin = cos.to(weights.device), sin.to(weights.device)

    def describe(self, f: Forward) -> Any:
        layer, eps = self.layer, self.config.norm_eps
        x = f.input("states", self.config.hidden_size)
        qkv = f.rope(layer.qkv(f, f.rms_norm(x, layer.attention_norm, eps)), self.heads, self.cos, self.sin)
        x = f.add(x, layer.out(f, f.attention(qkv, self.heads, 0, None)))
        wide = layer.gate_up(f, f.rms_norm(x, layer.feed_forward_norm, eps))
        return f.rms_norm(f.add(x, layer.down(f, f.gated(wide, self.config.activation))), self.norm, eps)


def read_heads(checkpoint: Checkpoint, weights: Weights, target: Target) -> list[HydraHead]:
    """Heads and blocks are counted; places that dropout takes in a published list hold no tensors."""
    hidden, vocabulary = target.model.tap_width(FINAL), target.model.head.shape[0]
    heads = []
    for number in range(_count(checkpoint)):
        at = f"hydra_mlp.{number}."
        found = checkpoint.names(rf"hydra_mlp\.{number}\.\d+\.linear\.weight")
        blocks = sorted(int(name.split(".")[2]) for name in found) or [0]
        grounded = weights.has(f"{at}{blocks[0]}.res_connection.weight")
        wide = hidden * (number + 2) if grounded else hidden

        def linear(name: str, columns: int) -> Linear:
            matrix = weights.matrix([f"{name}.weight"], [(hidden, columns)])
            return Linear(matrix, weights.whole(f"{name}.bias", (hidden,)))

        out = f"hydra_lm_head.{number}"
        out = out if weights.has(f"{out}.weight") else f"{out}.1"
        checkpoint.check("vocabulary size", checkpoint.matrix(f"{out}.weight")[0], vocabulary)
        heads.append(
            HydraHead(
                linear(f"{at}{blocks[0]}.res_connection", wide) if grounded else None,
                [linear(f"{at}{block}.linear", hidden if place else wide) for place, block in enumerate(blocks)],
                weights.matrix([f"{out}.weight"], [(vocabulary, hidden)]),
                weights.whole(f"{out}.bias", (vocabulary,)) if weights.has(f"{out}.bias") else None,
            )
        )
    return heads


def _count(checkpoint: Checkpoint) -> int:
    found = checkpoint.names(r"hydra_mlp\.\d+\.\d+\.linear\.weight")
    return max((1 + int(name.split(".")[1]) for name in found), default=0)


@dataclass(frozen=True)
class Level:
    """P nodes that have children, of one depth: where they stand among those drawn there, and their parents' rows."""

    picked: Tensor  # [P]
    above: Tensor  # [P]
    count: int  # children to draw of each


def levels_of(tree: StaticTree, device: torch.device) -> tuple[list[Level], list[int]]:
    """What is drawn at each depth, and where each node of the tree then stands among all that was drawn."""
    rows: list[tuple[int, ...]] = [()]  # what is fed to a depth's head
    levels, places, before, picked, above = list[Level](), dict[tuple[int, ...], int](), 0, [0], [0]
    for depth in range(1, tree.depth + 1):
        count = tree.width(depth)
        levels.append(Level(torch.tensor(picked, device=device), torch.tensor(above, device=device), count))
        inside = {node: rows.index(node[:-1]) * count + node[-1] for node in tree.nodes if len(node) == depth}
        places |= {node: before + place for node, place in inside.items()}
        before += len(rows) * count
        rows = [node for node in inside if any(other[:-1] == node for other in tree.nodes)]
        picked = [inside[node] for node in rows]
        above = [place // count for place in picked]
    return levels, [places[node] for node in tree.nodes]


class HydraDrafter(StateReader):
    """Ankner et al., 2024."""

    name = "hydra"
    taps = Taps(hidden=(FINAL,))

    def __init__(self, config: Hydra) -> None:
        self.config = config
        self.trees = self.nested = config.tree is not None
        self.max_nodes = config.num_draft_tokens or 1  # until `plan` has seen the checkpoint

    def plan(self, target: Target) -> Needs:
        kind = table.find(self.name)
        checkpoint = Checkpoint(self.config.model, kind.files if kind else (), r"hydra_head\.")
        self._check_kind(checkpoint, target)
        self.tree, self.max_nodes = self.config.fit(_count(checkpoint), checkpoint.label)
        weights = checkpoint.weights(target, self.config.quantization)
        self.heads, self._ops = read_heads(checkpoint, weights, target), weights.ops
        self.prefix: Prefix | None = None
        self._specs: list[LayerSpec] = []
        if checkpoint.config.get("hydra_head_arch") == KINDS[1] or checkpoint.names(f"{PREFIX}.*"):
            shape = target.model.config
            self.prefix = Prefix(shape, weights.under(PREFIX), target.max_model_len + 1)
            self._specs = [LayerSpec.kv(shape.num_kv_heads, shape.head_dim, target.dtype)]
        checkpoint.finish(weights, UNUSED)
        return Needs(tuple(self._specs), target.model.tap_width(self.taps.hidden[0]))

    def _check_kind(self, checkpoint: Checkpoint, target: Target) -> None:
        """Heads of a kind that is read, for this target; an earlier state than the final one where it is asked for."""
        kind, label = checkpoint.config.get("hydra_head_arch", KINDS[0]), checkpoint.label
        if kind not in KINDS:
            raise CheckpointError(f"{label} holds Hydra heads of the kind {kind!r}; allowed: {', '.join(KINDS)}")
        if not _count(checkpoint):
            raise CheckpointError(f"{label} holds no Hydra head: no tensor such as hydra_mlp.0.0.linear.weight")
        first = [*checkpoint.names(r"hydra_mlp\.0\.\d+\.linear\.weight"), "hydra_mlp.0.0.linear.weight"][0]
        checkpoint.check("hidden size", checkpoint.matrix(first)[0], target.model.tap_width(FINAL))
        offset, layers = checkpoint.config.get("hidden_state_offset", 0), target.model.config.num_layers
        if type(offset) is not int or not 0 <= offset <= layers:
            raise CheckpointError(f"{label} gives hidden_state_offset={offset!r}; allowed: 0 to {layers}")
        if offset:
            self.taps = Taps(hidden=(layers - offset,))

    def attach(self, target: Target, cache: KVCache) -> None:
        self.open_cache(target, cache, self._specs, target.max_model_len)
        rows, width = target.max_num_seqs + 1, target.model.tap_width(self.taps.hidden[0])
        self._newest = torch.zeros(rows, width, dtype=target.dtype, device=target.device)  # [S+1, H]
        self._embed, self._links = target.model.embed, self._chain(target.model.embedding)
        if self.tree is not None:
            self._levels, places = levels_of(self.tree, target.device)
            self._seats = Seats(self.tree, places, target.device)

    def read_pairs(self, batch: Batch, states: Tensor, table: Slots) -> None:
        """A state stands at the place of the token behind it. Positions turn against each other alone, so all stand
        one further than where they were trained."""
        if self.prefix is not None:
            inputs = Inputs(None, batch.layout, {"states": states})
            states = self._ops.run(self.prefix, inputs, self._caches, (), None).final
        self.keep(batch, table, (states,), (self._newest,))

    def propose(self, context: Context) -> Proposal:
        most, (row,) = self.recall(context, (self._newest,))
        if self.tree is not None:
            return self._propose_tree(context, row).cut(most)
        if self._links:
            states = torch.nn.functional.pad(row, (0, len(self._links) * row.shape[1]))
            counts = draw_at_once(self._ops, context, most, self._links, states, GROWN)
            if counts is not None:
                return context.drawn(self.name, most=counts)
        token = newest_tokens(context)
        for number, head in enumerate(self.heads[: min(context.max_nodes, self.max_nodes)]):
            row = self._append(head, row, token)
            token = draw_next(context, self._logits(head, row), number)
        return context.drawn(self.name, most=most)

    def _chain(self, embedding: Weight) -> list[Link]:
        """For kernels that draw a chain in one call; none for others, nor where a head reads no tokens."""
        heads, each = self.heads[: self.max_nodes], embedding.shape[1]
        if not self._ops.chains or self.trees or any(head.residual is None for head in heads):
            return []
        width = each * (1 + len(heads))
        steps = [HydraStep(head, embedding, each * (1 + number), width) for number, head in enumerate(heads)]
        return [Link(step, step.own.head, step.own.bias) for step in steps]

    def _propose_tree(self, context: Context, row: Tensor) -> Proposal:
        """Depth by depth: nodes that have children are fed to the next head, each behind its own path."""
        token, parents = newest_tokens(context)[:, None], torch.full_like(context.slots, -1)[:, None]  # [B, P]
        rows, drawn = row[:, None], list[Tensor]()  # [B, P, W]
        for head, level in zip(self.heads, self._levels):
            rows, token, parents = rows[:, level.above], token[:, level.picked], parents[:, level.picked]
            fed = self._append(head, rows.flatten(0, 1), token.flatten())
            rows, logits = fed.view(*token.shape, -1), self._logits(head, fed).view(*token.shape, -1)
            found = context.draw(logits, parents, level.count, likeliest=True)
            token, parents = found.tokens.flatten(1), found.nodes.flatten(1)
            drawn.append(token)
        return self._seats.fill(drawn, context.max_nodes, self.name)

    def _append(self, head: HydraHead, rows: Tensor, tokens: Tensor) -> Tensor:
        """[T, W] with the embedding of the token behind each, where the head reads it."""
        if head.residual is None:
            return rows
        return torch.cat([rows, self._embed(tokens.contiguous()).to(rows.dtype)], dim=1)

    def _logits(self, head: HydraHead, rows: Tensor) -> Tensor:
        logits = run_head(self._ops, head, head.head, rows.contiguous()).logits
        assert logits is not None
        return logits if head.bias is None else logits + head.bias
