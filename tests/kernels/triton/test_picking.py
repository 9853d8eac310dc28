"""Picks in Triton: temperature, noise and the likeliest, to the bit what tensor operations make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels.rounds import Keyed
from paceline.sampling import noise
from paceline.sampling.noise import Keys
from paceline.sampling.verify import argmax

INF = float("inf")
# by slot: seeds, samples, greedy, temperatures
SLOTS = torch.tensor([[3, 0, 0], [1 << 62, 1, 0], [-5, 2, 0], [0, 0, 1], [-(1 << 63), 7, 0]])
WARMTH = torch.tensor([0.8, 1.0, 2.5, 1.0, 0.1])
PLACES = torch.tensor([4, 0, 3, 2, 1, 0])  # the slot of each row
POSITIONS = torch.tensor([0, 7, 100_000, 1, 5, 8])


def by_tensors(logits: Tensor, stream: int, extra: Tensor | None, divided: bool = False, weight: float = 1.0) -> Tensor:
    """On the CPU, with none of the library's noise."""
    seeds, samples, greedy = SLOTS[PLACES].unbind(1)
    values = noise._gumbel(Keys(seeds, samples), POSITIONS + 1, stream, logits.shape[1], extra)
    processed = logits if divided else logits / WARMTH[PLACES, None]
    return argmax(torch.where(greedy[:, None] != 0, processed, processed + weight * values))


def keyed(device: torch.device, stream: int, extra: Tensor | None, ids: Tensor | None = None) -> Keyed:
    columns = SLOTS.to(device).unbind(1)
    others = [None if tensor is None else tensor.to(device) for tensor in (extra, ids)]
    return Keyed(*columns, WARMTH.to(device), noise.tables(device), stream, *others)


