"""Tiny MLP speculators in all published layouts, and what their equations say."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.drafters.tiny_heads import HIDDEN, fit, randoms, states_of, write
from tests.fakes import VOCAB, Recorded


@dataclass
class MLPWeights:
    parts: dict[str, Tensor]  # by published names without the prefix, one set for each step
    num_steps: int
    scaled: bool

    def step(self, number: int, state: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """The equations: the next state, and the logits behind it."""
        part = {name: tensor.double() for name, tensor in self.parts.items()}
        inner = part["ln.0.weight"].shape[0]
        kept = 0.5 ** (0.5 / self.num_steps)
        weight = ((1 - kept**2) * inner / 2) ** 0.5
        state = state.double()
        if number == 0 and self.scaled:
            state = state / (state.pow(2).mean() + 1e-6).sqrt() / 2**0.5
        u = part[f"proj.{number}.weight"] @ state + weight / kept * part[f"emb.{number}.weight"][token]
        normed = u / (u.pow(2).mean() + 1e-6).sqrt()
        x = part[f"ln.{number}.weight"] * normed + part[f"ln.{number}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / 2**0.5))
        return state, part[f"head.{number}.weight"] @ state


def mlp_weights(tied: bool, scaled: bool, inner: int = 24, vocab: int = VOCAB) -> MLPWeights:
    make, steps = randoms(5), 3
    parts: dict[str, Tensor] = {}
    for step in range(steps):
        wide = inner if step else HIDDEN
        parts[f"emb.{step}.weight"] = make(vocab, inner, size=2.0)
        parts[f"proj.{step}.weight"] = make(inner, wide)
        parts[f"ln.{step}.weight"] = 1 + 0.3 * make(inner, size=inner**0.5)
        parts[f"ln.{step}.bias"] = 0.3 * make(inner, size=inner**0.5)
        parts[f"head.{step}.weight"] = make(vocab, inner, size=3.0)
    if tied:
        for name in parts:
            part, step, kind = name.split(".")
            parts[name] = parts[f"{part}.{min(int(step), 1) if part == 'proj' else 0}.{kind}"]
    return MLPWeights(parts, steps, scaled)


def mlp_config(tied: bool = False, scaled: bool = False, inner: int = 24) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": VOCAB,
        "emb_dim": HIDDEN,
        "inner_dim": inner,
        "n_predict": 3,
        "top_k_tokens_per_head": [4, 3, 2],
        "n_candidates": 5,
        "tie_weights": tied,
        "scale_input": scaled,
    }


@functools.cache
def mlp(tied: bool = False, scaled: bool = False, aliases: bool = True, inner: int = 24) -> tuple[str, MLPWeights]:
    """aliases: of a tied one, all are in the file; else only the first of each. Then the prefix is missing too."""
    weights = mlp_weights(tied, scaled, inner)
    tensors = {f"speculator.{name}": tensor for name, tensor in weights.parts.items()}
    if not aliases:
        kept = {"0", "1"} if tied else {"0", "1", "2"}
        tensors = {name: t for name, t in weights.parts.items() if name.split(".")[1] in kept}
        if tied:
            tensors = {name: t for name, t in tensors.items() if ".0." in name or name.startswith("proj.")}
    return write(mlp_config(tied, scaled, inner), tensors), weights


def accelerator(vocab: int) -> str:
    """An untied one for a target of the same hidden size and another vocabulary."""
    tensors = {f"speculator.{name}": tensor for name, tensor in mlp_weights(False, False, vocab=vocab).parts.items()}
    return write({**mlp_config(), "vocab_size": vocab}, tensors)


def knowing_mlp(known: Recorded) -> str:
    """The same of an MLP speculator, whose steps are fed the true tokens."""
    weights = mlp_weights(False, True, inner=64)
    states = {key: list(states_of(text)) for key, text in known.items()}
    for step in range(weights.num_steps if known else 0):
        features, tokens = [], []
        for key, text in known.items():
            for place in range(len(text) - 2 - step):
                states[key][place] = weights.step(step, states[key][place], text[place + 1 + step])[0]
                features.append(states[key][place])
                tokens.append(text[place + 2 + step])
        weights.parts[f"head.{step}.weight"] = 30 * fit(features, tokens)
    return write(mlp_config(scaled=True, inner=64), {f"speculator.{n}": t for n, t in weights.parts.items()})
