"""A module trained on a tiny DeepSeek's own text is right far above chance, and much less with its halves swapped.

What is trained is the description that is served, under autograd (`kernels/training.py`), over whole texts; the very
weights then draft. The module learns its first draft, and a second by being fed what it gave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import LLM, MTP
from paceline.drafters.mtp_network import Module
from paceline.kernels.training import Sequences, run_dense, weights_of
from tests.drafters.lessons import accepted, calmed, descend, lessons_of
from tests.drafters.mtp_models import model_of, write_apart


@functools.cache
def calm_model() -> Any:
    model = calmed(model_of("deepseek_v3"))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 3
    return model


def given_by(module: Module, ids: Tensor, states: Tensor, first: int) -> Tensor:
    """What it gives at the places from `first` on."""
    positions = torch.arange(first, first + ids.shape[1]).expand(ids.shape)
    return run_dense(module, Sequences(ids, positions, {"states": states})).final


def train(module: Module) -> float:
    """At place p it reads the token there and the state before it, and learns token p+1; then fed what it gave."""
    ids, states = lessons_of(calm_model())
    head = module.head.data
    borrowed = {id(head), id(module.embedding.data)}

    def loss() -> Tensor:
        once = given_by(module, ids[:, 1:-1], states[:, :-2], 1)
        twice = given_by(module, ids[:, 2:-1], once[:, :-1], 2)
        total = torch.zeros(())
        for given, first in ((once, 2), (twice, 3)):
            total = total + F.cross_entropy((given @ head.T).flatten(0, 1), ids[:, first:].flatten())
        return total

    return descend([weight for weight in weights_of(module) if id(weight) not in borrowed], loss)


def test_a_module_learns_the_tokens_ahead(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    folder = write_apart(tmp_path, "deepseek_v3", 1)
    llm = LLM(calm_model(), MTP(folder, 3), kernels="torch", max_model_len=100, device="cpu")
    drafter: Any = llm.engine.drafter
    (module,) = drafter.modules
    before = accepted(llm)
    loss = train(module)
    shares = accepted(llm)
    first, second = module.fusion.weight.data.chunk(2, dim=1)
    module.fusion.weight.data = torch.cat([second, first], dim=1)
    swapped = accepted(llm)
    told = {"untrained": before, "trained": shares, "with its halves swapped": swapped}
    shown = "; ".join(f"{name} {', '.join(f'{share:.0%}' for share in row)}" for name, row in told.items())
    record_property("shown", f"an MTP module of a tiny DeepSeek, drafts accepted by place: {shown} (loss {loss:.2f})")
    assert shares[0] > 0.4 and shares[1] > 0.15, "chance is 1%"
    assert before[0] < 0.1 and sum(swapped) < sum(shares) / 2
