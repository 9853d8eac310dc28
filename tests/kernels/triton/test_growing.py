"""Trees that grow on the device are those that grow by hand, one path after another."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.chain import Drafts, Feeding, Growing, Sprout
from paceline.kernels.ops import Hidden, Inputs, Weight

STATES, WIDTH_OF_STATE, BEGIN = 89, 5, 11


class Made:
    """A network whose states are numbers that follow from the path, and a head that has a row of logits for each."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_of = 2 * torch.randn(STATES, vocabulary, generator=generator)
        self.fed: list[Inputs] = []

    @staticmethod
    def after(state: int, token: int) -> int:
        return (31 * state + 7 * token + 5) % STATES

    def logits(self, final: Tensor, head: Weight) -> Tensor:
        return self.logits_of.to(final.device)[final[:, 0].long()]

    def run(self, network: Any, inputs: Inputs, caches: Any, taps: Any, head: Any) -> Hidden:
        assert inputs.ids is not None
        self.fed.append(inputs)
        before = inputs.named["states"][:, 0].long()
        state = ((31 * before + 7 * inputs.ids + 5) % STATES).float()[:, None].expand(-1, WIDTH_OF_STATE)
        return Hidden(state.contiguous(), state.contiguous(), self.logits(state, head.weight))


def grow(
    made: Made,
    form: Growing,
    most: list[int],
    ids: Tensor | None,
    device: torch.device,
    longest: int = 99,
    first: Tensor | None = None,
) -> Drafts:
    from paceline.kernels.triton import growing

    batch = len(most)
    starts = torch.arange(BEGIN, BEGIN + batch, device=device)
    pages = torch.arange(6 * (batch + 1), device=device).view(batch + 1, 6)
    slots = torch.arange(batch, device=device).flip(0)
    feeding = Feeding(slots, starts, torch.tensor(most, device=device), first, pages, 8)
    states = torch.arange(batch, device=device).float()[:, None].expand(-1, WIDTH_OF_STATE).contiguous()
    head = Weight(torch.empty(0), made.logits_of.shape)
    nothing: Any = SimpleNamespace()
    return growing.draw(made, Sprout(nothing, head, feeding, states, states, ("states", 1), longest, ids), form, ())  # type: ignore[arg-type]


def by_hand(made: Made, form: Growing, most: int, state: int, ids: list[int] | None) -> list[tuple[int, ...]]:
    """The paths of the tree's nodes, the likeliest first."""
    pool: list[tuple[float, tuple[int, ...], int]] = []  # a path's chance, the path, the state behind it
    rows, fed = [(0.0, (), state)], 0
    for _ in range(form.levels):
        level = []
        for above, path, before in rows:
            logits = made.logits_of[before].double()
            if logits.isnan().any():
                continue
            own = torch.log_softmax(logits, 0)
            for place in torch.sort(logits, descending=True, stable=True).indices[: form.children].tolist():
                token = place if ids is None else ids[place]
                if own[place] > -math.inf:
                    level.append((above + float(own[place]), (*path, token), made.after(before, token)))
        pool += level
        rows = sorted(level, key=lambda item: -item[0])[: form.width][: max(0, most - 1 - fed)]
        fed += form.width
    best = sorted(pool, key=lambda item: -item[0])[: min(most, form.nodes)]
    return [path for _, path, _ in best]