def made(vocabulary: int, spread: float) -> Tensor:
    logits = spread * torch.randn(len(PLACES), vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    return logits.round() if spread > 10 else logits  # ties


@pytest.mark.parametrize(
    ("vocabulary", "spread", "stream", "extra"),
    [
        (1, 1.0, noise.SAMPLE, None),
        (1100, 0.0, noise.SAMPLE, None),  # two programs a row
        (60, 0.0, noise.DRAFT, torch.arange(-2, 4) * 10**10),
        (60, 40.0, noise.ACCEPT, None),
    ],
)
def test_samples_are_those_of_tensor_operations(
    vocabulary: int, spread: float, stream: int, extra: Tensor | None, device: torch.device
) -> None:
    from paceline.kernels.triton.picking import sample

    logits, how = made(vocabulary, spread), keyed(device, stream, extra)
    wide = torch.nn.functional.pad(logits, (0, 3), value=9e9).to(device)[:, :vocabulary]  # rows lie apart
    where = PLACES.to(device), POSITIONS.to(device)
    assert sample(wide, *where, how).tolist() == by_tensors(logits, stream, extra).tolist()
    found = sample(wide, *where, how._replace(temperature=None))
    assert found.tolist() == by_tensors(logits, stream, extra, divided=True).tolist()
    for weight in (0.0, 0.7):
        found = sample(wide, *where, how._replace(weight=weight))
        assert found.tolist() == by_tensors(logits, stream, extra, weight=weight).tolist()


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("spread", "weight"), [(0.3, 1.0), (3.0, 1.0), (3.0, 0.7), (1e4, 1.0), (1e30, 1.0)])
def test_exact_noise_is_made_for_whatever_may_win(
    spread: float, weight: float, many: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits among which one token nearly wins by itself, or many are equals, or some are no numbers. Programs of many
    rows are larger."""
    from paceline.kernels.triton import picking

    if many:
        monkeypatch.setattr(picking, "BESIDE", 0)
    sample = picking.sample
    seeds, samples, _ = SLOTS[PLACES].unbind(1)
    values = noise._gumbel(Keys(seeds, samples), POSITIONS + 1, noise.SAMPLE, 3000)
    logits = made(3000, spread)
    logits[1] = -(WARMTH[PLACES[1]] * weight * values[1])  # what noise takes away: all are equals but for rounding
    logits[4, 5::7] = -INF
    logits[4, 1024:2048] = -INF  # all of a smaller program's
    logits[5, 1500], logits[5, 2900] = INF, INF
    wrong = logits.clone()
    wrong[:, 2500] = float("nan")
    wrong[4] = -INF
    where = PLACES.to(device), POSITIONS.to(device)
    for given in (logits, wrong):
        how = keyed(device, noise.SAMPLE, None)._replace(weight=weight)
        assert picking.sample_keys(given.to(device), *where, how).shape == (len(PLACES), 1 if many else 3)
        found = sample(given.to(device), *where, how).tolist()
        assert found == by_tensors(given, noise.SAMPLE, None, weight=weight).tolist()
    assert found == [-1] * len(PLACES)


def test_of_two_that_nearly_tie_no_third_wins(device: torch.device) -> None:
    """Noise is made exactly for those two; that of all others is not, and must not count."""
    from paceline.kernels.triton.picking import sample

    seeds, samples, greedy = SLOTS[PLACES].unbind(1)
    values = noise._gumbel(Keys(seeds, samples), POSITIONS + 1, noise.SAMPLE, 1500)
    logits = made(1500, 1.0) - 40.0
    for row, (heat, own) in enumerate(zip(WARMTH[PLACES].tolist(), values)):
        first, second = 3 + row, 900 - row
        logits[row, first], logits[row, second] = -heat * own[first], -heat * own[second] + 1e-5 * (row % 2)
    found = sample(logits.to(device), PLACES.to(device), POSITIONS.to(device), keyed(device, noise.SAMPLE, None))
    wanted = by_tensors(logits, noise.SAMPLE, None).tolist()
    assert found.tolist() == wanted
    sampled = [row for row, alone in enumerate(greedy.tolist()) if not alone]
    assert len({wanted[row] == 3 + row for row in sampled}) == 2, "now the one, now the other"


def test_many_ordinary_samples_are_those_of_tensor_operations(device: torch.device) -> None:
    from paceline.kernels.triton.picking import sample

    rows = 80
    logits = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0))
    slots, positions = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    seeds, samples, _ = SLOTS[slots].unbind(1)
    values = noise._gumbel(Keys(seeds, samples), positions + 1, noise.SAMPLE, 4096)
    wanted = argmax(logits / WARMTH[0] + values)
    found = sample(logits.to(device), slots.to(device), positions.to(device), keyed(device, noise.SAMPLE, None))
    assert found.tolist() == wanted.tolist() and len(set(wanted.tolist())) > 70


def test_rough_noise_is_off_by_less_than_is_said(device: torch.device) -> None:
    from paceline.kernels.triton.device import launching
    from paceline.kernels.triton.noise import _ROOM
    from tests.kernels.triton.noises import both_kinds

    near = torch.tensor([0, 1, 2, 3, 2**25, 2**26 - 1, 2**26, 2**26 + 1, 2**31 - 1])
    edges = torch.cat([near, 2**32 - 1 - near])  # where it is least and greatest, and where its series ends
    bits = torch.cat([edges, torch.randint(2**32, (4096 - len(edges),), generator=torch.Generator().manual_seed(0))])
    out = torch.empty(2, len(bits), device=device)
    given = bits.to(torch.uint32).to(device)
    both_kinds[(1,)](given, out, *noise.tables(device), SIZE=len(bits), **launching(4))
    exact, rough = out.cpu()
    assert exact[0] < -3.1 and exact[len(near)] > 22.8
    assert exact.equal((-noise._log(-noise._log(noise._unit(bits)))).float())
    assert (rough - exact).abs().max() < 5e-5
    assert _ROOM.value >= 20 * 5e-5


def test_a_drafter_that_knows_some_tokens_samples_with_the_noise_of_those(device: torch.device) -> None:
    from paceline.kernels.triton.picking import sample

    known = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:100]
    logits = made(100, 40.0)
    wide = torch.full((len(logits), 300), -INF).index_copy_(1, known, logits)
    found = sample(logits.to(device), PLACES.to(device), POSITIONS.to(device), keyed(device, noise.SAMPLE, None, known))
    assert found.tolist() == by_tensors(wide, noise.SAMPLE, None).tolist()


def test_of_equals_the_lowest_is_best_and_of_nothing_none(device: torch.device) -> None:
    from paceline.kernels.triton.picking import best

    values = torch.full((8, 2300), -1.0)
    values[0, [1030, 1029, 2000]] = 3.0
    values[1] = -INF
    values[2, 2299] = float("nan")
    values[3, [5, 1500]] = INF
    values[4] = -INF
    values[4, 2298] = -3e38
    values[5, 7], values[5, 3] = 0.0, -0.0  # equals
    values[6, 3], values[6, 7] = 0.0, -0.0
    values[7, 0], values[7, 9] = float("nan"), INF
    found = best(values.to(device)).tolist()
    assert found == argmax(values).tolist() == [1029, -1, -1, 5, 2298, 3, 3, -1]


def test_a_row_is_picked_alike_alone_and_among_others(device: torch.device) -> None:
    from paceline.kernels.triton.picking import sample

    logits = made(90, 1.0).to(device)
    where = PLACES.to(device), POSITIONS.to(device)
    together = sample(logits, *where, keyed(device, noise.SAMPLE, None)).tolist()
    some = torch.tensor([5, 0], device=device)
    assert sample(logits[some], *where, keyed(device, noise.SAMPLE, None)._replace(rows=some)).tolist() == [
        together[5],
        together[0],
    ]
    for row in (0, 3, 5):
        own = sample(logits[row, None], *(part[row, None] for part in where), keyed(device, noise.SAMPLE, None))
        assert own.tolist() == [together[row]]


@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_perturbed_logits_are_those_of_tensor_operations(weight: float, device: torch.device) -> None:
    from paceline.kernels.triton.picking import perturb

    logits = made(90, 1.0)
    seeds, samples, greedy = SLOTS[PLACES].unbind(1)
    values = noise._gumbel(Keys(seeds, samples), POSITIONS + 1, noise.SAMPLE, 90)
    expected = torch.where(greedy[:, None] != 0, logits, logits / WARMTH[PLACES, None] + weight * values)
    how = keyed(device, noise.SAMPLE, None)._replace(weight=weight)
    found = perturb(logits.to(device), PLACES.to(device), POSITIONS.to(device), how)
    assert found.cpu().equal(expected)


def test_keys_that_nobody_left_name_nothing(device: torch.device) -> None:
    """Before a start rounds are gone through without kernels that are missing, and what is there reads zeros."""
    from paceline.kernels.triton import picking

    keys = torch.zeros(2, 3, dtype=torch.int64, device=device)
    assert picking.decide(keys).tolist() == [-1, -1]


@pytest.mark.parametrize("weight", [1.0, 0.7])
@pytest.mark.parametrize("few", [True, False])
def test_several_are_found_among_few_candidates_and_among_many(
    few: bool, weight: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import picking

    put_together, leave, met = picking.put_together, picking.leave, list[str]()

    def watch(name: str, function: Any) -> None:
        if device.type == "cpu":  # no compiler asks for the function itself
            monkeypatch.setattr(picking, name, lambda *given: (met.append(name), function(*given))[1])

    watch("put_together", put_together)
    watch("leave", leave)
    if not few:
        monkeypatch.setattr(picking, "CANDIDATES", 1)
    logits, where = made(9000, 9.0).to(device), (PLACES.to(device), POSITIONS.to(device))
    how = keyed(device, 0, None)._replace(weight=weight)
    for count in (2, 5, 8):
        keys = picking.sample_keys(logits, *where, how, count)
        truly = picking.perturb(logits, *where, how).topk(count)
        found = keys.topk(count).values
        assert (2**31 - 1 - (found & 0xFFFFFFFF)).equal(truly.indices)
        best = picking.best_keys(logits, count).topk(count).values
        assert (2**31 - 1 - (best & 0xFFFFFFFF)).equal(logits.topk(count).indices)
    assert device.type != "cpu" or met.count("put_together" if few else "leave") > len(met) // 2


def test_keys_name_as_many_as_are_asked_for_the_best_first(device: torch.device) -> None:
    """Of equals the lowest; where fewer are above -inf, none; and of a NaN none, but the others behind it."""
    from paceline.kernels.triton.picking import best_keys, decide, perturb, sample_keys

    def named(keys: Tensor, count: int) -> list[list[int]]:
        found = []
        for _ in range(count):
            found.append(decide(keys).tolist())
            keys = torch.where(keys == keys.max(dim=1, keepdim=True).values, -(2**63) + 1, keys)
        return torch.tensor(found).t().tolist()

    values = torch.full((5, 2100), -3.0)  # several programs a row
    values[0, [7, 1500, 2099]], values[1, [1023, 1024]] = torch.tensor([2.0, 2.0, 5.0]), torch.tensor([-0.0, 0.0])
    values[2], values[2, 9], values[3, 1200], values[3, 4] = -INF, 0.0, torch.nan, 1.0
    values[4, [3, 9]], values[4, [20, 30]] = torch.nan, torch.tensor([1.0, 2.0])  # which are one
    found = named(best_keys(values.to(device), 3), 3)
    assert found == [[2099, 7, 1500], [1023, 1024, 0], [9, -1, -1], [-1, 4, 0], [-1, 30, 20]]
    assert named(best_keys(values[:2, :2].to(device), 3), 3) == [[0, 1, -1]] * 2, "a vocabulary of two"
    assert named(best_keys(values[4:, :31].to(device), 3), 3) == [[-1, 30, 20]], "few, so compared with one another"
    logits, where = made(1100, 9.0).to(device), (PLACES.to(device), POSITIONS.to(device))
    how = keyed(device, noise.SAMPLE, None)
    keys = sample_keys(logits, *where, how, 3)
    truly = best_keys(perturb(logits, *where, how), 3)
    assert keys.topk(3).values.equal(truly.topk(3).values), "with exact noise"
    sampled = named(keys, 3)
    for child in range(3):
        assert [row[child] for row in sampled] == decide(sample_keys(logits, *where, how)).tolist()
        logits[range(len(sampled)), [row[child] for row in sampled]] = -INF


@pytest.mark.parametrize(("weight", "many"), [(1.0, False), (0.7, True)])
def test_a_rows_parts_say_how_likely_all_of_their_tokens_are(
    weight: float, many: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many rows are larger."""
    from paceline.kernels.triton import picking
    from paceline.kernels.triton.picking import perturb, sample_keys, sums_of

    if many:
        monkeypatch.setattr(picking, "BESIDE", 0)
    logits, where = made(5000, 1.0).to(device), (PLACES.to(device), POSITIONS.to(device))
    how = keyed(device, noise.SAMPLE, None)._replace(weight=weight)
    sums = sums_of(logits)
    sample_keys(logits, *where, how, 2, sums)
    parts = perturb(logits, *where, how).split(picking.LARGE_BLOCK if many else picking.BLOCK, dim=1)
    assert len(parts) == sums.shape[1] == (2 if many else 5)
    for part, added in zip(parts, sums.unbind(1)):
        assert torch.allclose(part.max(dim=1).values + added.log(), part.logsumexp(dim=1), atol=1e-3)
