"""Damaged weights: scales that are no numbers end the requests that meet them, and only those, in an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, NGram, SamplingParams
from paceline.kernels.blocks import BLOCKS
from tests.kernels.tiny import VOCAB, tokens, write_mixed

BAD_TOKEN = 50
SCALE_AT = {"Q4_K": 0, "Q5_K": 0, "Q6_K": 208}
Spoil = Callable[[str, np.ndarray], None]


def spoil(name: str, rows: list[int] | slice, value: float, kind: str) -> Spoil:
    """Write `value` over the scale of the first block of some rows of one matrix."""
    at = SCALE_AT[kind]

    def write(found: str, blocks: np.ndarray) -> None:
        if found == name:
            assert blocks.shape[1] % BLOCKS[kind][1] == 0
            blocks[rows, at : at + 2] = np.array([value], "<f2").view(np.uint8)

    return write


def engine(path: Path, kernels: str = "native", drafter: Any = None) -> LLM:
    return LLM(str(path), drafter, tokenizer=None, kernels=kernels, max_model_len=100, max_num_seqs=4)


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files here carry none."""
    from paceline.models import gguf_tokenizer

    monkeypatch.setattr(gguf_tokenizer, "tokenizer_from_gguf", lambda file: None)


PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
AVOID = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={BAD_TOKEN: -100.0})


def good_prompts() -> list[list[int]]:
    return [[token for token in tokens(length, length) if token != BAD_TOKEN] for length in (10, 33, 21)]


@pytest.mark.parametrize("drafter", [None, NGram(4, 1, 2)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_spoilt_embedding_row_ends_only_the_requests_that_use_it(value: float, drafter: Any, tmp_path: Path) -> None:
    write_mixed(tmp_path / "whole.gguf")
    write_mixed(tmp_path / "spoilt.gguf", spoil("model.embed_tokens", [BAD_TOKEN], value, "Q4_K"))
    wanted = [output.outputs[0] for output in engine(tmp_path / "whole.gguf").generate(good_prompts(), AVOID)]
    llm = engine(tmp_path / "spoilt.gguf", drafter=drafter)
    bad = [3, 4, BAD_TOKEN, 5]
    for _ in range(2):  # the second time on pages that have held NaN
        outputs = [output.outputs[0] for output in llm.generate([bad, *good_prompts(), bad], AVOID)]
        assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]
        assert "NaN" in (outputs[0].error or "")
        assert outputs[0].token_ids == []
        assert [output.token_ids for output in outputs[1:4]] == [output.token_ids for output in wanted]


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_other_kernels_keep_the_damage_to_its_request_too(kernels: str, tmp_path: Path) -> None:
    write_mixed(tmp_path / "spoilt.gguf", spoil("model.embed_tokens", [BAD_TOKEN], np.nan, "Q4_K"))
    llm = engine(tmp_path / "spoilt.gguf", kernels)
    bad = [3, 4, BAD_TOKEN, *range(30)]
    for _ in range(2):
        outputs = [output.outputs[0] for output in llm.generate([bad, *good_prompts(), bad], AVOID)]
        assert [output.finish_reason for output in outputs] == ["error", *["length"] * 3, "error"]


MATRICES = {
    "model.layers.0.self_attn.q_proj": "Q4_K",
    "model.layers.0.self_attn.v_proj": "Q6_K",
    "model.layers.1.self_attn.o_proj": "Q5_K",
    "model.layers.0.mlp.gate_proj": "Q4_K",
    "model.layers.1.mlp.down_proj": "Q6_K",
}
CASES = [(name, float(value)) for name in MATRICES for value in ("nan", "inf")]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_one_spoilt_block_anywhere_ends_every_request_in_an_error(name: str, value: float, tmp_path: Path) -> None:
    write_mixed(tmp_path / "spoilt.gguf", spoil(name, [17], value, MATRICES[name]))
    outputs = engine(tmp_path / "spoilt.gguf").generate(good_prompts(), PARAMS)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
def test_blocks_of_random_bytes_end_in_an_answer_or_an_error(kernels: str, tmp_path: Path) -> None:
    """Whatever the file holds, nothing crashes and every request ends."""
    for seed in range(6):
        rng = np.random.default_rng(seed)

        def scramble(name: str, blocks: np.ndarray, rng: np.random.Generator = rng) -> None:
            blocks[rng.random(blocks.shape) < 0.02] = 0xFF

        write_mixed(tmp_path / "scrambled.gguf", scramble)
        outputs = engine(tmp_path / "scrambled.gguf", kernels).generate(good_prompts(), PARAMS)
        for output in outputs:
            assert output.outputs[0].finish_reason in ("error", "length")
            assert all(0 <= token < VOCAB for token in output.outputs[0].token_ids)
