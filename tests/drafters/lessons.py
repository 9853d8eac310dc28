"""What trained drafters learn from: texts that a tiny target with quiet layers says, and its states there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline import LLM, SamplingParams

VOCAB = 97
LENGTH, COUNT = 28, 48  # of the texts
STEPS = 120
PROMPTS = [[(11 * i + 5 * n + 2) % VOCAB for i in range(5)] for n in range(4)]


def calmed(model: Any) -> Any:
    """Its copy with quiet layers: what it says depends on the last few tokens, so it can be learned."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter *= 0.02
    return model


def lessons_of(model: Any) -> tuple[Tensor, Tensor]:
    """[COUNT, LENGTH] texts it says, sampled, and its final states there."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (COUNT, 4), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            logits = model(ids).logits[:, -1]
            ids = torch.cat([ids, torch.softmax(logits / 0.3, 1).multinomial(1, generator=generator)], dim=1)
        states = model.model(ids).last_hidden_state
    return ids, states


def descend(weights: list[Tensor], loss_of: Callable[[], Tensor]) -> float:
    """The last loss; the weights hold no gradients after it."""
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
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
