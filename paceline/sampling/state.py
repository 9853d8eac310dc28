"""Sampling parameters of every slot, as tensors, and which pipeline stages anybody needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.params import SamplingParams
from paceline.sampling.noise import Keys

_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INTS = ("top_k", "min_tokens", "seed", "sample", "greedy")


@dataclass
class Rows:
    """R places where a token may be sampled, each with the history of its own node.

    Row r follows the token at positions[r]; the committed tokens of its slot come first, then `path`: the drafted
    tokens from the root down to and including the row's own, -1 beyond its depth.
    """

    slots: Tensor  # [R]
    slot_list: list[int]  # distinct slots, on the host: what decides which stages run
    positions: Tensor  # [R]
    path: Tensor  # [R, D]


@dataclass
class Words:
    """Bad words as token sequences, and the ids that must not end a text too early."""

    bad: list[list[int]]
    stops: list[int]


class SamplerState:
    """Slot-resident parameters. `set` when a sequence takes its slot; nothing to undo when it leaves."""

    def __init__(self, table: Slots, vocab_size: int, device: torch.device) -> None:
        self.table, self.vocab_size, self.device = table, vocab_size, device
        slots = table.num_slots
        self._floats = torch.zeros(slots, len(_FLOATS), dtype=torch.float32, device=device)
        self._ints = torch.zeros(slots, len(_INTS), dtype=torch.int64, device=device)
        self.bias: Tensor | None = None  # [S, V], made when first needed; -inf where a token is not allowed
        self.words: dict[int, Words] = {}
        self.params: dict[int, SamplingParams] = {}

    def set(self, slot: int, params: SamplingParams, words: Words, seed: int, sample: int) -> None:
        self.params[slot], self.words[slot] = params, words
        greedy = params.greedy  # then nothing after the penalties may touch its rows
        floats = (1.0, 1.0, 0.0) if greedy else (params.temperature, params.top_p, params.min_p)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        self._floats[slot] = torch.tensor([*floats, *penalties], dtype=torch.float32)
        signed = seed - 2**64 if seed >= 2**63 else seed
        ints = [0 if greedy else max(params.top_k, 0), params.min_tokens, signed, sample, int(greedy)]
        self._ints[slot] = torch.tensor(ints, dtype=torch.int64)
        if params.logit_bias or params.allowed_token_ids is not None:
            if self.bias is None:
                self.bias = torch.zeros(self.table.num_slots, self.vocab_size, device=self.device)
            self.bias[slot] = self._bias_row(params)

    def _bias_row(self, params: SamplingParams) -> Tensor:
        row = torch.zeros(self.vocab_size)
        if params.allowed_token_ids is not None:
            row.fill_(float("-inf"))
            row[list(params.allowed_token_ids)] = 0.0
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        return row

    def float_column(self, name: str, slots: Tensor) -> Tensor:
        return self._floats[slots, _FLOATS.index(name)]

    def int_column(self, name: str, slots: Tensor) -> Tensor:
        return self._ints[slots, _INTS.index(name)]

    def keys(self, slots: Tensor) -> Keys:
        return Keys(self.int_column("seed", slots), self.int_column("sample", slots))

    def greedy(self, slots: Tensor) -> Tensor:
        return self.int_column("greedy", slots) != 0

    def any_sampled(self, slot_list: list[int]) -> bool:
        """Whether any of these slots needs noise at all."""
        return any(not self.params[slot].greedy for slot in slot_list)
