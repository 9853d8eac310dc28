"""Sampling parameters of every slot, as tensors, and which pipeline stages anybody needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache.slots import Slots
from paceline.kernels.chain import Picking
from paceline.kernels.cpu.library import library
from paceline.kernels.rounds import Keyed
from paceline.params import SamplingParams
from paceline.sampling import noise
from paceline.sampling.noise import Keys

# Columns, and what stands in a slot nobody has: values that leave a row as it is, since padding has a slot too.
_FLOATS = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0}
_INTS = {"top_k": 0, "min_tokens": 0, "seed": 0, "sample": 0, "greedy": 1, "biased": 0, "worded": 0}
ANYTHING, NOTHING = -2, -3  # in a ban, where any token fits and where none does


@dataclass
class Rows:
    """R places where a token may be sampled, each with the history of its own node.

    Row r follows the token at positions[r]; the committed tokens of its slot come first, then the drafted ones from the
    root down to and including the row's own, -1 beyond its depth.
    """

    slots: Tensor  # [R]
    slot_list: list[int]  # distinct slots, on the host: what decides which stages run
    positions: Tensor  # [R]
    drafted: Tensor  # [R, D] tokens


@dataclass
class Words:
    """What a request brings that is no number: bad words as token sequences, the ids that must not end a text too
    early, its own functions, and what went wrong in those."""

    bad: list[list[int]]
    stops: list[int]
    functions: list[tuple[Callable[..., Any], bool]] = field(default_factory=list)  # and whether it takes the prompt
    _faults: dict[tuple[int, int], str] = field(default_factory=dict)

    def note_fault(self, output: list[int], fault: str) -> None:
        """A function failed after this output, which may be a draft that nobody will ever say."""
        self._faults[len(output), hash(tuple(output))] = fault

    def fault_after(self, output: list[int]) -> str | None:
        return self._faults.get((len(output), hash(tuple(output)))) if self._faults else None


class Kind(NamedTuple):
    """What the pipeline does for a request, as a key."""

    greedy: bool
    stages: tuple[int, ...]  # numbers of `processors.STAGES`
    top_k: int  # no request has a larger one; 0: none
    tempered: bool  # temperature and noise at most come between the raw logits and the token
    bans: tuple[torch.Size, ...] = ()  # the shapes of the tables of bans that its stages look into


class Bans:
    """Runs of tokens of every slot that must not be said, [S+1, W, 1+L]: the last token of each, then those before it,
    behind what fits anything. As wide as the widest that ever came, in powers of two."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.tensor = _no_bans(slots, 1, 1, device)

    def set(self, slot: int, runs: list[list[int]], pinned: bool) -> None:
        words, length = self.tensor.shape[1], self.tensor.shape[2] - 1
        longest = max([len(run) - 1 for run in runs], default=0)
        if len(runs) > words or longest > length:
            wider = _no_bans(len(self.tensor), _power(words, len(runs)), _power(length, longest), self.tensor.device)
            wider[:, :words, 1:] = ANYTHING
            wider[:, :words, 0], wider[:, :words, -length:] = self.tensor[:, :, 0], self.tensor[:, :, 1:]
            self.tensor, length = wider, wider.shape[2] - 1
        row = _no_bans(1, self.tensor.shape[1], length, torch.device("cpu"))[0]
        if runs:
            padded = [[run[-1], *[ANYTHING] * (length - len(run) + 1), *run[:-1]] for run in runs]
            row[: len(runs)] = torch.tensor(padded, dtype=torch.int64)
        self.tensor[slot].copy_(row.pin_memory() if pinned else row, non_blocking=True)


def _no_bans(slots: int, words: int, length: int, device: torch.device) -> Tensor:
    nothing = torch.full((slots, words, 1 + length), NOTHING, dtype=torch.int64, device=device)
    nothing[:, :, 0] = 0
    return nothing


def _power(least: int, wanted: int) -> int:
    """The power of two that reaches it, from a smaller one on."""
    return least if least >= wanted else 1 << (wanted - 1).bit_length()


TEMPERED = -1  # a slot that stands for any request of temperature and noise; as an index it is the row of nobody


