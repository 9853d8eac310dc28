"""Medusa heads: each reads the target's final state in front of the newest token and guesses one token further ahead.

The heads know nothing of each other's guesses. So a tree takes the ranks of each head's list, whatever stands above.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.drafters import table
from paceline.drafters.base import FINAL, Context, Needs, Target
from paceline.drafters.checkpoint import Checkpoint, own_or_borrowed
from paceline.drafters.heads import StaticHeads, draw_next, run_head
from paceline.drafters.states import StateKeeper
from paceline.drafters.static_tree import Seats
from paceline.drafters.tree import Proposal
from paceline.errors import CheckpointError
from paceline.kernels.ops import Forward, Weight
from paceline.models.config import read_number
from paceline.models.layers.linear import Linear
from paceline.models.weights import Weights

PREFIX = r"(model\.)?medusa_heads?\."  # where the heads are part of something larger
BESIDE = r"(?!\d+\.|blocks\.|lm_heads\.).*"  # what a whole model holds beside its heads
TOKEN_MAP = "token_map"


@dataclass(frozen=True)
class Medusa(StaticHeads):
    """A checkpoint of Medusa heads as the drafter; the options are those of `StaticHeads`."""

    def create(self) -> MedusaDrafter:
        return MedusaDrafter(self)


@dataclass(eq=False)
class MedusaHead:
    """Residual blocks on the state; `head` gives the logits behind them."""

    blocks: list[Linear]
    head: Weight

    def describe(self, f: Forward) -> Any:
        x = f.input("states", self.blocks[0].weight.shape[1])
        for block in self.blocks:
            x = f.add(x, f.activation(block(f, x), "silu"))
        return x


class Layout:
    """How a checkpoint names a head's tensors: as Medusa's authors do, or as vLLM does.

    How many heads and layers there are is counted: configs that were published are wrong.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.block, self.out = "{head}.{layer}.linear", "{head}.{layer}"
        if checkpoint.names(r"blocks\.\d+\.layers\.\d+\.weight"):
            self.block, self.out = "blocks.{head}.layers.{layer}", "lm_heads.{head}"
        found = re.escape(self.block).replace(r"\{head\}", r"(\d+)").replace(r"\{layer\}", r"(\d+)")
        named = [re.fullmatch(found + r"\.weight", name) for name in checkpoint.source.names()]
        self.layers: dict[int, int] = {}  # of each head
        for match in filter(None, named):
            self.layers[int(match[1])] = max(self.layers.get(int(match[1]), 0), int(match[2]) + 1)
        if not self.layers:
            raise CheckpointError(f"{checkpoint.label} holds no Medusa head: no tensor such as 0.0.linear.weight")

    def find_outs(self, num_heads: int) -> list[str | None]:
        """Each head's output matrix: its own, the one that all share, or None: the target's; for all of them alike."""
        names = [self.out.format(head=head, layer=self.layers.get(head, 0)) + ".weight" for head in range(num_heads)]
        there = [self.checkpoint.has(name) for name in names]
        if not any(there):
            return [None] * num_heads
        if self.out.startswith("lm_heads") and there[0] and not any(there[1:]):
            return [*names[:1]] * num_heads
        return [*names]  # whoever reads one that is not there says so

    def read(self, weights: Weights, target: Target, num_heads: int) -> list[MedusaHead]:
        hidden = target.model.tap_width(FINAL)
        read: dict[str | None, Weight] = {None: target.model.head}
        heads = []
        for head, out in enumerate(self.find_outs(num_heads)):
            names = [self.block.format(head=head, layer=layer) for layer in range(self.layers.get(head, 1))]
            blocks = [
                Linear(
                    weights.matrix([f"{name}.weight"], [(hidden, hidden)]),
                    weights.whole(f"{name}.bias", (hidden,)) if weights.has(f"{name}.bias") else None,
                )
                for name in names
            ]
            if out is not None and out not in read:
                size = (self.checkpoint.matrix(out)[0], hidden)
                read[out] = own_or_borrowed(weights, out, size, target.model.head, target.model.ops)
            heads.append(MedusaHead(blocks, read[out]))
        return heads


