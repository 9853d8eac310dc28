"""Norms, activations and heads in Triton, against PyTorch's kernels and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.eager import EagerForward, split_heads
from paceline.kernels.ops import ACTIVATIONS, Heads, Inputs, Layout, Weight, activate

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-7}}


def rows_of(device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    assert got.dtype == dtype
    return torch.allclose(got.double(), wanted.double(), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_float64(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.kernels.triton import rows

    x = rows_of(device, 3, 260, seed=1, dtype=dtype)[:, 30:230]
    weight, bias = (rows_of(device, 200, seed=seed, dtype=dtype) for seed in (2, 3))
    wanted = F.rms_norm(x.double(), (200,), weight.double(), 1e-5)
    assert near(rows.rms_norm(x, weight, 1e-5), wanted, dtype)
    assert near(rows.rms_norm(x, weight, 1e-5, bias), wanted + bias.double(), dtype)
    wanted = F.layer_norm(x.double(), (200,), weight.double(), bias.double(), 1e-5)
    assert near(rows.layer_norm(x, weight, bias, 1e-5), wanted, dtype)


def test_a_norm_is_made_of_what_a_product_folds(device: torch.device) -> None:
    from paceline.kernels.triton.matmul import Norm, fold
    from paceline.kernels.triton.rows import rms_norm

    x, weight = rows_of(device, 4, 576), rows_of(device, 576, seed=1)
    norm, picked = Norm(weight, 1e-5), torch.tensor([3, 1], device=device)
    whole, some = fold(x, norm), fold(x, norm, picked)
    assert torch.equal(rms_norm(x, weight, 1e-5), whole.scaled * whole.factors[:, None])
    assert torch.equal(some.scaled, whole.scaled[picked]) and torch.equal(some.factors, whole.factors[picked])
    assert torch.equal(rms_norm(x[2:3], weight, 1e-5), rms_norm(x, weight, 1e-5)[2:3])


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_states_stand_beside_one_another(device: torch.device, count: int) -> None:
    from paceline.kernels.triton.rows import beside

    parts = [rows_of(device, 3, 50, seed=number, dtype=torch.bfloat16)[:, 2:42] for number in range(count)]
    assert torch.equal(beside(parts), torch.cat(parts, dim=-1))
    assert torch.equal(beside([*parts, parts[0][:, :7]]), torch.cat([*parts, parts[0][:, :7]], dim=-1)), "unlike ones"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_and_a_state_are_normed_and_joined_at_once(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import keeping, rows
    from paceline.kernels.triton.ops import TritonForward, now

    table, states = rows_of(device, 9, 40, dtype=dtype), rows_of(device, 3, 170, seed=1, dtype=dtype)[:, :150]
    weights = rows_of(device, 40, seed=2, dtype=dtype), rows_of(device, 150, seed=3, dtype=dtype)
    ids = torch.tensor([8, 0, 5], device=device)
    wanted = [rows.rms_norm(table[ids], weights[0], 1e-5), rows.rms_norm(states, weights[1], 1e-6)]
    monkeypatch.setattr(rows, "rms_norm", None)
    monkeypatch.setattr(keeping, "pick", None)
    monkeypatch.setattr(torch, "cat", None)
    f = TritonForward(Inputs(ids, None), (), ())
    for state_first in (False, True):
        parts = [f.rms_norm(f.embed(Weight(table, (9, 40))), weights[0], 1e-5), f.rms_norm(states, weights[1], 1e-6)]
        order = slice(None, None, -1 if state_first else 1)
        assert torch.equal(f.concat(*parts[order]), torch.hstack(wanted[order]))
        assert all(torch.equal(now(part), one) for part, one in zip(parts, wanted))
    assert torch.equal(f.concat(f.embed(Weight(table, (9, 40))), states), torch.hstack([table[ids], states]))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_those_of_float64(device: torch.device, kind: str) -> None:
    from paceline.kernels.triton.rows import activation, gated

    x = 4 * rows_of(device, 2, 100)
    assert near(activation(x, kind), activate(x.double(), kind), torch.float32)
    first, second = x.double().chunk(2, dim=-1)
    assert near(gated(x, kind), activate(first, kind) * second, torch.float32)
    with pytest.raises(ValueError, match="an activation must be one of silu"):
        activation(x, "swish")


def eager(positions: Tensor) -> EagerForward:
    none: Any = None
    layout = Layout(none, positions, none, none, none, none, none, none, 16, [])
    return EagerForward(Inputs(None, layout), (), ())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "half"), [(Heads(6, 2, 16), 8), (Heads(3, 3, 24), 5), (Heads(5, 1, 16, 40), 8), (Heads(2, 0, 12), 6)]
)
def test_heads_turn_as_on_pytorchs_kernels(device: torch.device, heads: Heads, half: int, dtype: torch.dtype) -> None:
    from paceline.kernels.triton.rows import rope

    width = (heads.num_heads + heads.num_kv_heads) * heads.head_dim + heads.num_kv_heads * heads.value_width
    qkv, positions = rows_of(device, 3, width, dtype=dtype), torch.tensor([4, 0, 9], device=device)
    cos, sin = rows_of(device, 10, half, seed=1), rows_of(device, 10, half, seed=2)
    wanted = eager(positions).rope(qkv, heads, cos, sin)
    got = rope(qkv, heads, positions, cos, sin)
    assert torch.equal(got, wanted) if dtype == torch.float32 else near(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normed_and_turned_heads_are_stored_where_they_are_looked_for(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.kernels.triton.rows import HeadNorms, head_norm, rope, turn

    heads = Heads(5, 2, 16, 8)
    qkv, positions = rows_of(device, 3, 7 * 16 + 2 * 8, dtype=dtype), torch.tensor([4, 0, 9], device=device)
    cos, sin = rows_of(device, 10, 6, seed=1), rows_of(device, 10, 6, seed=2)
    norms = HeadNorms(rows_of(device, 16, seed=3, dtype=dtype), rows_of(device, 16, seed=4, dtype=dtype), 1e-6)
    write = torch.tensor([7, 2, 5], device=device)
    storage = torch.zeros(9, 2, 30, dtype=dtype, device=device)
    keys, values = storage[..., :16], storage[..., 16:24]
    queries = turn(qkv, heads, positions, cos, sin, keys, values, write, norms)

    row = head_norm(qkv, heads, *norms)
    assert near(row, eager(positions).head_norm(qkv, heads, *norms), dtype)
    q, k, v = split_heads(rope(row, heads, positions, cos, sin), heads)
    assert torch.equal(queries, q.flatten(1))
    assert torch.equal(keys[write], k)
    assert torch.equal(values[write], v)
    others = [0, 1, 3, 4, 6, 8]
    assert not storage[others].any() and not storage[..., 24:].any()
    plain = turn(qkv, heads, positions, None, None, keys, values, write)
    assert torch.equal(plain, qkv[:, : 5 * 16])
    assert torch.equal(keys[write].flatten(1), qkv[:, 5 * 16 : 7 * 16])


def test_no_rows_are_no_trouble(device: torch.device) -> None:
    from paceline.kernels.triton import rows
    from paceline.kernels.triton.matmul import Norm

    x, one = torch.zeros(0, 32, device=device), torch.ones(32, device=device)
    for made in (rows.rms_norm(x, one, 1e-5), rows.layer_norm(x, one, one, 1e-5), rows.activation(x, "silu")):
        assert made.shape == (0, 32)
    assert rows.join(rows.Part(x), rows.Part(x, norm=Norm(one, 1e-5))).shape == (0, 64)
    assert rows.rope(x, Heads(2, 0, 16), torch.zeros(0), one.view(2, 16), one.view(2, 16)).shape == (0, 32)