class SamplerState:
    """Slot-resident parameters. `set` when a sequence takes its slot; nothing to undo when it leaves."""

    def __init__(self, table: Slots, vocab_size: int, device: torch.device) -> None:
        self.table, self.vocab_size, self.device = table, vocab_size, device
        slots = table.num_slots + 1  # the last is nobody's
        self._floats = torch.tensor([[value] * slots for value in _FLOATS.values()], dtype=torch.float32).to(device)
        self._ints = torch.tensor([[value] * slots for value in _INTS.values()], dtype=torch.int64).to(device)
        self._columns: dict[str, Tensor] = dict(zip((*_FLOATS, *_INTS), (*self._floats, *self._ints)))  # [S+1] each
        self.bias: Tensor | None = None  # [S+1, V], made when first needed; -inf where a token is not allowed
        self.bad, self.stops = Bans(slots, device), Bans(slots, device)  # words, and ends that would come too early
        self.words = {table.null: Words([], [])}
        self._pins = device.type == "cuda"  # from other memory a copy waits for every round in flight
        self.picks = device.type == "cpu" and library() is not None  # the library can pick tokens
        self.kinds = {table.null: Kind(True, (), 0, True)}
        self.tempered = {table.null}  # slots whose request needs temperature and noise at most
        self._sampled: set[int] = set()  # slots whose request needs noise
        self._know(TEMPERED, SamplingParams(temperature=0.5), Words([], []))

    def _know(self, slot: int, params: SamplingParams, words: Words) -> None:
        """What the host asks."""
        from paceline.sampling.processors import kind_of  # which is written in terms of this state

        self.words[slot], self.kinds[slot] = words, kind_of(params)
        (self.tempered.add if self.kinds[slot].tempered else self.tempered.discard)(slot)
        (self._sampled.discard if params.greedy else self._sampled.add)(slot)

    def set(self, slot: int, params: SamplingParams, words: Words, seed: int, sample: int) -> None:
        self._know(slot, params, words)
        greedy = params.greedy  # then nothing after the penalties may touch its rows
        floats = (1.0, 1.0, 0.0) if greedy else (params.temperature, params.top_p, params.min_p)
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        given = torch.tensor([*floats, *penalties], dtype=torch.float32, pin_memory=self._pins)
        self._floats[:, slot].copy_(given, non_blocking=True)
        signed = seed - 2**64 if seed >= 2**63 else seed
        biased = bool(params.logit_bias) or params.allowed_token_ids is not None
        top_k, worded = 0 if greedy else max(params.top_k, 0), bool(words.bad)
        ints = [top_k, params.min_tokens, signed, sample, greedy, biased, worded]
        self._ints[:, slot].copy_(torch.tensor(ints, dtype=torch.int64, pin_memory=self._pins), non_blocking=True)
        if biased:
            self._set_bias(slot, params)
        if words.bad or params.min_tokens:
            self._set_bans(slot, words)

    def _set_bans(self, slot: int, words: Words) -> None:
        self.bad.set(slot, words.bad, self._pins)
        self.stops.set(slot, [[token] for token in words.stops], self._pins)

    @property
    def ban_shapes(self) -> tuple[torch.Size, ...]:
        """When they change the tables are others."""
        return self.bad.tensor.shape, self.stops.tensor.shape

    def _set_bias(self, slot: int, params: SamplingParams) -> None:
        if self.bias is None:
            shape = (self.table.num_slots + 1, self.vocab_size)
            self.bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
        row = torch.zeros(self.vocab_size, dtype=torch.float32, pin_memory=self._pins)
        if params.allowed_token_ids is not None:
            row.fill_(float("-inf"))
            row[list(params.allowed_token_ids)] = 0.0
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        self.bias[slot].copy_(row, non_blocking=True)

    def column(self, name: str, slots: Tensor) -> Tensor:
        return self._columns[name].index_select(0, slots)

    def keys(self, slots: Tensor) -> Keys:
        return Keys(self.column("seed", slots), self.column("sample", slots))

    def greedy(self, slots: Tensor) -> Tensor:
        return self.column("greedy", slots) != 0

    def picking(
        self,
        slots: Tensor,
        positions: Tensor,
        stream: int = noise.SAMPLE,
        extra: Tensor | None = None,
        weight: float = 1.0,
    ) -> Picking:
        """How tokens are picked from raw logits at positions [R] of slots [R], or chains from there on, where `picks`.
        Processed logits have had their temperature (`Picking.processed`). weight: of the noise."""
        temperature, greedy, seeds, samples = (
            self._columns[name] for name in ("temperature", "greedy", "seed", "sample")
        )
        rows = slots, temperature, greedy, seeds, samples, positions
        return Picking(*rows, stream, extra, noise.tables(self.device), weight)

    def keyed(
        self, stream: int = noise.SAMPLE, extra: Tensor | None = None, divided: bool = False, weight: float = 1.0
    ) -> Keyed:
        """The same for kernels that look up the slots themselves; divided: the logits have had their temperature."""
        seeds, samples, greedy = (self._columns[name] for name in ("seed", "sample", "greedy"))
        temperature = None if divided else self._columns["temperature"]
        return Keyed(seeds, samples, greedy, temperature, noise.tables(self.device), stream, extra, weight=weight)

    def any_sampled(self, slot_list: list[int]) -> bool:
        """Whether any of these slots needs noise at all."""
        return not self._sampled.isdisjoint(slot_list)
