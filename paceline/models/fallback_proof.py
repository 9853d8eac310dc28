"""What is measured of a module before the fallback trusts it: its cache layers, and that it computes the same on pages.

Nothing is known of the module by name here. It is run on a few tokens: whole and without a cache, then on pages, as a
tree, rolled back, and beside another sequence. A module with a state of its own, or one that looks ahead, shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from paceline.errors import CheckpointError, first_line
from paceline.kernels.ops import LayerCache, LayerSpec, Layout
from paceline.models.batch import Batch, places_of
from paceline.models.fallback import Fallback, SeenLayer

SIZE = 8  # lines of a page, one page a sequence
TREE = ((0, -1), (1, -1), (0, 2))  # nodes 0 and 1 under the root, node 2 under node 0


def measure(model: Fallback) -> list[LayerSpec]:
    """What each cache layer is made of, by one token's pass."""
    name, cache = type(model.module).__name__, Cache(layer_class_to_replicate=SeenLayer)
    device = model.embedding.data.device
    ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    try:
        model._run(ids, ids, cache, None)
    except Exception as error:
        raise CheckpointError(f"{name} cannot be run on pages: {first_line(error)}") from None
    counts = {len(layer.seen) for layer in cache.layers}
    if counts != {1}:
        raise CheckpointError(
            f"{name} does not store keys and values once in every cache layer, so it cannot be run on pages"
        )
    return [LayerSpec(layer.seen[0]) for layer in cache.layers]


@torch.no_grad()
def prove(model: Fallback) -> None:
    """Refuse a module that computes something else on pages than without them; find out whether it may pad."""
    name, run = type(model.module).__name__, _Runs(model)
    a, b, c, d, x, y, z = _tokens(model)
    whole = plain(model, [a, b, c])
    if not run.same(whole[:1], plain(model, [a])):
        raise CheckpointError(f"{name} lets a token see what comes behind it, so it cannot be decoded token by token")
    ok = run.same(run([a, b, x, c], [0, 1, 1, 2], [0, 0, 0, 0], TREE)[[0, 1, 3]], whole)
    ok &= run.same(run([x, y], [1, 2], [0, 0]), plain(model, [a, x, y])[1:])
    ok &= run.same(run([z], [0], [1]), plain(model, [z]))
    wanted = torch.stack([plain(model, [a, x, y, d])[-1], plain(model, [z, d])[-1]])
    model.pads = run.same(run([d, d], [3, 1], [0, 1]), wanted)
    if not ok or not (model.pads or run.same(run([d, d], [3, 1], [0, 1]), wanted)):
        raise CheckpointError(
            f"{name} computes something else once tokens were rolled back or stand in trees; "
            "only models whose layers keep nothing but keys and values can be run"
        )


def plain(model: Fallback, tokens: list[int]) -> Tensor:
    """The module itself, without a cache: logits [T, V]."""
    ids = torch.tensor([tokens], device=model.embedding.data.device)
    logits: Tensor = model.module(input_ids=ids, use_cache=False)[0]
    return logits[0].float()


class _Runs:
    """Rows of sequences 0 and 1 through the fallback; each row behind those with lower positions of its sequence."""

    def __init__(self, model: Fallback) -> None:
        self.model, self.caches = model, [_room(spec, model) for spec in model.specs]
        self.most = 1e-3 if model.embedding.data.dtype in (torch.float32, torch.float64) else 0.1

    def same(self, found: Tensor, wanted: Tensor) -> bool:
        """Within what rounding may do; NaN is not the same as anything."""
        return bool((found - wanted).abs().max() <= self.most * wanted.abs().max())

    def __call__(self, tokens: list[int], positions: list[int], slots: list[int], tree: Any = None) -> Tensor:
        device, count = self.model.embedding.data.device, len(tokens)
        place, slot = (torch.tensor(values, device=device) for values in (positions, slots))
        lines, path, base = place, None, place + 1
        if tree is not None:  # the first row is the root, the others its nodes in order
            path = torch.tensor([(-1,) * len(tree[0]), *tree], device=device)
            lines, base = torch.arange(count, device=device), torch.ones_like(place)
        table = torch.tensor([[1], [2], [0]], device=device)
        write = table[slot, 0] * SIZE + lines
        layout = Layout(slot, place, base, path, None, lines, write, table, SIZE, [])
        batch = Batch(torch.tensor(tokens, device=device), layout, places_of((), 0, 0, device), [])
        return self.model.logits(self.model.forward(batch, self.caches).final)


def _tokens(model: Fallback) -> list[int]:
    """A few, none of them near the ends of the vocabulary, where special ones stand, if it is large."""
    count = model.embedding.shape[0]
    return [count * part // 11 for part in range(3, 10)]


def _room(spec: LayerSpec, model: Fallback) -> LayerCache:
    device = model.embedding.data.device
    return tuple(torch.zeros(3 * SIZE, part.heads, part.width, dtype=part.dtype, device=device) for part in spec.parts)
