"""Tiny checkpoints of Hydra heads, alone and behind a prefix layer, and what their equations say."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.drafters.tiny_heads import HIDDEN, fit, randoms, states_of, write
from tests.fakes import VOCAB, Recorded, tiny_model

HYDRA = {"hydra_num_heads": 2, "hydra_num_layers": 1, "base_model_name_or_path": "some/target"}


@dataclass
class HydraWeights:
    parts: dict[str, Tensor]  # hydra_mlp and hydra_lm_head by the names of the kind without dropout
    layers: int
    grounded: bool
    prefix: Any = None  # transformers' own module, one layer

    def feature(self, states: Tensor) -> Tensor:
        """What the heads read of the target's states [positions, H] so far."""
        if self.prefix is None:
            return states[-1]
        with torch.no_grad():
            found: Tensor = self.prefix(inputs_embeds=states[None]).last_hidden_state[0, -1]
        return found

    def logits(self, head: int, feature: Tensor, tokens: list[int]) -> Tensor:
        """The equations; tokens: the newest one, then the drafts before this head's own."""
        part = {name: tensor.double() for name, tensor in self.parts.items()}
        embedding = tiny_model().model.embed_tokens.weight.detach().double()
        u = (
            torch.cat([feature.double(), *(embedding[token] for token in tokens)])
            if self.grounded
            else feature.double()
        )
        for layer in range(self.layers):
            at = f"hydra_mlp.{head}.{layer}."
            beside = u
            if layer == 0 and self.grounded:
                beside = part[at + "res_connection.weight"] @ u + part[at + "res_connection.bias"]
            u = beside + torch.nn.functional.silu(part[at + "linear.weight"] @ u + part[at + "linear.bias"])
        return part[f"hydra_lm_head.{head}.weight"] @ u + part[f"hydra_lm_head.{head}.bias"]


def hydra_weights(layers: int, grounded: bool, heads: int = 4) -> HydraWeights:
    make = randoms(11)
    parts: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            first = layer == 0 and grounded
            wide = HIDDEN * (head + 2) if first else HIDDEN
            for name in ("linear", "res_connection") if first else ("linear",):
                parts[f"hydra_mlp.{head}.{layer}.{name}.weight"] = make(HIDDEN, wide, size=1.5)
                parts[f"hydra_mlp.{head}.{layer}.{name}.bias"] = make(HIDDEN)
        parts[f"hydra_lm_head.{head}.weight"] = make(VOCAB, HIDDEN)
        parts[f"hydra_lm_head.{head}.bias"] = make(VOCAB, size=3.0)
    return HydraWeights(parts, layers, grounded)


@functools.cache
def prefix_module() -> Any:
    config = transformers.LlamaConfig(**{**tiny_model().config.to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(4)
    return transformers.LlamaModel(config).eval().float()


def with_dropout(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a list that holds a dropout before each of its modules counts them."""
    found: dict[str, Tensor] = {}
    for name, tensor in parts.items():
        kind, head, *rest = name.split(".")
        place = ["1", rest[0]] if kind == "hydra_lm_head" else [str(2 * int(rest[0]) + 1), *rest[1:]]
        found[".".join([kind, head, *place])] = tensor
    return found


@functools.cache
def hydra(kind: str = "mlp", layers: int = 1, grounded: bool = True, offset: int = 0) -> tuple[str, HydraWeights]:
    weights = hydra_weights(layers, grounded)
    return write_hydra(weights, kind, offset), weights


def write_hydra(weights: HydraWeights, kind: str = "mlp", offset: int = 0) -> str:
    tensors = {**weights.parts, "input_embed_fn.weight": tiny_model().model.embed_tokens.weight}
    if kind == "prefix-mlp":
        weights.prefix = prefix_module()
        tensors = with_dropout(weights.parts) | {"input_embed_fn.weight": tensors["input_embed_fn.weight"]}
        tensors |= {f"prefix_embeding_layer.{name}": t for name, t in weights.prefix.state_dict().items()}
    config = {**HYDRA, "hydra_head_arch": kind, "grounded_heads": weights.grounded, "hidden_state_offset": offset}
    return write(config, tensors, "hydra_lm_head.pt")


def knowing_hydra(known: Recorded, kind: str = "mlp") -> str:
    """The same of Hydra heads, which are fed the true tokens."""
    weights = hydra_weights(1, True)
    path = write_hydra(weights, kind)
    if not known:
        return path
    for head in range(4):
        out, bias = weights.parts[f"hydra_lm_head.{head}.weight"], weights.parts[f"hydra_lm_head.{head}.bias"]
        weights.parts[f"hydra_lm_head.{head}.weight"], features, tokens = torch.eye(HIDDEN), [], []
        weights.parts[f"hydra_lm_head.{head}.bias"] = torch.zeros(HIDDEN)  # so its states are seen
        for text in known.values():
            states = states_of(text)
            if weights.prefix is not None:
                with torch.no_grad():
                    states = weights.prefix(inputs_embeds=states[None]).last_hidden_state[0]
            for place in range(len(text) - 2 - head):
                features.append(weights.logits(head, states[place], text[place + 1 : place + 2 + head]))
                tokens.append(text[place + 2 + head])
        weights.parts[f"hydra_lm_head.{head}.weight"] = 30 * fit(features, tokens).view_as(out)
        weights.parts[f"hydra_lm_head.{head}.bias"] = 0 * bias
    return write_hydra(weights, kind)
