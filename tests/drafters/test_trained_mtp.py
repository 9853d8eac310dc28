"""A module trained on a tiny DeepSeek's own text is right far above chance, and much less with its halves swapped.

What is trained is the description that is served, under autograd (`kernels/training.py`), over whole texts; the very
weights then draft. The module learns its first draft, and a second by being fed what it gave.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline import LLM, MTP, SamplingParams
from paceline.drafters.mtp_network import Module
from paceline.kernels.training import Sequences, run_dense, weights_of
from tests.drafters.mtp_models import model_of, write_apart

VOCAB = 97
LENGTH, COUNT, STEPS = 28, 48, 120
PROMPTS = [[(11 * i + 5 * n + 2) % VOCAB for i in range(5)] for n in range(4)]


@functools.cache
def calm_model() -> Any:
    """The tiny DeepSeek with quiet layers: what it says depends on the last few tokens, so it can be learned."""
    model = copy.deepcopy(model_of("deepseek_v3"))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 3
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.02
    return model


@functools.cache
def lessons() -> tuple[Tensor, Tensor]:
    """[COUNT, LENGTH] texts it says, sampled, and its final states there."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (COUNT, 4), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            logits = calm_model()(ids).logits[:, -1]
            ids = torch.cat([ids, torch.softmax(logits / 0.3, 1).multinomial(1, generator=generator)], dim=1)
        states = calm_model().model(ids).last_hidden_state
    return ids, states


def given_by(module: Module, ids: Tensor, states: Tensor, first: int) -> Tensor:
    """What it gives at the places from `first` on."""
    positions = torch.arange(first, first + ids.shape[1]).expand(ids.shape)
    return run_dense(module, Sequences(ids, positions, {"states": states})).final


def train(module: Module) -> float:
    """At place p it reads the token there and the state before it, and learns token p+1; then fed what it gave."""
    ids, states = lessons()
    head = module.head.data
    borrowed = {id(head), id(module.embedding.data)}
    weights = [weight for weight in weights_of(module) if id(weight) not in borrowed]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        once = given_by(module, ids[:, 1:-1], states[:, :-2], 1)
        twice = given_by(module, ids[:, 2:-1], once[:, :-1], 2)
        loss = torch.zeros(())
        for given, first in ((once, 2), (twice, 3)):
            loss = loss + F.cross_entropy((given @ head.T).flatten(0, 1), ids[:, first:].flatten())
        loss.backward()
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)
    return float(loss.detach())


def accepted(llm: LLM) -> list[float]:
    """The share of drafts that came true, by their place."""
    params = SamplingParams(temperature=0.3, seed=2, max_tokens=40, ignore_eos=True)
    stats = [output.outputs[0].stats for output in llm.generate(PROMPTS, params)]
    proposed, came = (map(sum, zip(*(getattr(one, name) for one in stats))) for name in ("proposed", "accepted"))
    return [true / tried for true, tried in zip(came, proposed)]


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
