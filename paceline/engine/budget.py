"""How many nodes each sequence may get in a round.

A budget sees the load and what earlier rounds cost; it answers a number and knows nothing of trees or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.engine.stats import EngineStats


@dataclass(frozen=True)
class Load:
    num_running: int
    num_waiting: int


class Budget(Protocol):
    def choose(self, load: Load, history: EngineStats) -> int:
        """The most nodes per sequence; 0 is plain decoding."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same; limits of length and of the single request are applied by the engine."""

    max_nodes: int

    def choose(self, load: Load, history: EngineStats) -> int:
        return self.max_nodes
