"""A chain handed to the library by hand: what does not fit is refused before anything is read, other dtypes are not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import select
from paceline.kernels.chain import Chain, Feeding, Link
from paceline.kernels.cpu.native import NativeOps
from paceline.kernels.ops import Forward, Weight
from tests.kernels.tiny import CPU
from tests.native import needs_native

pytestmark = needs_native

VOCAB, WIDTH, ROWS = 20, 32, 2


@dataclass(eq=False)
class Step:
    """A state and a token make the next state."""

    embedding: Weight
    projection: Weight
    name: str = "states"

    def describe(self, f: Forward) -> Any:
        x = f.linear(f.input(self.name, self.projection.shape[1]), self.projection, None)
        x = f.activation(f.add(x, f.embed(self.embedding)), "silu")
        f.tap(0, x)
        return x


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def make() -> tuple[NativeOps, Chain, Step]:
    """Three drafts, the first picked from finals that are there."""
    ops = select("native", CPU, torch.float32)
    assert isinstance(ops, NativeOps)
    embedding, head = (ops.pack([some(VOCAB, WIDTH + i)[:, :WIDTH]], torch.float32, CPU) for i in range(2))
    step = Step(embedding, ops.pack([some(WIDTH, WIDTH)], torch.float32, CPU))
    place = torch.arange(1, ROWS + 1)
    feeding = Feeding(place - 1, place, place + 9, torch.zeros_like(place), torch.zeros(ROWS + 1, 1).long(), 64)
    links = [Link(None, head), Link(step, head), Link(step, head)]
    named = {"states": some(ROWS, WIDTH)}
    return ops, Chain(links, feeding, finals=2 * some(ROWS, WIDTH), named=named, state=("states", 0)), step


def test_a_chain_is_drawn_and_another_dtype_of_what_it_starts_from_is_no_other_memory() -> None:
    ops, chain, _ = make()
    assert chain.finals is not None
    doubled = {"states": chain.named["states"].double()}  # a state may be written over
    drawn = ops.chain(chain, ())
    assert drawn.tokens.shape == (ROWS, 3) and drawn.counts.tolist() == [3, 3]
    wide = Feeding(*chain.feeding[:4], torch.zeros(1, ROWS + 1).long().T, 64)  # laid out column by column
    other = replace(chain, finals=chain.finals.double(), named=doubled, feeding=wide)
    assert ops.chain(other, ()).tokens.tolist() == drawn.tokens.tolist()


def test_nobody_gets_more_drafts_than_it_may_have_and_links_are_told_apart() -> None:
    ops, chain, _ = make()
    whole = ops.chain(chain, ())
    most = torch.tensor([2, 0])
    cut = ops.chain(replace(make()[1], links=chain.links, feeding=chain.feeding._replace(most=most)), ())
    assert cut.counts.tolist() == [2, 0] and cut.tokens[0, :2].tolist() == whole.tokens[0, :2].tolist()
    short = ops.chain(replace(make()[1], links=chain.links[:2]), ())
    assert short.counts.tolist() == [2, 2] and short.tokens.tolist() == whole.tokens[:, :2].tolist()


def test_chains_that_do_not_fit_are_refused_before_the_library_reads_them() -> None:
    ops, chain, step = make()
    links = list(chain.links)
    narrow = ops.pack([some(VOCAB, 16)], torch.float32, CPU)
    wide = Step(step.embedding, ops.pack([some(WIDTH, 48)], torch.float32, CPU))
    other = Step(step.embedding, step.projection, "others")
    for changed, message in (
        (replace(chain, finals=None), "a chain needs `newest`, or `finals`"),
        (replace(chain, links=links[1:]), "a chain needs `newest`, or `finals`"),
        (replace(chain, links=[*links, links[0]]), "have networks, all but the first"),
        (replace(chain, links=[Link(None, narrow), *links[1:]]), "head reads 16 values, but is given 32"),
        (replace(chain, links=[*links[:2], Link(step, narrow)]), "head reads 16 values, but is given 32"),
        (replace(chain, finals=some(ROWS, 16)), "head reads 32 values, but is given 16"),
        (replace(chain, links=[*links[:2], Link(step, links[0].head, torch.zeros(3))]), "a bias of as many, not .3"),
        (replace(chain, links=[*links[:2], Link(wide, links[0].head)]), "asks for .*48.*; given: .*32"),
        (replace(chain, links=[*links[:2], Link(other, links[0].head)]), "asks for .*others.*; given: .*states"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.chain(changed, ())
