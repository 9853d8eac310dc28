"""Inputs, rows and cache layers that do not fit are refused with a sentence before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import select
from paceline.kernels.ops import Forward, Heads, Inputs, Weight
from paceline.models.batch import Work
from tests.kernels.networks import STATES, Blocks, table_of
from tests.kernels.tiny import CPU, tokens

ALL = ("reference", "torch", "native")


def without(name: str) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, named={k: v for k, v in inputs.named.items() if k != name})


def with_other(name: str, value: Tensor) -> Callable[[Inputs], Inputs]:
    return lambda inputs: replace(inputs, named={**inputs.named, name: value})


NARROW = torch.zeros(3, 7, dtype=torch.float32)
FEW = torch.zeros(2, STATES, dtype=torch.float32)
REFUSED = {
    "no states": (without("states"), "'states'; given: 'below'"),
    "no bound": (without("below"), "'below'; given: 'states'"),
    "narrow states": (with_other("states", NARROW), r"float of \(3, 48\), not torch.float32 of \(3, 7\)"),
    "few rows": (with_other("states", FEW), r"\(3, 48\), not torch.float32 of \(2, 48\)"),
    "float bound": (with_other("below", NARROW[:, 0]), r"int64 of \(3,\), not torch.float32"),
    "no ids": (lambda inputs: replace(inputs, ids=None), "token ids, but it was run without any"),
    "no layout": (lambda inputs: replace(inputs, layout=None), "run without a layout"),
}


@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("case", REFUSED)
def test_inputs_that_do_not_fit_are_refused_with_a_sentence(case: str, kernels: str) -> None:
    change, message = REFUSED[case]
    table = table_of("plain", kernels)
    table.begin(0, tokens(3, 0))
    network = table.loaded.model
    inputs = change(network.inputs(table.pack([Work(0, 0, 3)])))
    with pytest.raises(ValueError, match=message):
        network.ops.run(network, inputs, table.cache.layers, (), None)


class Wrong:
    """One word, given a row of a width that does not fit."""

    def __init__(self, word: Callable[[Any, Any], Any]) -> None:
        self.word = word

    def describe(self, f: Forward) -> Any:
        return self.word(f, f.input("states", STATES))


VECTOR = torch.ones(STATES + 1, dtype=torch.float32)
HEADS = Heads(3, 1, 8)
SAID = r"was given a row of|cannot be cut|cannot turn|is asked for with|packed from as many matrices|has no \d+ of them"


def matrices(count: int, columns: int) -> Weight:
    """One for each of so many heads."""
    ones = [torch.ones(3, columns, dtype=torch.float32)] * count
    return select("native", CPU, torch.float32).pack(ones, torch.float32, CPU)


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda f, x: f.linear(f.concat(x, x), Blocks(select("native", CPU, torch.float32)).weights[0], None),
    "rms_norm": lambda f, x: f.rms_norm(x, VECTOR, 1e-5),
    "layer_norm": lambda f, x: f.layer_norm(x, VECTOR, VECTOR, 1e-5),
    "add_positions": lambda f, x: f.add_positions(x, VECTOR[None], 0),
    "add": lambda f, x: f.add(x, f.concat(x, x)),
    "multiply": lambda f, x: f.multiply(x, f.concat(x, x)),
    "attention": lambda f, x: f.attention(x, HEADS, 0, None),
    "cross_attention": lambda f, x: f.cross_attention(x, HEADS, 0, "below"),
    "split": lambda f, x: f.split(x, [STATES, 1])[0],
    "rope": lambda f, x: f.rope(x, Heads(6, 0, 8), VECTOR[None, :5], VECTOR[None, :5]),
    "rope over too many heads": lambda f, x: f.rope(x, Heads(6, 1, 8), VECTOR[None, :4], VECTOR[None, :4]),
    "head_norm": lambda f, x: f.head_norm(x, Heads(6, 1, 8), VECTOR[:8], VECTOR[:8], 1e-5),
    "input": lambda f, x: f.input("states", STATES + 1),
    "per_head": lambda f, x: f.per_head(f.concat(x, x), matrices(2, STATES + 1), 2),
    "per_head of odd heads": lambda f, x: f.per_head(x, matrices(5, 4), 5),
    "per_head of other heads": lambda f, x: f.per_head(x, matrices(2, 4), 4),
    "per_head of one matrix": lambda f, x: f.per_head(x, Blocks(select("native", CPU, torch.float32)).weights[0], 2),
    "latent_attention": lambda f, x: f.latent_attention(x, x, 2, 8, 0, 1.0),
    "latent_attention of nothing": lambda f, x: f.latent_attention(f.concat(x, x), x, 2, 0, 0, 1.0),
    "latent_attention of too much": lambda f, x: f.latent_attention(f.concat(x, x), x, 2, STATES + 1, 0, 1.0),
}


@pytest.mark.parametrize("word", WRONG)
def test_rows_of_a_width_that_does_not_fit_are_refused_before_the_library_reads_them(word: str) -> None:
    ops = select("native", CPU, torch.float32)
    states = torch.zeros(3, STATES, dtype=torch.float32)
    with pytest.raises(ValueError, match=SAID):
        ops.run(Wrong(WRONG[word]), Inputs(None, None, {"states": states}), (), (), None)


def test_layers_that_are_not_there_or_have_another_shape_are_refused_by_the_native_kernels() -> None:
    table = table_of("plain", "native")
    table.begin(0, tokens(3, 0))
    network, (own, target) = table.loaded.model, table.cache.layers
    inputs = network.inputs(table.pack([Work(0, 0, 3)]))
    for caches, message in (
        ([own], "looks at cache layer 1; given: 1 layers"),
        ([own, own], "layer 1 holds 2 heads of 8 values, but the description looks at 2 heads of 16 values"),
        ([own, (*target, target[0])], "keys and values of as many heads"),
        ([own, (target[0], own[1])], "layer 1 holds 2 heads of 16 values and 2 heads of 8 values, but"),
        ([own, target[:1]], "keys and values of as many heads, or of one row for all heads"),
    ):
        with pytest.raises(ValueError, match=message):
            network.ops.run(network, inputs, caches, (), None)
