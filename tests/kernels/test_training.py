"""A description under autograd: the results of the kernels that serve it, the gradients of modules written by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels import select
from paceline.kernels.eager import EagerOps
from paceline.kernels.ops import Forward, Heads, Inputs, LayerSpec, Weight
from paceline.kernels.training import Sequences, run_dense, weights_of
from paceline.models.batch import Work
from tests.kernels.networks import HIDDEN, SHAPES, STATES, Glide, cut, table_of, tables
from tests.kernels.tiny import CPU, LONGEST, VOCAB, Table, tokens

HEADS = Heads(4, 2, 8)
WIDE = 48
LENGTH = 24


class EagleModule(nn.Module):
    """One layer behind a fusion of token and state, as EAGLE's, written the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.fuse = nn.Linear(HIDDEN + STATES, HIDDEN)
        self.q = nn.Linear(HIDDEN, 32, bias=False)
        self.k = nn.Linear(HIDDEN, 16, bias=False)
        self.v = nn.Linear(HIDDEN, 16, bias=False)
        self.o = nn.Linear(32, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.gate = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, ids: Tensor, states: Tensor, turns: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.fuse(torch.cat([self.embed(ids), states], dim=-1))
        q, k, v = (part(x).view(batch, length, -1, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.turn(q, turns), self.turn(k, turns)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(seen.transpose(1, 2).reshape(batch, length, -1))
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    @staticmethod
    def turn(x: Tensor, turns: Tensor) -> Tensor:
        return torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) * turns).transpose(-1, -2).flatten(-2)


class EagleNetwork:
    """The same as a description."""

    def __init__(self, module: EagleModule, ops: Any) -> None:
        self.ops = ops

        def packed(*linears: Any) -> Weight:
            return ops.pack([linear.weight.detach().clone() for linear in linears], torch.float32, CPU)

        self.embedding, self.fuse, self.qkv = (
            packed(module.embed),
            packed(module.fuse),
            packed(module.q, module.k, module.v),
        )
        self.out, self.gate_up, self.down = packed(module.o), packed(module.gate, module.up), packed(module.down)
        self.bias, self.norm = module.fuse.bias.detach().clone(), module.norm.weight.detach().clone()
        self.tables = tables(4, LONGEST)

    def describe(self, f: Forward) -> Any:
        x = f.linear(f.concat(f.embed(self.embedding), f.input("states", STATES)), self.fuse, self.bias)
        qkv = f.rope(f.linear(x, self.qkv, None), HEADS, *self.tables)
        x = f.add(x, f.linear(f.attention(qkv, HEADS, 0, None), self.out, None))
        f.tap(0, x)
        wide = f.gated(f.linear(f.rms_norm(x, self.norm, 1e-5), self.gate_up, None), "silu")
        return f.add(x, f.linear(wide, self.down, None))

    def layer_specs(self, dtype: torch.dtype) -> list[LayerSpec]:
        return [LayerSpec.kv(HEADS.num_kv_heads, HEADS.head_dim, dtype)]


def make() -> tuple[EagleModule, EagleNetwork, Tensor, Tensor]:
    torch.manual_seed(0)
    module = EagleModule()
    nn.init.normal_(module.norm.weight, 1.0, 0.2)
    ids = torch.tensor([tokens(LENGTH, 1), tokens(LENGTH, 2)])
    return module, EagleNetwork(module, EagerOps()), ids, torch.randn(2, LENGTH, STATES)


def loss_of(final: Tensor) -> Tensor:
    """Some number that every value of every row matters to, each in its own way."""
    return (final * torch.linspace(-1, 1, final.numel(), dtype=final.dtype).view_as(final)).sum() + final.pow(2).sum()


def test_gradients_are_those_of_a_module_written_by_hand() -> None:
    module, network, ids, states = make()
    weights = weights_of(network)
    for weight in weights:
        weight.requires_grad_()
    theirs, ours = states.clone().requires_grad_(), states.clone().requires_grad_()
    turns = torch.complex(*network.tables)[:LENGTH]
    wanted = module(ids, theirs, turns)
    positions = torch.arange(LENGTH).expand(2, -1)
    found = run_dense(network, Sequences(ids, positions, {"states": ours})).final
    assert (found - wanted).abs().max() <= 1e-5
    loss_of(wanted).backward()
    loss_of(found).backward()
    pairs = {
        "embed": (network.embedding.data, module.embed.weight.grad),
        "fuse": (network.fuse.data, module.fuse.weight.grad),
        "bias": (network.bias, module.fuse.bias.grad),
        "qkv": (network.qkv.data, torch.cat([part.weight.grad for part in (module.q, module.k, module.v)])),
        "out": (network.out.data, module.o.weight.grad),
        "norm": (network.norm, module.norm.weight.grad),
        "gate_up": (network.gate_up.data, torch.cat([module.gate.weight.grad, module.up.weight.grad])),
        "down": (network.down.data, module.down.weight.grad),
        "states": (ours, theirs.grad),
    }
    assert {id(weight) for weight in weights} == {id(pair[0]) for pair in pairs.values()} - {id(ours)}
    assert len(weights) == 8 and sum(part.numel() for part in weights) == sum(p.numel() for p in module.parameters())
    for name, (tensor, gradient) in pairs.items():
        assert gradient.abs().max() > 0.1, name
        assert (tensor.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("kernels", ["torch", "native", "reference"])
def test_what_is_trained_is_what_the_kernels_serve(kernels: str) -> None:
    module, network, ids, states = make()
    positions = torch.arange(LENGTH).expand(2, -1)
    hidden = run_dense(network, Sequences(ids, positions, {"states": states}), taps=(0,))
    served = EagleNetwork(module, select(kernels, CPU, torch.float32))
    table = Table(SimpleNamespace(model=served))  # type: ignore[arg-type]
    for slot in (0, 1):
        table.begin(slot, ids[slot].tolist())
        for start, count in ((0, 10), (10, LENGTH - 10)):
            inputs = Inputs(ids[slot, start:][:count], table.pack([Work(slot, start, count)]).layout)
            inputs.named = {"states": states[slot, start:][:count]}
            found = served.ops.run(served, inputs, table.cache.layers, (0,), None)
            assert (found.final - hidden.final[slot, start:][:count]).abs().max() <= 1e-4
            assert hidden.tapped is not None
            assert (found.tapped - hidden.tapped[slot, start:][:count]).abs().max() <= 1e-4


def dense_inputs(network: Glide, ids: list[list[int]]) -> Sequences:
    given = torch.tensor(ids)
    positions = torch.arange(given.shape[1]).expand(len(ids), -1)
    _, keys, values = cut(network.target_rows[: given.shape[1]], network.shape.target)
    borrowed = (keys.expand(len(ids), -1, -1, -1), values.expand(len(ids), -1, -1, -1))
    named = {"states": network.states[given], "below": network.below(positions)}
    return Sequences(given, positions, named, borrowed={1: borrowed})


@pytest.mark.parametrize("name", SHAPES)
def test_every_word_has_the_gradient_of_plain_torch(name: str) -> None:
    network = Glide(SHAPES[name], EagerOps())
    ids = [tokens(LENGTH, 1), tokens(LENGTH, 2)]
    for weight in weights_of(network):
        weight.requires_grad_()
    found = run_dense(network, dense_inputs(network, ids)).final
    loss_of(found).backward()
    ours = {**{f"matrix {n}": w.data.grad for n, w in network.weights.items()}}
    ours |= {f"vector {n}": v.grad for n, v in network.vectors.items()}
    network.dense = {n: w.detach().double().requires_grad_() for n, w in network.dense.items()}
    network.vectors = {n: v.detach().double().requires_grad_() for n, v in network.vectors.items()}
    wanted = torch.stack([network.by_hand(row) for row in ids])
    assert (found - wanted).abs().max() <= 1e-4
    loss_of(wanted).backward()
    theirs = {**{f"matrix {n}": w.grad for n, w in network.dense.items()}}
    theirs |= {f"vector {n}": v.grad for n, v in network.vectors.items()}
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        assert gradient is not None and gradient.abs().max() > 0.1, key
        assert (ours[key] - gradient).abs().max() <= 1e-3 * gradient.abs().max(), key


@pytest.mark.parametrize("name", SHAPES)
def test_every_word_gives_what_the_torch_kernels_give(name: str) -> None:
    table = table_of(name, "torch")
    ids = tokens(LENGTH, 1)
    table.begin(0, ids)
    found = run_dense(table.loaded.model, dense_inputs(table.loaded.model, [ids])).final[0]
    assert (found - table.run([Work(0, 0, LENGTH)]).final).abs().max() <= 1e-4


def test_a_mask_of_the_trainer_s_own_hides_what_it_says() -> None:
    _, network, ids, states = make()
    positions = torch.arange(LENGTH).expand(2, -1)
    seen = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    seen[:, :, 3] = False
    seen[:, 3, 3] = True
    plain = run_dense(network, Sequences(ids, positions, {"states": states})).final
    masked = run_dense(network, Sequences(ids, positions, {"states": states}, seen)).final
    assert torch.equal(plain[:, :4], masked[:, :4]) and (plain[:, 4:] != masked[:, 4:]).any(-1).all()
    ids = ids.clone()
    ids[:, 3] = (ids[:, 3] + 1) % VOCAB
    other = run_dense(network, Sequences(ids, positions, {"states": states}, seen)).final
    assert torch.equal(masked[:, 4:], other[:, 4:]) and not torch.equal(masked[:, 3], other[:, 3])


def test_what_cannot_be_trained_is_refused_with_a_sentence() -> None:
    module, _, ids, states = make()
    positions = torch.arange(LENGTH).expand(2, -1)
    packed = EagleNetwork(module, select("native", CPU, torch.float32))
    for call in (lambda: weights_of(packed), lambda: run_dense(packed, Sequences(ids, positions, {"states": states}))):
        with pytest.raises(ValueError, match="kernels='torch'"):
            call()
    glide = Glide(SHAPES["plain"], EagerOps())
    without = dense_inputs(glide, [tokens(5, 1)])
    without.borrowed = {}
    with pytest.raises(ValueError, match="looks at cache layer 1; borrowed layers given: none"):
        run_dense(glide, without)
