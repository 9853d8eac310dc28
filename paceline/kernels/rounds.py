"""What a set of kernels may do of a round beside the forward, each in one or two launches: the small work.

Types alone. Whoever has none of them (`Slots.rounds` is None) does the same in tensor operations, which say what is to
come out: every one of these gives the very same bits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Keyed(NamedTuple):
    """How a row of a slot picks its token: columns of the sampler's tables [S+1], and what they do not say."""

    seeds: Tensor
    samples: Tensor
    greedy: Tensor  # 0: with noise
    temperature: Tensor | None  # None: logits have been divided already
    tables: tuple[Tensor, Tensor]  # of logarithms
    stream: int
    extra: Tensor | None = None  # [R] the key's last part
    ids: Tensor | None = None  # [V'] the token of each logit; None: its own number


class Rounds(Protocol):
    """All on the device, shapes from shapes alone: what they do can be captured."""

    def best(self, values: Tensor) -> Tensor:
        """[R, V] → [R]: the likeliest; ties go to the lowest id; -1 where nothing is above -inf, or with a NaN."""
        ...

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, keyed: Keyed) -> Tensor:
        """The same of logits with temperature and noise, as the slots [R] have it, keyed by positions [R]."""
        ...