def paths_of(drafts: Drafts, row: int) -> list[tuple[int, ...]]:
    assert drafts.parents is not None
    tokens, parents, count = drafts.tokens[row].tolist(), drafts.parents[row].tolist(), int(drafts.counts[row])
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens[:count], parents[:count]):
        assert -1 <= parent < len(found), "parents stand before their children"
        found.append(((*found[parent], token)) if parent >= 0 else (token,))
    assert parents[count:] == [-2] * (len(parents) - count) and tokens[count:] == [0] * (len(parents) - count)
    return found


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("vocabulary", "form", "most"),
    [
        (40, Growing(3, 4, 5, 13), [13, 0, 6, 99]),
        (2500, Growing(4, 3, 3, 10), [10, 4, 1]),  # several parts
        (3, Growing(3, 2, 2, 9), [9, 2]),  # hardly any tokens
        (30, Growing(1, 1, 4, 3), [3, 1, 0]),  # the first level alone
        (64, Growing(5, 1, 1, 5), [5, 3]),  # a chain
        (50, Growing(2, 10, 10, 60), [60, 33]),  # a size beside powers of two
        (2500, Growing(2, 1, 1, 2), [2, 1]),  # a child each, of several parts
    ],
)
def test_a_grown_tree_is_the_one_that_grows_by_hand(
    vocabulary: int, form: Growing, most: list[int], many: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many rows parts are larger."""
    if many:
        from paceline.kernels.triton import picking

        monkeypatch.setattr(picking, "BESIDE", 0)
    made = Made(vocabulary, seed=form.nodes)
    drafts = grow(made, form, most, None, device)
    assert drafts.tokens.shape == (len(most), form.nodes) and drafts.depth == form.levels
    for row, limit in enumerate(most):
        assert paths_of(drafts, row) == by_hand(made, form, limit, row, None), row
    assert len(made.fed) == form.levels - 1


def test_tokens_are_named_by_the_targets_ids(device: torch.device) -> None:
    made, form = Made(20, seed=3), Growing(3, 2, 3, 8)
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:20]
    drafts = grow(made, form, [8, 5], ids.to(device), device)
    for row, limit in enumerate((8, 5)):
        assert paths_of(drafts, row) == by_hand(made, form, limit, row, ids.tolist())


def test_what_has_no_chance_is_not_drafted(device: torch.device) -> None:
    made, form = Made(6, seed=4), Growing(3, 3, 4, 20)
    made.logits_of[0, 2:] = -math.inf  # the first sequence has two children
    made.logits_of[1, 3] = math.nan  # the second none
    made.logits_of[2] = -math.inf  # nor has the third
    best = int(made.logits_of[3].argmax())
    made.logits_of[made.after(3, best), 0] = math.nan  # the best of the fourth's gets none
    drafts = grow(made, form, [20] * 4, None, device)
    found = [paths_of(drafts, row) for row in range(4)]
    assert found == [by_hand(made, form, 20, row, None) for row in range(4)]
    assert [len(path) for path in found[0]].count(1) == 2 and found[1] == found[2] == []
    assert found[3][0] == (best,) and not any(path[0] == best and len(path) > 1 for path in found[3])


def test_of_equals_the_first_are_taken_and_parents_stay_before_children(device: torch.device) -> None:
    made, form = Made(8, seed=5), Growing(3, 2, 2, 6)
    made.logits_of[:] = -1e4
    made.logits_of[:, 3] = 0.0  # certain: children score as their parents do
    [found] = [paths_of(grow(made, form, [6], None, device), 0)]
    assert found[:3] == [(3,), (3, 3), (3, 3, 3)]
    made.logits_of[:] = 0.0  # all alike
    assert paths_of(grow(made, form, [6], None, device), 0)[:2] == [(0,), (1,)]
    made.logits_of[:, 2:] = -math.inf  # fewer than a node may have
    assert paths_of(grow(made, Growing(1, 1, 3, 3), [3], None, device), 0) == [(0,), (1,)]


@pytest.mark.parametrize("longest", [99, BEGIN + 2])
def test_rows_that_are_fed_know_their_places_and_ancestors(longest: int, device: torch.device) -> None:
    """Beyond the last position a text may have, all are at it."""
    made, form, most = Made(30, seed=6), Growing(3, 3, 3, 9), [9, 5, 1]
    grow(made, form, most, None, device, longest)
    first, second = made.fed
    for level, inputs in enumerate((first, second), 1):
        layout = inputs.layout
        assert layout is not None and layout.path is not None and layout.path.shape == (9, level)
        real = (layout.slots != 3).view(3, 3)
        lines = torch.arange(3 * (level - 1), 3 * level, device=device)
        assert real.tolist() == (lines < torch.tensor(most, device=device)[:, None] - 1).tolist()
        starts = torch.arange(BEGIN, BEGIN + 3, device=device)[:, None]
        assert layout.lines is not None
        assert layout.lines.view(3, 3).tolist() == torch.where(real, starts + lines, 0).tolist()
        positions = (starts + level - 1).clamp(max=longest - 1)
        assert layout.positions.view(3, 3).tolist() == torch.where(real, positions, 0).tolist()
        assert layout.path.view(3, 3, level)[:, :, -1].tolist() == torch.where(real, lines, -1).tolist()
    assert first.ids is not None and second.ids is not None and second.layout is not None
    above = second.layout.path[:, 0].view(3, 3)  # type: ignore[index]
    for row, place in (second.layout.slots != 3).view(3, 3).nonzero().tolist():
        grown = made.after(row, int(first.ids.view(3, 3)[row, int(above[row, place])]))
        assert int(second.named["states"].view(3, 3, -1)[row, place, 0]) == grown, "its parent's state"


def test_a_seat_that_nobody_was_chosen_for_is_fed_nobodys_row(device: torch.device) -> None:
    """There is room for it, but too few tokens have a chance."""
    made, form = Made(30, seed=7), Growing(2, 3, 3, 9)
    made.logits_of[0, 1:] = -math.inf  # the first sequence's tree begins with a single node
    grow(made, form, [9, 9], None, device, first=torch.tensor([2, 3, 7], device=device))
    [inputs] = made.fed
    layout = inputs.layout
    assert layout is not None and layout.lines is not None and layout.path is not None and inputs.ids is not None
    own = [
        layout.slots,
        layout.positions,
        layout.tree_base,
        layout.lines,
        layout.write,
        layout.first,
        layout.path[:, 0],
    ]
    fields = torch.stack([inputs.ids, *own], 1).view(2, 3, 8)  # type: ignore[arg-type]
    slot, page = 1, 6  # of the first sequence, whose page after 8 positions is its second
    assert fields[0].tolist() == [[0, slot, BEGIN, BEGIN, BEGIN, (page + 1) * 8 + BEGIN % 8, 3, 0]] + 2 * [
        [0, 2, 0, 1, 0, 0, 0, -1]
    ]
    assert fields[1, :, 1].tolist() == [0, 0, 0] and fields[1, :, 6].tolist() == [2, 2, 2]
