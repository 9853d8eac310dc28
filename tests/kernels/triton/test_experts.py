"""Experts in Triton: against float64 a row at a time, and a row's bits whoever shares its experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import experts as plain
from paceline.kernels.ops import Experts, Routing, Weight, activate

NUM, HIDDEN, INNER = 5, 40, 24


def make(device: torch.device, dtype: torch.dtype, whole: bool = False) -> Experts:
    generator = torch.Generator().manual_seed(1)

    def stack(rows: int, columns: int) -> Weight:
        made = torch.randn(rows, columns, generator=generator) / columns**0.5
        made = (made * 4).round() if whole else made
        return Weight(made.to(dtype).to(device), (rows, columns))

    return Experts(stack(NUM * 2 * INNER, HIDDEN), stack(NUM * HIDDEN, INNER), "relu", Routing(2, "softmax", True))


def given(
    device: torch.device, count: int, dtype: torch.dtype, experts: Experts, whole: bool = False
) -> tuple[Tensor, Any]:
    generator = torch.Generator().manual_seed(count)
    x, scores = torch.randn(count, HIDDEN, generator=generator), torch.randn(count, NUM, generator=generator)
    scores[:, 3] = -9  # nobody's choice
    x = x.round() if whole else x
    return x.to(dtype).to(device), plain.route(scores.to(device), experts.routing, None)


def by_hand(x: Tensor, chosen: Any, experts: Experts) -> Tensor:
    gate_up = experts.gate_up.data.double().view(NUM, 2 * INNER, HIDDEN)
    down = experts.down.data.double().view(NUM, HIDDEN, INNER)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for row in range(len(x)):
        for expert, share in zip(chosen.ids[row].tolist(), chosen.weights[row].double()):
            gate, up = (gate_up[expert] @ x[row].double()).chunk(2)
            total[row] += share * (down[expert] @ (activate(gate, experts.activation) * up))
    return total


@pytest.mark.parametrize(("count", "dtype"), [(1, torch.float32), (50, torch.float32), (9, torch.bfloat16)])
def test_rows_go_through_their_experts(device: torch.device, count: int, dtype: torch.dtype) -> None:
    from paceline.kernels.triton.experts import mix

    experts = make(device, dtype)
    x, chosen = given(device, count, dtype, experts)
    residual = torch.ones(count, HIDDEN + 8, dtype=dtype, device=device)[:, :HIDDEN]
    wanted = by_hand(x, chosen, experts)
    found = mix(x, chosen, experts)
    assert found.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 0.02
    assert (found.double() - wanted).abs().max() <= close * wanted.abs().max()
    assert (mix(x, chosen, experts, residual).double() - wanted - 1).abs().max() <= close * (1 + wanted.abs().max())
    assert mix(x[:0], plain.Chosen(chosen.ids[:0], chosen.weights[:0]), experts).shape == (0, HIDDEN)


def test_a_row_has_the_same_bits_whoever_shares_its_experts(device: torch.device) -> None:
    from paceline.kernels.triton.experts import mix

    experts = make(device, torch.bfloat16, whole=device.type == "cpu")  # whole: see `whole` in test_matmul
    x, chosen = given(device, 45, torch.bfloat16, experts, whole=device.type == "cpu")
    together = mix(x, chosen, experts)
    for part in (slice(0, 1), slice(7, 9), slice(11, 45)):
        alone = mix(x[part], plain.Chosen(chosen.ids[part], chosen.weights[part]), experts)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize(("count", "chosen", "num"), [(1, 2, 9), (40, 3, 4), (37, 1, 2)])
def test_every_pair_stands_in_one_slot_of_its_expert(device: torch.device, count: int, chosen: int, num: int) -> None:
    from paceline.kernels.triton.experts import _plan

    generator = torch.Generator().manual_seed(count)
    ids = torch.rand(count, num, generator=generator).argsort(1)[:, :chosen].sort(1).values.to(device)
    slots = _plan(ids, num)
    pairs = ids.flatten().cpu()
    assert torch.equal(slots.order.cpu().long(), torch.argsort(pairs, stable=True))
    seen = []
    for expert, first, size in zip(slots.expert.tolist(), slots.first.tolist(), slots.count.tolist()):
        assert 0 <= size <= slots.height
        places = slots.order[first : first + size].cpu().long()
        assert (pairs[places] == expert).all()
        seen += range(first, first + size)
    assert sorted(seen) == list(range(count * chosen))
