"""Random weights from a config alone: what is there, that it is the same each time, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import LLM, DraftModel, Eagle, SamplingParams
from paceline.errors import CheckpointError, OptionError
from paceline.models.dummy import random_tensor
from paceline.requests import Limits
from paceline.server.reader import Reader
from tests.fakes import VOCAB, tiny_model
from tests.tokens import tokenizer

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
HEAD = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
THIRD = {
    **HEAD,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def folder(path: Path, **changes: Any) -> Path:
    """A folder with a config.json and nothing else."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**tiny_model().config.to_dict(), **changes}))
    return path


def dummy(path: Path, drafter: Any = None, **options: Any) -> LLM:
    given = {"load_format": "dummy", "device": "cpu", "max_model_len": 64, "num_pages": 32, **options}
    return LLM(str(folder(path / "target")), drafter, **given)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [9, 8, 9, 8]], PARAMS)]


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_a_config_alone_is_a_model_and_every_start_gives_the_same(tmp_path: Path, kernels: str) -> None:
    found = [tokens(dummy(tmp_path, kernels=kernels)) for _ in range(2)]
    assert found[0] == found[1]
    assert all(0 <= token < VOCAB for text in found[0] for token in text)
    assert len({token for text in found[0] for token in text}) > 1, "the weights say something"


def test_a_tensor_follows_from_its_name_and_keeps_what_it_reads_as_large_as_it_was() -> None:
    one, again, other = (random_tensor(name, (96, 64), torch.bfloat16, CPU) for name in ("a", "a", "b"))
    assert one.dtype == torch.bfloat16
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert 0.9 < float(one.float().std()) * 64**0.5 < 1.1
    assert random_tensor("input_layernorm.weight", (4,), torch.float32, CPU).tolist() == [1.0] * 4
    assert random_tensor("q_proj.bias", (4,), torch.float32, CPU).tolist() == [0.0] * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text", "mixtral"])
def test_other_families_are_made_too(tmp_path: Path, family: str) -> None:
    config = {**HEAD, "model_type": family, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 128}
    more = {"head_dim": 8, "num_local_experts": 4, "tie_word_embeddings": True, "architectures": None}
    path = tmp_path / family
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, **more}))
    llm = LLM(str(path), load_format="dummy", device="cpu", kernels="torch", num_pages=32, max_model_len=64)
    assert [len(text) for text in tokens(llm)] == [8, 8]


@pytest.mark.parametrize("head", [HEAD, THIRD], ids=["EAGLE-1", "EAGLE-3"])
@pytest.mark.parametrize("load_format", [None, "dummy"])
def test_an_eagle_head_is_made_from_its_config(tmp_path: Path, head: dict[str, Any], load_format: str | None) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(head))
    plain = tokens(dummy(tmp_path, kernels="reference", num_draft_tokens=3))
    llm = dummy(tmp_path, Eagle(str(tmp_path / "head"), 3, load_format=load_format), kernels="reference")
    assert tokens(llm) == plain
    assert sum(record.proposed for record in llm.engine.stats.recent) > 0
    llm.set_drafter(DraftModel(str(folder(tmp_path / "small", num_hidden_layers=1)), 3))
    assert tokens(llm) == plain


def test_a_drafter_of_a_dummy_target_may_have_weights_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(THIRD))
    with pytest.raises(CheckpointError, match="has no weights"):
        dummy(tmp_path, Eagle(str(tmp_path / "head"), load_format="auto"))
    with pytest.raises(CheckpointError, match="num_attention_heads=None, and dummy weights need it"):
        (tmp_path / "head" / "config.json").write_text("{}")
        dummy(tmp_path, Eagle(str(tmp_path / "head")))
    tiny_model().save_pretrained(tmp_path / "whole")
    llm = dummy(tmp_path, DraftModel(str(tmp_path / "whole"), load_format="auto"), kernels="reference")
    assert len(tokens(llm)[0]) == 8


def test_what_dummy_weights_cannot_be_made_of_is_told(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"takes a folder with a config\.json, not LlamaForCausalLM"):
        LLM(tiny_model(), load_format="dummy")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(OptionError, match="not the GGUF file"):
        LLM(str(tmp_path / "a.gguf"), load_format="dummy")
    with pytest.raises(OptionError, match="is for models that paceline runs itself: llama, "):
        LLM(str(folder(tmp_path / "x", model_type="phi")), load_format="dummy")
    with pytest.raises(OptionError, match="load_format='quick' is not known; allowed: auto, dummy"):
        LLM(load_format="quick")
    for kind in (Eagle, DraftModel):
        with pytest.raises(OptionError, match="load_format='quick' is not known; allowed: auto, dummy"):
            kind("x", load_format="quick")
    with pytest.raises(OptionError, match="no tokenizer, so a prompt must be a list of token ids"):
        dummy(tmp_path).generate("hello", PARAMS)


def test_whoever_reads_prompts_elsewhere_needs_no_weights_either(tmp_path: Path) -> None:
    reader = Reader.of(str(folder(tmp_path)), None, Limits(VOCAB, 64), False, "dummy")
    assert reader.tokenizer is None and not reader.has_template


def test_an_engine_does_without_a_tokenizer_if_told_so() -> None:
    options: dict[str, Any] = {"device": "cpu", "kernels": "reference", "num_pages": 32, "max_model_len": 64}
    llm = LLM(tiny_model(), skip_tokenizer_init=True, **options)
    assert llm.get_tokenizer() is None
    assert llm.generate([[5, 6]], PARAMS)[0].outputs[0].text == ""
    with pytest.raises(OptionError, match="tokenizer and skip_tokenizer_init=True were both given; give one"):
        LLM(tiny_model(), tokenizer=tokenizer(), skip_tokenizer_init=True, **options)
