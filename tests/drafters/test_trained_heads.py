"""Heads that are trained on a tiny target's own text are right far above chance; a wrong shift could not be.

What is trained is the description that is served, under autograd (`kernels/training.py`), in a checkpoint that was
read from disk. What was learned goes back to disk in the published layout, and is then loaded and served.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import LLM, Medusa, MLPSpeculator
from paceline.kernels.training import Sequences, run_dense, weights_of
from tests.drafters.lessons import LENGTH, accepted, calmed, descend, lessons_of
from tests.drafters.tiny_heads import write
from tests.drafters.tiny_medusa import ORIGINAL, MedusaWeights, medusa_weights, original_names
from tests.drafters.tiny_mlp import mlp_config, mlp_weights
from tests.fakes import tiny_model


@functools.cache
def calm_model() -> Any:
    return calmed(tiny_model())


@functools.cache
def lessons() -> tuple[Tensor, Tensor]:
    return lessons_of(calm_model())


def calm_llm(drafter: Any) -> LLM:
    return LLM(calm_model(), drafter, kernels="torch", max_model_len=200, device="cpu")


def logits_of(network: Any, states: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Next states and logits of a head on every position."""
    positions = torch.arange(states.shape[1]).expand(states.shape[:2])
    final = run_dense(network, Sequences(ids, positions, {"states": states})).final
    return final, final @ network.head.data.T


def accepted_of(drafter: Any) -> list[float]:
    return accepted(calm_llm(drafter))


def shown(shares: list[float]) -> str:
    return "accepted " + "/".join(f"{100 * share:.0f}" for share in shares) + " %"


def train_medusa() -> MedusaWeights:
    """Head i reads the state at p and learns the token at p + 2 + i."""
    ids, states = lessons()
    drafter = calm_llm(Medusa(write(ORIGINAL, original_names(medusa_weights()), "medusa_lm_head.pt"))).engine.drafter
    heads: Any = drafter.heads  # type: ignore[union-attr]

    def loss() -> Tensor:
        total = torch.zeros(())
        for number, head in enumerate(heads):
            _, logits = logits_of(head, states[:, : LENGTH - 2 - number], None)
            total = total + F.cross_entropy(logits.flatten(0, 1), ids[:, 2 + number :].flatten())
        return total

    descend([weight for head in heads for weight in (*weights_of(head), head.head.data)], loss)
    blocks = [[(block.weight.data, block.bias) for block in head.blocks] for head in heads]
    return MedusaWeights(blocks, [head.head.data for head in heads])


def test_medusa_heads_learn_the_tokens_ahead(record_property: Callable[[str, object], None]) -> None:
    trained = train_medusa()
    path = write(ORIGINAL, original_names(trained), "medusa_lm_head.pt")
    shares = accepted_of(Medusa(path))
    late = MedusaWeights(trained.blocks[1:] + trained.blocks[:1], trained.outs[1:] + trained.outs[:1])
    shifted = accepted_of(Medusa(write(ORIGINAL, original_names(late), "medusa_lm_head.pt")))
    record_property("shown", f"trained Medusa: {shown(shares)}; its heads one place late: {shown(shifted)}")
    assert shares[0] > 0.3 and shifted[0] < 0.15, (shares, shifted)
    assert sum(accepted_of(Medusa(path, tree=[(0,), (1,), (2,), (0, 0), (1, 0)]))) > sum(shares[:2])


def train_mlp() -> dict[str, Tensor]:
    """Step i reads the state so far and the token at p + 1 + i, and learns the one at p + 2 + i."""
    ids, states = lessons()
    parts = {f"speculator.{name}": tensor for name, tensor in mlp_weights(False, True).parts.items()}
    drafter = calm_llm(MLPSpeculator(write(mlp_config(scaled=True), parts))).engine.drafter
    steps: Any = drafter.steps  # type: ignore[union-attr]

    def loss() -> Tensor:
        total, state = torch.zeros(()), states
        for number, step in enumerate(steps):
            known = LENGTH - 2 - number
            state, logits = logits_of(step, state[:, :known], ids[:, 1 + number :][:, :known])
            total = total + F.cross_entropy(logits.flatten(0, 1), ids[:, 2 + number :].flatten())
        return total

    wanted = [tensor for step in steps for tensor in (*weights_of(step), step.head.data) if tensor is not step.even]
    descend(wanted, loss)
    found: dict[str, Tensor] = {}
    for number, step in enumerate(steps):
        named = {"emb": step.embedding.data, "proj": step.projection.data, "ln": step.norm, "head": step.head.data}
        found |= {f"speculator.{part}.{number}.weight": tensor for part, tensor in named.items()}
        found[f"speculator.ln.{number}.bias"] = step.shift
    return found


def test_an_mlp_speculator_learns_the_tokens_ahead(record_property: Callable[[str, object], None]) -> None:
    trained = train_mlp()
    path = write(mlp_config(scaled=True), trained)
    shares = accepted_of(MLPSpeculator(path))
    order = {"0": "1", "1": "2", "2": "1"}  # heads of a step too late
    late = {
        n: trained[f"speculator.head.{order[n.split('.')[2]]}.weight"] if "head" in n else t for n, t in trained.items()
    }
    shifted = accepted_of(MLPSpeculator(write(mlp_config(scaled=True), late)))
    record_property("shown", f"trained MLP speculator: {shown(shares)}; its heads one step late: {shown(shifted)}")
    assert shares[0] > 0.4 and shifted[0] < 0.15, (shares, shifted)
    assert sum(accepted_of(MLPSpeculator(path, tree=True))) > sum(shares)
