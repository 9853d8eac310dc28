"""What the target itself says after a text: its processed logits, and how close its choice there was.

Knows the engine's own pipeline and noise, and uses them as they are. Must not know drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.llm import LLM
from paceline.params import SamplingParams
from paceline.prompts import Prompt
from paceline.requests import find_words
from paceline.sampling import noise
from paceline.sampling.processors import process
from paceline.sampling.state import Rows, SamplerState

TOGETHER = 32  # texts looked at in one go: a row each, as wide as the vocabulary


@dataclass(frozen=True)
class Text:
    """A prompt, and what was said after it."""

    prompt: list[int]
    said: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.said]


class Lens:
    """The target alone: its drafter is turned off, and has to be set anew by whoever wants it back."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        self.page = llm.options.block_size  # positions whose computation texts can share

    def logits(self, texts: list[Text]) -> Tensor:
        """[R, V] processed: what the next token is picked from, on the host."""
        parts = [self._processed(texts[first : first + TOGETHER]) for first in range(0, len(texts), TOGETHER)]
        return torch.cat(parts)

    def shares(self, texts: list[Text]) -> Tensor:
        """[R, V] probabilities of the next token."""
        return torch.softmax(self.logits(texts).double(), dim=1)

    def margin(self, text: Text, seed: int) -> float:
        """How far apart the two best tokens were in what is compared: logits, and noise where the text is sampled."""
        logits = self.logits([text])
        if not self._params.greedy:
            keys = noise.Keys(*(torch.tensor([value], dtype=torch.int64) for value in (_signed(seed), 0)))
            place = torch.tensor([len(text.ids)])
            logits = logits + noise.gumbel(keys, place, noise.SAMPLE, logits.shape[1])
        best = torch.topk(logits[0], 2).values
        return float(best[0] - best[1])

    def _processed(self, texts: list[Text]) -> Tensor:
        llm, device = self._llm, torch.device("cpu")
        raw = self._raw(texts)
        table = Slots(len(texts), max(len(text.ids) for text in texts) + 1, 1, device)
        state = SamplerState(table, llm.config.vocab_size, device)
        words = find_words(self._params, llm.tokenizer, llm.limits)
        for slot, text in enumerate(texts):
            table.begin(slot, text.ids, len(text.prompt))
            state.set(slot, self._params, words, 0, 0)
        slots = torch.arange(len(texts))
        places = torch.tensor([len(text.ids) - 1 for text in texts])
        rows = Rows(slots, slots.tolist(), places, torch.zeros(len(texts), 0, dtype=torch.int64))
        return process(raw, rows, state)

    def _raw(self, texts: list[Text]) -> Tensor:
        """As the target computes them; a function among a request's parameters is shown its logits."""
        found: dict[int, Tensor] = {}

        def asking(number: int) -> SamplingParams:
            def look(output: list[int], logits: Tensor) -> Tensor:
                found.setdefault(number, logits.detach().float().cpu().clone())
                return logits

            given: Any = [look]
            return SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logits_processors=given)

        self._llm.set_drafter(None)
        listed: Any = [text.ids for text in texts]
        self._llm.generate(listed, [asking(number) for number in range(len(texts))])
        return torch.stack([found[number] for number in range(len(texts))])


def _signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def to_text(prompt: Prompt, said: list[int]) -> Text:
    return Text(list(prompt.ids), list(said))


def spell(llm: LLM, token: int | None) -> str:
    if token is None:
        return "the end"
    text = "" if llm.tokenizer is None else repr(llm.tokenizer.decode([token]))
    return f"{token} {text}".strip()
