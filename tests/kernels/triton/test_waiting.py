"""Values that wait until somebody uses them: whoever that is, a row's bits are the same, and close to PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.kernels.eager import EagerOps
from paceline.kernels.ops import FINAL, Forward, Head, Hidden, Inputs, Weight
from tests.kernels.triton.products import rows_of

HIDDEN, WIDE, VOCABULARY = 48, 40, 97
Describe = Callable[["Network", Forward], Any]


class Network:
    """Weights, and what is done with them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, body: Describe) -> None:
        def weight(rows: int, columns: int, seed: int) -> Weight:
            return Weight(rows_of(device, rows, columns, seed=seed, dtype=dtype) * columns**-0.5, (rows, columns))

        self.table, self.square = weight(50, HIDDEN, 1), weight(HIDDEN, HIDDEN, 2)
        self.up, self.down, self.head = (
            weight(2 * WIDE, HIDDEN, 3),
            weight(HIDDEN, WIDE, 4),
            weight(VOCABULARY, HIDDEN, 5),
        )
        self.norms = [1 + 0.1 * rows_of(device, HIDDEN, seed=seed, dtype=dtype) for seed in (6, 7, 8)]
        self.body = body

    def describe(self, f: Forward) -> Any:
        return self.body(self, f)

    def norm(self, f: Forward, x: Any, number: int) -> Any:
        return f.rms_norm(x, self.norms[number], 1e-5)

    def through(self, f: Forward, x: Any) -> Any:
        return f.linear(f.gated(f.linear(x, self.up, None), "silu"), self.down, None)


def usual(net: Network, f: Forward) -> Any:
    """As a layer is: what a product leaves is normed, and tapped before that."""
    x = f.embed(net.table)
    x = f.add(x, f.linear(net.norm(f, x, 0), net.square, None))
    f.tap(1, x)
    x = f.add(x, net.through(f, net.norm(f, x, 1)))
    f.tap(2, x)
    return net.norm(f, x, 2)


def twice(net: Network, f: Forward) -> Any:
    """One sum under two norms, each read by two products; and what was normed already is normed again."""
    x = f.embed(net.table)
    x = f.add(f.linear(x, net.square, None), x)
    one, other = net.norm(f, x, 0), net.norm(f, x, 1)
    y = f.add(net.through(f, one), f.linear(other, net.square, None))
    y = f.add(y, f.linear(one, net.square, None))
    y = f.add(y, f.add(x, net.through(f, other)))
    f.tap(1, y)
    return net.norm(f, f.add(y, y), 2)


def bare(net: Network, f: Forward) -> Any:
    """No norm at the end, and a sum that is the result."""
    x = f.embed(net.table)
    f.tap(1, x)
    return f.add(x, f.linear(net.norm(f, x, 0), net.square, None))


@pytest.fixture
def run(device: torch.device) -> Callable[..., Hidden]:
    from paceline.kernels.triton.ops import TritonOps

    def ran(net: Network, ids: torch.Tensor, taps: tuple[int, ...] = (), eager: bool = False, **head: Any) -> Hidden:
        ops: Any = EagerOps() if eager else TritonOps(device)
        asked = Head(net.head, **{"rows": None, **head})
        return ops.run(net, Inputs(ids.to(device), None), (), taps, asked)  # type: ignore[no-any-return]

    return ran


@pytest.mark.parametrize("body", [usual, twice, bare])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_company_nor_who_asks_for_what_changes_a_rows_bits(
    device: torch.device, run: Any, dtype: torch.dtype, body: Describe
) -> None:
    net, ids = Network(device, dtype, body), torch.arange(20) % 7
    whole = run(net, ids, (1,))
    close = run(net, ids, (1,), eager=True)
    limit = 1e-4 if dtype == torch.float32 else 0.15
    assert (whole.logits - close.logits).abs().max() < limit and whole.logits.std() > 0.3
    assert (whole.tapped.float() - close.tapped.float()).abs().max() < limit
    picked = torch.tensor([3, 0, 19], device=device)
    for part in (slice(0, 1), slice(5, 18)):
        some = run(net, ids[part], (1,))
        assert torch.equal(some.logits, whole.logits[part]) and torch.equal(some.tapped, whole.tapped[part])
    for taps in ((), (FINAL,), (FINAL, 1), (1, FINAL, 1)):
        other = run(net, ids, taps)
        assert torch.equal(other.logits, whole.logits), "also where a drafter reads what the last norm gives"
        assert torch.equal(other.final, whole.final)
        states = [whole.final if boundary == FINAL else whole.tapped for boundary in taps]
        assert other.tapped is None if not taps else torch.equal(other.tapped, torch.cat(states, dim=1))
    assert torch.equal(run(net, ids, rows=picked).logits, whole.logits[picked])
    assert torch.equal(run(net, ids, rows=picked, best=False).logits, whole.logits[picked])
    greedy = run(net, ids, best=False)
    assert torch.equal(greedy.logits, whole.logits) and greedy.best is None
    assert torch.equal(whole.best, whole.logits.argmax(1))


def test_no_rows_are_no_trouble(device: torch.device, run: Any) -> None:
    found = run(Network(device, torch.float32, usual), torch.zeros(0, dtype=torch.int64), (1,))
    assert found.logits.shape == (0, VOCABULARY) and found.tapped.shape == (0, HIDDEN)
