"""Tiny checkpoints of Medusa heads in all published layouts, and what their equations say."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.drafters.tiny_heads import HIDDEN, fit, randoms, states_of, write
from tests.fakes import VOCAB, Recorded, tiny_model

MEDUSA = ("pt", "safetensors", "v2", "full", "full_unmarked", "vllm", "vllm_bias", "vllm_shared", "vllm_map")
# What published configs say, which the file then contradicts.
ORIGINAL = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}


@dataclass
class MedusaWeights:
    blocks: list[list[tuple[Tensor, Tensor | None]]]  # of each head, each layer's matrix and bias
    outs: list[Tensor]  # [V, H], or [Vd, H] with a map
    token_map: Tensor | None = None
    scale: float = 1.0

    def feature(self, head: int, state: Tensor) -> Tensor:
        """The equations: z = z + silu(W z + b) for every layer."""
        z = state.double()
        for matrix, bias in self.blocks[head]:
            z = z + torch.nn.functional.silu(matrix.double() @ z + (0.0 if bias is None else bias.double()))
        return z

    def logits(self, head: int, state: Tensor) -> Tensor:
        """Then the output matrix."""
        found = self.scale * (self.outs[head].double() @ self.feature(head, state))
        if self.token_map is None:
            return found
        wide = torch.full((VOCAB,), float("-inf"), dtype=found.dtype)
        wide[self.token_map] = found
        return wide


def medusa_weights(layers: int = 1, bias: bool = True, outs: str = "own", heads: int = 3) -> MedusaWeights:
    make = randoms(heads + layers)
    blocks = [
        [(make(HIDDEN, HIDDEN, size=2.0), make(HIDDEN, size=2.0) if bias else None) for _ in range(layers)]
        for _ in range(heads)
    ]
    if outs == "target":
        return MedusaWeights(blocks, [tiny_model().lm_head.weight.detach()] * heads)
    if outs == "shared":
        return MedusaWeights(blocks, [make(VOCAB, HIDDEN)] * heads)
    if outs == "map":
        chosen = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:40].sort().values
        return MedusaWeights(blocks, [make(40, HIDDEN) for _ in range(heads)], chosen, 0.5)
    return MedusaWeights(blocks, [make(VOCAB, HIDDEN) for _ in range(heads)])


def original_names(weights: MedusaWeights, prefix: str = "", outs: bool = True) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for head, blocks in enumerate(weights.blocks):
        for layer, (matrix, bias) in enumerate(blocks):
            found[f"{prefix}{head}.{layer}.linear.weight"] = matrix
            if bias is not None:
                found[f"{prefix}{head}.{layer}.linear.bias"] = bias
        if outs:
            found[f"{prefix}{head}.{len(blocks)}.weight"] = weights.outs[head]
    return found


def vllm_names(weights: MedusaWeights, shared: bool = False) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for head, blocks in enumerate(weights.blocks):
        for layer, (matrix, bias) in enumerate(blocks):
            found[f"blocks.{head}.layers.{layer}.weight"] = matrix
            if bias is not None:
                found[f"blocks.{head}.layers.{layer}.bias"] = bias
        if head == 0 or not shared:
            found[f"lm_heads.{head}.weight"] = weights.outs[head]
    return found


@functools.cache
def medusa(layout: str = "pt", layers: int = 1, heads: int = 3) -> tuple[str, MedusaWeights]:
    """A checkpoint's folder, and what is in it."""
    if layout in ("pt", "safetensors"):
        weights = medusa_weights(layers, heads=heads)
        return write(ORIGINAL, original_names(weights), f"medusa_lm_head.{layout}"), weights
    if layout == "v2":
        weights = medusa_weights(layers, outs="target")
        tensors = original_names(weights, outs=False)
        return write({**ORIGINAL, "version": "2"}, tensors, "medusa_lm_head.safetensors"), weights
    if layout.startswith("full"):
        weights, unmarked = medusa_weights(layers), layout == "full_unmarked"
        prefix = "model.medusa_head." if unmarked else "medusa_head."
        config = tiny_model().config.to_dict() | ({} if unmarked else ORIGINAL)
        return write(config, {**tiny_model().state_dict(), **original_names(weights, prefix)}), weights
    outs = {"vllm_shared": "shared", "vllm_map": "map"}.get(layout, "own")
    weights = medusa_weights(layers, bias=layout == "vllm_bias", outs=outs)
    config = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, "topk": 10}
    config |= {"num_hidden_layers": layers, "medusa_fc_bias": layout == "vllm_bias", "max_paths": 64}
    config |= {"original_lm_head": outs == "shared", "truncated_vocab_size": len(weights.outs[0])}
    config |= {"logit_scale": weights.scale}
    tensors = vllm_names(weights, outs == "shared")
    if weights.token_map is not None:
        tensors["token_map"] = weights.token_map
    return write(config, tensors), weights


def vicuna_heads(vocab: int) -> str:
    """Four Medusa heads for a target of the same hidden size and another vocabulary."""
    weights, make = medusa_weights(heads=4), randoms(1)
    weights.outs = [make(vocab, HIDDEN) for _ in range(4)]
    return write(ORIGINAL, original_names(weights), "medusa_lm_head.pt")


def knowing_medusa(known: Recorded, heads: int = 4) -> str:
    """Heads that are often right on the recorded texts; random ones where there are none."""
    weights = medusa_weights(heads=heads)
    for head in range(heads if known else 0):
        features, tokens = [], []
        for text in known.values():
            states = states_of(text)
            for place in range(len(text) - 2 - head):
                features.append(weights.feature(head, states[place]))
                tokens.append(text[place + 2 + head])
        weights.outs[head] = 30 * fit(features, tokens)
    return write(ORIGINAL, original_names(weights), "medusa_lm_head.pt")
