"""How many nodes each sequence may get in a round.

A budget sees how many sequences run and what earlier rounds cost. It answers a number, and knows no trees or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.engine.stats import EngineStats


class Budget(Protocol):
    def choose(self, num_running: int, history: EngineStats) -> int:
        """The most nodes per sequence; 0 is plain decoding."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """Always the same; limits of length and of the single request are applied by the engine."""

    max_nodes: int

    def choose(self, num_running: int, history: EngineStats) -> int:
        return self.max_nodes
