"""A draft model that is loaded once for a whole measurement, whatever its draft length.

Every pass begins with a new drafter, since one that remembers answers must not have seen these before. A draft model
remembers none once its sequences have ended, and reading its weights again for each pass would take minutes. This
module knows draft models' configs and the drafter contract; it must not know how anything is measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.cache.kv import KVCache
from paceline.drafters.base import Context, Drafter, Observation, Target
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.tree import Proposal


def keep_loaded(configs: list[Any]) -> list[Any]:
    """The same drafters; if the only draft model among them occurs with several lengths or rounds, it stays loaded.

    Two different draft models are read anew each time instead: both at once may not fit beside the target.
    """
    drafting = [config for config in configs if isinstance(config, DraftModel)]
    if not drafting or any(replace(config, num_draft_tokens=1) != _first(drafting) for config in drafting):
        return configs
    longest = max(drafting, key=lambda config: config.num_draft_tokens)
    shared = _Shared(longest.create())
    return [Kept(shared, config) if isinstance(config, DraftModel) else config for config in configs]


def _first(configs: list[DraftModel]) -> DraftModel:
    return replace(configs[0], num_draft_tokens=1)


class _Shared:
    """The drafter that has the weights."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.attached = False


class Kept:
    """A draft model's config whose drafters all use one set of weights."""

    def __init__(self, shared: _Shared, config: DraftModel) -> None:
        self._shared, self._config = shared, config

    def create(self) -> KeptDrafter:
        return KeptDrafter(self._shared, self._config.num_draft_tokens)


class KeptDrafter:
    """Asks the shared drafter for at most `num_draft_tokens`: the engine gives no sequence a larger budget."""

    def __init__(self, shared: _Shared, num_draft_tokens: int) -> None:
        self._shared = shared
        drafter = shared.drafter
        self.name, self.taps, self.trees, self.on_device = drafter.name, drafter.taps, drafter.trees, drafter.on_device
        self.max_nodes = num_draft_tokens

    def attach(self, target: Target, cache: KVCache) -> None:
        if not self._shared.attached:
            self._shared.drafter.attach(target, cache)
            self._shared.attached = True

    def observe(self, seen: Observation) -> None:
        self._shared.drafter.observe(seen)

    def propose(self, context: Context) -> Proposal:
        return self._shared.drafter.propose(context)

    def forget(self, slots: list[int]) -> None:
        self._shared.drafter.forget(slots)
