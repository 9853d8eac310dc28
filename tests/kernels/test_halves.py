"""Weights of 16 bits on a CPU: native kernels, float32 arithmetic, the same bits as those values stored in 32.

That no drafter changes a token on them is in tests/drafters/test_contract.py."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from paceline import LLM, DraftModel
from paceline.errors import OptionError
from paceline.kernels.cpu.library import KINDS
from paceline.kernels.cpu.native import NativeOps
from paceline.models import loader
from paceline.models.batch import Work
from tests.drafters.contract import SETTINGS, prompts
from tests.fakes import tiny_llm, tiny_model
from tests.kernels.tiny import CPU, HALVES, LONGEST, Table, make, packed, paths_built, same_bits, tokens, write_mixed
from tests.models.gguf_files import write as write_gguf

SPELLINGS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "half": "float16"}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "paceline"]


def kinds_of(llm: LLM) -> set[str]:
    """How the matrices lie in memory."""
    weights = [llm.model.embedding, llm.model.head]
    for layer in llm.model.layers:  # type: ignore[attr-defined]
        weights += [linear.weight for linear in vars(layer).values() if hasattr(linear, "weight")]
    assert len(weights) > 2
    return {KINDS[kind] for weight in weights for kind, _, _ in weight.data.segments}


def build(model: Any, dtype: torch.dtype = torch.float32) -> loader.Loaded:
    return loader.build(loader.find(model), dtype, CPU, "native", LONGEST)


def forward(loaded: loader.Loaded) -> Tensor:
    """States and logits of rows computed alone, a few together, and many."""
    table = Table(loaded)
    for slot, count in enumerate((12, 90)):
        table.begin(slot, tokens(count, slot + 1))
    states = [table.one_by_one(0, 0, 5), table.run([Work(0, 5, 7)]).final, table.run([Work(1, 0, 90)]).final]
    return torch.cat([torch.cat(states), loaded.model.logits(torch.cat(states))], dim=1)


@pytest.mark.parametrize("path", ["portable", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("name", HALVES)
def test_every_number_of_sixteen_bits_is_itself_in_a_product(name: str, path: str) -> None:
    ops = NativeOps()
    before = ops.library.paceline_path()
    if path not in paths_built():
        pytest.skip(f"this processor has no {path}")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(HALVES[name])
    every = every[every.isfinite()][:, None]
    try:
        ops.library.paceline_select(path.encode())
        found = ops.linear(torch.ones(1, 1), ops.pack([every], torch.float32, CPU))
    finally:
        ops.library.paceline_select(before)
    assert same_bits(found[0] + 0.0, every[:, 0].float() + 0.0)


@pytest.mark.parametrize("name", HALVES)
def test_a_checkpoint_of_sixteen_bits_gives_the_bits_of_its_values_in_float32(name: str) -> None:
    model = make(name)
    narrow, wide = build(model), build(make(name).float())
    assert same_bits(forward(narrow), forward(wide))
    sizes = [sum(data.nbytes for _, data, _ in it.model.head.data.segments) for it in (narrow, wide)]
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("name", HALVES)
def test_a_dtype_asked_for_rounds_the_matrices_and_nothing_else(name: str) -> None:
    rounded = make("llama")
    for parameter in rounded.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(HALVES[name]).float()
    found = forward(build(make("llama"), HALVES[name]))
    assert same_bits(found, forward(build(rounded)))
    assert not same_bits(found, forward(build(make("llama"))))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_dtype_of_sixteen_bits_keeps_the_native_kernels_and_says_once_what_it_means(
    spelling: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = SPELLINGS[spelling]
    with caplog.at_level(logging.WARNING, logger="paceline"):
        llm = LLM(tiny_model(), dtype=spelling, device="cpu", max_model_len=64)
        llm.generate([tokens(9, 1)], max_tokens=4)
    assert llm.model.ops.name == "native"
    assert kinds_of(llm) == {"BF16" if name == "bfloat16" else "F16"}
    assert {part.dtype for layer in llm.engine.cache.layers for part in layer} == {torch.float32}
    assert said(caplog) == [f"dtype={name} on a CPU: float matrices are kept in {name}, and arithmetic is in float32"]


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_nothing_is_said_where_a_checkpoint_is_kept_as_it_is(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    kinds = {"bfloat16": "BF16", "float16": "F16", "llama": "F32"}
    with caplog.at_level(logging.WARNING, logger="paceline"):
        for name, kind in kinds.items():
            assert kinds_of(LLM(make(name), dtype=dtype, device="cpu", max_model_len=64)) == {kind}
    assert said(caplog) == []


def test_a_draft_model_has_a_dtype_of_its_own() -> None:
    plain = tiny_llm(kernels="native")
    params = dataclasses.replace(SETTINGS["greedy"], max_tokens=12)
    wanted = [output.outputs[0].token_ids for output in plain.generate(prompts(2), params)]
    plain.set_drafter(DraftModel(tiny_model(), 3, dtype="bfloat16"))
    outputs = [output.outputs[0] for output in plain.generate(prompts(2), params)]
    assert [output.token_ids for output in outputs] == wanted
    assert sum(place.kind == "accepted" for output in outputs for place in output.provenance) > 0


def test_a_weight_beyond_float16_is_refused_with_a_sentence() -> None:
    ops = NativeOps(stored=torch.float16)
    with pytest.raises(OptionError, match=r"dtype=float16 cannot hold a weight of 70000; allowed: up to 65504"):
        ops.pack([torch.tensor([[1.0, -70000.0]])], torch.float32, CPU)
    spoilt = torch.tensor([[1.0, float("inf")]])  # a file's own, not for us to judge
    assert ops.pack([spoilt], torch.float32, CPU).shape == (1, 2)


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_floats_of_a_gguf_file_are_kept_in_their_own_bits(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gguf(path, "llama", gguf.GGMLQuantizationType[kind])
    llm = LLM(path, tokenizer=object(), device="cpu", max_model_len=64)
    assert kinds_of(llm) == {kind}
    with torch.no_grad():
        wanted = model(torch.tensor([tokens(20, 1)])).logits[0, -1]
    table = Table(loader.build(loader.find(path, tokenizer=object()), torch.float32, CPU, "native", LONGEST))
    table.begin(0, tokens(20, 1))
    found = table.loaded.model.logits(table.run([Work(0, 0, 20)]).final[-1:])
    assert (found[0] - wanted).abs().max() <= 1e-4


PACKED = {
    "bfloat16": {"dtype": "bfloat16"},
    "half": {"dtype": "half"},
    "int8": {"quantization": "int8"},
}


@pytest.mark.parametrize("asked", PACKED)
def test_a_packed_file_stays_packed_and_says_so(asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_mixed(tmp_path / "model.gguf")
    with caplog.at_level(logging.WARNING, logger="paceline"):
        llm = LLM(path, tokenizer=object(), device="cpu", max_model_len=64, **PACKED[asked])
    assert kinds_of(llm) == {"K4", "K5", "K6"}
    blocks = "Q4_K, Q5_K, Q6_K"
    if asked == "int8":
        assert said(caplog) == [f"{path} is packed already ({blocks}): quantization='int8' changes nothing"]
    else:
        name = SPELLINGS[asked]
        assert said(caplog) == [
            f"dtype={name} on a CPU: matrices packed in the file ({blocks}) stay packed, and arithmetic is in float32"
        ]


def test_blocks_the_kernels_do_not_know_are_floats_to_them() -> None:
    tensor = packed("Q2_K", 33, 256)
    for ops, wanted in ((NativeOps(stored=torch.bfloat16), "BF16"), (NativeOps("Q8_0"), "W8"), (NativeOps(), "F32")):
        [(kind, _, _)] = ops.pack([tensor], torch.float32, CPU).data.segments
        assert KINDS[kind] == wanted


def test_what_is_packed_at_load_is_not_called_kept_in_sixteen_bits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        LLM(tiny_model(), dtype="bfloat16", quantization="int8", device="cpu", max_model_len=64)
    assert said(caplog) == ["dtype=bfloat16 on a CPU: float matrices are packed (int8), and arithmetic is in float32"]
