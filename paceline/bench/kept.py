"""A drafter's model that is loaded once for a whole measurement, whatever its draft length.

Every pass begins with a new drafter, since one that remembers answers must not have seen these before. A drafter with
weights remembers none once its sequences have ended, and reading them again for each pass would take minutes. This
module knows configs with a model and how a drafter is attached; it must not know how anything is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cache.kv import KVCache
from paceline.drafters.base import Drafter, Needs, Target
from paceline.drafters.table import LENGTH


def keep_loaded(configs: list[Any]) -> list[Any]:
    """The same drafters; if the only model among them occurs with several lengths or rounds, it stays loaded.

    Two different models are read anew each time instead: both at once may not fit beside the target.
    """
    drafting = [config for config in configs if _has_model(config)]
    if not drafting or any(_at_length_one(config) != _at_length_one(drafting[0]) for config in drafting):
        return configs
    loaded = Loaded(max(drafting, key=lambda config: int(config.num_draft_tokens)).create())
    return [Kept(loaded, config.num_draft_tokens) if _has_model(config) else config for config in configs]


def _has_model(config: Any) -> bool:
    return getattr(config, "model", None) is not None


def _at_length_one(config: Any) -> Any:
    return replace(config, **{LENGTH: 1})


class Loaded:
    """The drafter that has the weights, which it reads once."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self._attached = drafter, False
        self._needs: Needs | None = None

    def plan(self, target: Target) -> Needs:
        if self._needs is None:
            self._needs = self.drafter.plan(target)
            return self._needs
        return Needs()  # all it needs it has

    def attach(self, target: Target, cache: KVCache) -> None:
        if not self._attached:
            self.drafter.attach(target, cache)
            self._attached = True


class Kept:
    """One draft length of it: a config, and the drafter it creates. The engine gives no sequence a larger budget."""

    def __init__(self, loaded: Loaded, num_draft_tokens: int) -> None:
        self._loaded, self.max_nodes = loaded, num_draft_tokens
        self.plan, self.attach = loaded.plan, loaded.attach

    def create(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded.drafter, name)  # all else is the drafter's own
