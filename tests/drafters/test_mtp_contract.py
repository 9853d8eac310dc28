"""MiMo, GLM-4.5 and DeepSeek with their own modules, in every situation: token for token what plain decoding says."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, MTP, SamplingParams
from paceline.kernels.ops import Weight
from paceline.testing import check_drafter, prompts
from tests.drafters.mtp_models import KINDS, write_whole
from tests.drafters.tiny_mtp import write_mimo
from tests.native import marked, needs_native

TARGETS = ("mimo", *KINDS)
MODULES = {"mimo": 1, "glm4_moe": 2, "deepseek_v3": 1}
HELD = tempfile.TemporaryDirectory(prefix="paceline-mtp-")


@functools.cache
def folder_of(kind: str) -> str:
    folder = Path(HELD.name) / kind
    return write_mimo(folder) if kind == "mimo" else write_whole(folder, kind, MODULES[kind])


# MiMo's modules are run on the reference kernels in every situation by tests/drafters/test_contract.py ("mtp_turns").
RUNS = [(kind, kernels) for kind in TARGETS for kernels in ("reference", "native")][1:]


@pytest.mark.parametrize("kind, kernels", marked(RUNS))
def test_modules_change_no_token_of_their_target(
    kind: str, kernels: str, record_property: Callable[[str, object], None]
) -> None:
    """Greedy and seeded, batches, chunks, preemption, prefix hits, rounds behind, switched in mid-answer; and on a
    device without data, where nothing can be read."""
    checked = check_drafter(lambda: MTP(num_draft_tokens=3), kernels, folder_of(kind))
    told = f"{checked.runs} runs the same, {checked.accepted} of {checked.proposed} drafts accepted"
    record_property("shown", f"MTP on {kind}, {kernels}: {told}")
    assert checked.proposed > 500


def kinds_of(weight: Weight) -> set[int]:
    """Of the tiles it is packed in."""
    return {kind for kind, _, _ in weight.data.segments}


@needs_native
@pytest.mark.parametrize("target", [None, "int8", "int4"])
def test_target_and_module_are_packed_independently(target: str | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts, module, model = [], [], []
    for packing in ("plain", "none", "int8", "int4"):
        drafter = None if packing == "plain" else MTP(num_draft_tokens=2, quantization=packing)
        llm = LLM(folder_of("mimo"), drafter, max_model_len=100, device="cpu", quantization=target)
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts(3), params)])
        model.append(kinds_of(llm.model.layers[0].qkv.weight))  # type: ignore[attr-defined]
        made: Any = llm.engine.drafter
        module += [] if made is None else [kinds_of(made.modules[0].layer.qkv.weight)]
    assert texts == texts[:1] * 4 and model == model[:1] * 4, "the target is what it was"
    assert module[0] != module[1] != module[2] != module[0]
    assert model[0] == module[[None, "int8", "int4"].index(target)]
