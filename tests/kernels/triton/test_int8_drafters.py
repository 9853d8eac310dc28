"""Drafters whose weights Triton keeps in 8 bits: what is packed of them, what they draft, and that no text changes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline import DraftModel, Eagle, Pard
from paceline.drafters.eagle_network import Network
from paceline.engine.budget import FixedBudget
from paceline.engine.device import DeviceRunner
from paceline.engine.round import Round
from paceline.errors import OptionError
from paceline.testing import SETTINGS, prompts, tiny_llm
from tests.drafters.tiny_eagle import Facts, Tensors, config_of, random_tensors, write
from tests.models.fallback_families import make

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a fake device on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]
FACTS, TAPS = Facts(embedding=True, qkv_bias=True), (0, 1, 2)


def round_all(tensors: Tensors) -> Tensors:
    """Matrices that 8 bits hold without loss: whole numbers up to 127 in every row, times a power of two."""

    def rounded(matrix: Tensor) -> Tensor:
        whole = (matrix / matrix.abs().amax(1, keepdim=True) * 127).round()
        return whole * 2.0 ** (matrix.abs().amax(1, keepdim=True) / 127).log2().round()

    return {name: rounded(tensor) if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}


@functools.cache
def head(exact: bool = True) -> str:
    tensors = random_tensors(FACTS)
    return write(round_all(tensors) if exact else tensors, config_of(FACTS))


def network(quantization: str, dtype: str = "bfloat16") -> Network:
    pytest.importorskip("triton")
    llm = tiny_llm(Eagle(head(), 2, layer_ids=TAPS, quantization=quantization), kernels="triton", dtype=dtype)
    found: Any = llm.engine.runner.drafter
    made: Network = found.network
    return made


def test_products_are_packed_and_nothing_else() -> None:
    from paceline.kernels.triton.int8 import Int8

    made = network("int8")
    (block,) = made.blocks
    assert made.fusion is not None
    linears = [made.fusion, block.qkv, block.out, block.gate_up, block.down]
    assert all(isinstance(weight.data, Int8) for weight in (made.head, *(linear.weight for linear in linears)))
    assert isinstance(made.embedding.data, Tensor)


@pytest.mark.parametrize(("quantization", "dtype"), [("none", "bfloat16"), ("int4", "bfloat16"), ("int8", "float32")])
def test_floats_are_kept_where_nothing_is_packed(quantization: str, dtype: str) -> None:
    made = network(quantization, dtype)
    assert isinstance(made.head.data, Tensor) and isinstance(made.blocks[0].qkv.weight.data, Tensor)


@functools.cache
def ran(drafter: Any) -> tuple[list[int], list[list[int]]]:
    """The text, and what was drafted in each round."""
    pytest.importorskip("triton")
    drafts, launch = list[list[int]](), DeviceRunner._launch

    def noting(*given: Any) -> Round:
        round = launch(*given)
        if round.proposal.num_nodes:
            drafts.append(round.proposal.tokens[0, : int(round.proposal.sizes[0])].tolist())
        return round

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "_launch", noting)
        llm = tiny_llm(drafter, kernels="triton", behind=1, dtype="bfloat16", budget="fixed", max_num_seqs=2)
        if drafter is not None:
            llm.engine.budget = FixedBudget(3)
        (made,) = llm.generate([prompts(1)[0][:6]], dataclasses.replace(SETTINGS["greedy"], max_tokens=4))
    return list(made.outputs[0].token_ids), drafts


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_a_head_drafts_what_its_weights_as_floats_do(tree: str) -> None:
    text, drafts = ran(Eagle(head(), 3, tree, layer_ids=TAPS, quantization="int8"))
    assert len(drafts) >= 2 and text == ran(None)[0]
    assert (text, drafts) == ran(Eagle(head(), 3, tree, layer_ids=TAPS, quantization="none"))


def test_rounded_weights_change_no_text() -> None:
    assert ran(Eagle(head(exact=False), 3, layer_ids=TAPS))[0] == ran(None)[0]


def test_a_draft_model_is_packed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import matmul
    from paceline.testing import tiny_model

    seen, launch = set[bool](), matmul.launch
    monkeypatch.setattr(matmul, "launch", lambda x, w, *rest: (seen.add(isinstance(w, Tensor)), launch(x, w, *rest))[1])
    text, drafts = ran(DraftModel(tiny_model(), 3, dtype="bfloat16", quantization="int8"))
    assert seen == {True, False} and drafts
    assert text == ran(None)[0]
    with pytest.raises(OptionError, match="quantization='int8' needs the native kernels"):
        tiny_llm(kernels="triton", dtype="bfloat16", quantization="int8")


def test_a_pard_drafter_that_transformers_runs_keeps_its_floats() -> None:
    text, drafts = ran(Pard(make("phi3"), 3, pard_token=96))
    assert text == ran(None)[0] and drafts
    with pytest.raises(OptionError, match="needs a model type with code of ours"):
        ran(DraftModel(make("phi3"), 3, quantization="int8"))
