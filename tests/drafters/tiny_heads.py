"""What tests of Medusa, Hydra and MLP speculators share: folders to write, texts to draft for, drafts to look at.

All heads are for tests.fakes.tiny_model (hidden size 32, vocabulary 97). Their weights are kept as plain tensors beside
the folders, so that a draft can be computed again from the text alone, in float64.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.drafters.base import Context
from paceline.drafters.tree import Proposal
from paceline.outputs import CompletionOutput
from paceline.prompts import Prompt
from tests.fakes import VOCAB, tiny_model

HIDDEN = 32
PROMPTS = [[(7 * i * i + 3 * i + n) % VOCAB for i in range(6 + 5 * n)] for n in range(3)]
_FOLDERS = tempfile.TemporaryDirectory(prefix="paceline-heads-")


def write(config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors") -> str:
    """A folder as it is published; its path says nothing."""
    folder = Path(tempfile.mkdtemp(dir=_FOLDERS.name))
    (folder / "config.json").write_text(json.dumps(dict(config)))
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    if file.endswith(".safetensors"):
        save_file(whole, folder / file)
    else:
        torch.save(whole, folder / file)
    return str(folder)


def randoms(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, size: float = 1.0) -> Tensor:
        return size * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    return make


# Texts, and the target's states there


def states_of(text: list[int]) -> Tensor:
    """[positions, H] final states of the target, by transformers."""
    with torch.no_grad():
        found: Tensor = tiny_model()(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    return found


def state_before(text: list[int]) -> Tensor:
    """The one in front of the newest token."""
    return states_of(text[:-1])[-1]


def fit(features: list[Tensor], tokens: list[int]) -> Tensor:
    """[V, D] the ridge solution: features to their tokens, one-hot. So heads come about that know a text."""
    x = torch.stack(features).double()
    wanted = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).double()
    square = x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(square, x.T @ wanted).T.float()


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[CompletionOutput]:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params})
    return [output for result in llm.generate(prompts, given) for output in result.outputs]


def begin(llm: LLM, rounds: int, **params: Any) -> None:
    """The first rounds of answers that have room for the largest drafts."""
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 100, "ignore_eos": True, **params})
    for prompt in PROMPTS:
        llm.add(Prompt(None, prompt), given)
    for _ in range(rounds):
        llm.step()


def texts(outputs: list[CompletionOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


# Drafts


@dataclass
class Draft:
    text: list[int]  # committed, the newest token last
    tokens: list[int]
    parents: list[int]

    @property
    def tree(self) -> dict[tuple[int, ...], None]:
        """The texts of all nodes, from the root down, in order."""
        found: list[tuple[int, ...]] = []
        for token, parent in zip(self.tokens, self.parents):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return dict.fromkeys(found)


class Spy:
    """A config whose drafter keeps every proposal with the text it was made for."""

    def __init__(self, config: Any) -> None:
        self.config, self.seen = config, list[Draft]()

    def create(self) -> Any:
        self.made = self.config.create()
        propose = self.made.propose

        def spied(context: Context) -> Proposal:
            proposal: Proposal = propose(context)
            table, sizes = context.table, torch.minimum(proposal.sizes, context.budgets).tolist()
            places = zip(context.slots.tolist(), context.lengths.tolist(), sizes)
            for (slot, length, size), tokens, parents in zip(
                places, proposal.tokens.tolist(), proposal.parents.tolist()
            ):
                text = table.tokens.tensor[slot, :length].tolist()
                if slot != table.null:  # the row of one that does not draft
                    self.seen.append(Draft(text, tokens[:size], parents[:size]))
            return proposal

        self.made.propose = spied
        return self.made
