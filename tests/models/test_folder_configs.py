"""What the configs of Hugging Face folders say: taken as transformers takes it, or refused in one sentence."""

from __future__ import annotations

import copy
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline import LLM, DraftModel
from paceline.errors import CheckpointError
from tests.fakes import tiny_llm, tiny_model
from tests.models.folders import assert_works, configure, continued, expected, greedy, load, refuse, rewrite
from tests.sentences import assert_sentence


@pytest.mark.parametrize("text", ["{", "", "[]", "null", '"llama"', "\x00"])
def test_a_corrupt_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refuse(folder, "config.json")


def test_a_config_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x80")
    refuse(folder, "config.json")


def test_an_unsupported_model_is_refused_naming_those_supported(folder: Path) -> None:
    for other in ("not-there", None, [], {}, 5):
        configure(folder, model_type=other)
        refuse(folder, repr(other), "llama", "qwen2", "gpt2", "opt")
    with pytest.raises(CheckpointError) as caught:
        LLM(
            transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    vocab_size=97, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            ),
            model_impl="paceline",
        )
    assert_sentence(caught.value, "'gpt_neox'", "llama")


def test_unsupported_rope_scaling_is_refused(folder: Path) -> None:
    configure(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    refuse(folder, "'dynamic'", "default, linear, llama3, yarn")


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "wide"},
        {"num_hidden_layers": 3},
        {"vocab_size": 90},
        {"hidden_act": "cube"},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_weights_is_refused(folder: Path, values: dict[str, Any]) -> None:
    configure(folder, **values)
    refuse(folder)


def test_what_a_family_does_not_know_of_is_ignored_as_transformers_ignores_it(folder: Path) -> None:
    configure(folder, sliding_window=1, use_sliding_window=True)
    assert_works(load(folder))
    configure(folder, model_type="mistral", sliding_window=None, attention_bias=True, mlp_bias=True)
    assert_works(load(folder))


# Quantised checkpoints.


@pytest.mark.parametrize(
    "values, method",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fp8"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"bits": 4}, "unnamed"),
        ("gptq", "unnamed"),
        ([1], "unnamed"),
    ],
    ids=str,
)
def test_a_quantised_config_is_refused_by_its_method(folder: Path, values: Any, method: str) -> None:
    configure(folder, quantization_config=values)
    refuse(folder, str(folder), method, "quantised", "GGUF")


def test_a_quantised_model_in_memory_is_refused_by_its_method() -> None:
    model = copy.deepcopy(tiny_model())
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(CheckpointError) as caught:
        LLM(model)
    assert_sentence(caught.value, "awq", "quantised")


@pytest.mark.parametrize(
    "suffix, method",
    [
        ("qweight", "gptq or awq"),
        ("qzeros", "gptq or awq"),
        ("scales", "gptq or awq"),
        ("weight_scale", "fp8 or compressed-tensors"),
        ("weight_scale_2", "fp8 or compressed-tensors"),
        ("weight_scale_inv", "fp8 or compressed-tensors"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("SCB", "bitsandbytes"),
    ],
)
def test_a_quantised_checkpoint_is_known_by_its_tensors(folder: Path, suffix: str, method: str) -> None:
    name = f"model.layers.0.mlp.down_proj.{suffix}"
    rewrite(folder, lambda state: state.update({name: torch.ones(2)}))
    refuse(folder, name, method, "quantised")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_matrix_that_is_not_stored_as_floats_is_refused(folder: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda state: state.update({name: state[name].to(dtype)}))
    refuse(folder, name, str(dtype).removeprefix("torch."), "quantised")


def test_a_tensor_of_a_type_nobody_reads_is_refused(folder: Path) -> None:
    entry = {"dtype": "F6_E2M3", "shape": [8, 8], "data_offsets": [0, 48]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(48))
    refuse(folder, "model.safetensors", "model.embed_tokens.weight", "F6_E2M3")


def test_a_config_that_says_it_is_not_quantised_loads(folder: Path) -> None:
    configure(folder, quantization_config=None)
    assert_works(load(folder))


# Tied embeddings.


def both(folder: Path) -> tuple[LLM, Any]:
    return load(folder), transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_tied_config_with_another_head_in_the_file_keeps_that_head(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(folder, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "paceline"):
        ours, theirs = both(folder)
    assert greedy(ours) == expected() == continued(theirs)
    assert any("lm_head.weight" in record.getMessage() for record in caplog.records)
    assert greedy(LLM(theirs, kernels="reference", max_model_len=32)) == expected()


def test_a_tied_config_with_the_same_head_in_the_file_keeps_one_copy(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(folder, tie_word_embeddings=True)
    rewrite(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    with caplog.at_level(logging.WARNING, "paceline"):
        ours, theirs = both(folder)
    assert greedy(ours) == continued(theirs) and not caplog.records
    assert ours.model.head is ours.model.embedding


def test_a_tied_config_with_the_head_alone_uses_it_for_both(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)
    rewrite(folder, lambda state: state.pop("model.embed_tokens.weight"))
    ours, theirs = both(folder)
    assert greedy(ours) == continued(theirs)
    assert ours.model.head is ours.model.embedding


# Numbers that make no model, and text that nests too deep.


@pytest.mark.parametrize(
    "values, named",
    [
        ({"num_attention_heads": 0}, "at least 1"),
        ({"num_attention_heads": 3, "head_dim": 8}, "heads (3)"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"num_key_value_heads": -2}, "num_kv_heads"),
        ({"num_key_value_heads": 2**40}, "num_kv_heads"),
        ({"num_key_value_heads": [2, 2]}, "num_key"),
        ({"head_dim": 7}, "head_dim"),
        ({"max_position_embeddings": 0}, "max_position"),
        ({"max_position_embeddings": 2**40}, "max_position"),
        ({"num_hidden_layers": 0}, "num_layers"),
    ],
    ids=str,
)
def test_counts_that_make_no_model_are_refused(folder: Path, values: dict[str, Any], named: str) -> None:
    configure(folder, **values)
    refuse(folder, named)


DEEP = "[" * 100_000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_nests_too_deep_is_refused(folder: Path, name: str) -> None:
    if "index" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(DEEP)
    refuse(folder, name, "nests too deep")


def test_a_draft_model_whose_config_nests_too_deep_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(DEEP)
    with pytest.raises(CheckpointError) as caught:
        tiny_llm(DraftModel(str(folder)))
    assert_sentence(caught.value, "config.json", "nests too deep")


def test_a_tokenizer_that_nests_too_deep_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(DEEP)
    refuse(folder, "tokenizer")


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}'])
def test_a_corrupt_generation_config_is_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    refuse(folder)