class MedusaDrafter(StateKeeper):
    """Cai et al., 2024."""

    name = "medusa"

    def __init__(self, config: Medusa) -> None:
        self.config = config
        self.trees = self.nested = config.tree is not None
        self.max_nodes = config.num_draft_tokens or 1  # until `plan` has seen the checkpoint

    def plan(self, target: Target) -> Needs:
        kind = table.find(self.name)
        checkpoint = Checkpoint(self.config.model, kind.files if kind else (), PREFIX)
        layout = Layout(checkpoint)
        first = layout.block.format(head=min(layout.layers), layer=0) + ".weight"
        checkpoint.check("hidden size", checkpoint.matrix(first)[1], target.model.tap_width(FINAL))
        num_heads = max(layout.layers) + 1
        self.tree, self.max_nodes = self.config.fit(num_heads, checkpoint.label)
        weights = checkpoint.weights(target, self.config.quantization)
        self.heads, self._ops = layout.read(weights, target, num_heads), weights.ops
        self._scale = read_number(checkpoint.config, "logit_scale", 1.0)
        self._map = self._read_map(checkpoint, target)
        whole = checkpoint.names(r"(model|transformer|lm_head)\..*")  # a model, with heads beside it
        checkpoint.finish(weights, BESIDE if whole else TOKEN_MAP)
        return super().plan(target)

    def _read_map(self, checkpoint: Checkpoint, target: Target) -> Tensor | None:
        """[Vd] target ids of a vocabulary that was cut down; None: the heads have the target's own."""
        sizes, wanted = {head.head.shape[0] for head in self.heads}, target.model.head.shape[0]
        if sizes == {wanted}:
            return None
        own = next(iter(sizes - {wanted}))
        if own > wanted or len(sizes) > 1 or not checkpoint.has(TOKEN_MAP):
            checkpoint.check("vocabulary size", own, wanted)
        return checkpoint.token_ids(TOKEN_MAP, own, wanted).to(target.device)

    def attach(self, target: Target, cache: KVCache) -> None:
        super().attach(target, cache)
        self._vocabulary = target.model.head.shape[0]
        if self.tree is not None:
            widths = [self.tree.width(depth) for depth in range(1, self.tree.depth + 1)]
            places = [sum(widths[: len(node) - 1]) + node[-1] for node in self.tree.nodes]
            self._widths, self._seats = widths, Seats(self.tree, places, target.device)

    def propose(self, context: Context) -> Proposal:
        most, state = self.most_nodes(context), self.newest(context)
        if self.tree is not None:
            return self._propose_tree(context, state).cut(most)
        for number in range(min(context.max_nodes, self.max_nodes)):
            draw_next(context, self._logits(number, state), number)
        return context.drawn(self.name, most=most)

    def _propose_tree(self, context: Context, state: Tensor) -> Proposal:
        """Each head's list is drawn once, behind the likeliest path: it is the same under every parent."""
        above = torch.full_like(context.slots, -1)[:, None]
        lists: list[Tensor] = []
        for number, count in enumerate(self._widths):
            drawn = context.draw(self._logits(number, state)[:, None], above, count, likeliest=True)
            lists.append(drawn.tokens[:, 0])
            above = drawn.nodes[:, 0, :1]
        return self._seats.fill(lists, context.max_nodes, self.name)

    def _logits(self, number: int, state: Tensor) -> Tensor:
        """[B, V] of one head, in target ids."""
        head = self.heads[number]
        logits = run_head(self._ops, head, head.head, state).logits
        assert logits is not None
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._map is None:
            return logits
        return logits.new_full((len(logits), self._vocabulary), float("-inf")).index_copy(1, self._map, logits)
