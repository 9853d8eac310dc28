"""Drafters that take turns: one that is held while others run, and a model that is loaded once for a measurement.

Every pass begins with a new drafter, since one that remembers answers must not have seen these before. A drafter with
weights remembers none once its sequences have ended, and reading them again for each pass would take minutes. This
module knows configs with a model and how a drafter is attached; it must not know how anything is measured.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from paceline.cache.kv import KVCache
from paceline.drafters.base import Drafter, Needs, Target
from paceline.drafters.table import LENGTH


def keep_loaded(configs: list[Any]) -> list[Any]:
    """The same drafters; if the only model among them occurs with several lengths or rounds, it stays loaded.

    Two different models are read anew each time instead: both at once may not fit beside the target. So is one whose
    length is said here and left to its files there: nobody knows yet which is the longest.
    """
    drafting = [config for config in configs if _has_model(config)]
    if not drafting or any(_at_length_one(config) != _at_length_one(drafting[0]) for config in drafting):
        return configs
    lengths = {config.num_draft_tokens for config in drafting}
    if None in lengths and len(lengths) > 1:
        return configs
    drafter, done = max(drafting, key=lambda config: config.num_draft_tokens or 0).create(), set[str]()
    return [Kept(drafter, config.num_draft_tokens, done) if _has_model(config) else config for config in configs]


def has_weights(config: Any) -> bool:
    """Whether a drafter made from it reads a model."""
    return any(map(_has_model, (config, *getattr(config, "configs", ()))))


def hold(config: Any) -> Any:
    """The same drafter each time it is asked for, so that it can take turns with others and know what it knew."""
    if config is None or isinstance(config, Kept):
        return config
    drafter = config.create()
    return Kept(drafter, drafter.max_nodes, set())


def _has_model(config: Any) -> bool:
    """A config that may name a model reads one: where it names none, what it needs lies with the target (MTP)."""
    return is_dataclass(config) and any(one.name == "model" for one in fields(config))


def _at_length_one(config: Any) -> Any:
    return replace(config, **{LENGTH: 1})


class Kept:
    """One draft length of the drafter that has the weights: a config, and the drafter it creates.

    The weights are read once for all lengths (`done` is theirs together). The engine gives no sequence a larger budget.
    num_draft_tokens: None where the drafter's files say it, once they are read.
    """

    def __init__(self, drafter: Drafter, num_draft_tokens: int | None, done: set[str]) -> None:
        self._drafter, self._done = drafter, done
        if num_draft_tokens is not None:
            self.max_nodes = num_draft_tokens

    def create(self) -> Any:
        return self

    def plan(self, target: Target) -> Needs:
        return self._drafter.plan(target) if self._is_first("plan") else Needs()  # all it needs it has

    def attach(self, target: Target, cache: KVCache) -> None:
        if self._is_first("attach"):
            self._drafter.attach(target, cache)

    def _is_first(self, step: str) -> bool:
        new = step not in self._done
        self._done.add(step)
        return new

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)  # all else is the drafter's own
