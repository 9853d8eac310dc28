"""Hugging Face folders: good ones load as transformers loads them, spoilt ones are refused in one sentence."""

from __future__ import annotations

import copy
import functools
import json
import logging
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import paceline
from paceline import LLM, DraftModel, SamplingParams
from paceline.errors import CheckpointError
from tests.fakes import tiny_llm, tiny_model
from tests.sentences import assert_sentence

PROMPT = [5, 9, 22]


def greedy(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].outputs[0].token_ids


def continued(model: Any) -> list[int]:
    """transformers' own greedy continuation."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(1, keepdim=True)], dim=1)
    return [int(token) for token in ids[0, 3:]]


@functools.cache
def expected() -> list[int]:
    return continued(tiny_model())


def assert_works(llm: LLM) -> None:
    assert greedy(llm) == expected()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good tiny checkpoint, to be spoilt."""
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> LLM:
    return LLM(str(folder), kernels="reference", max_model_len=32)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refuse(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert_sentence(caught.value, *named)


def test_a_good_folder_loads(folder: Path) -> None:
    assert_works(load(folder))


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "nowhere", "not found")
    (tmp_path / "notes.txt").write_text("hello")
    refuse(tmp_path / "notes.txt", "notes.txt", ".gguf")
    refuse(tmp_path, "config.json")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refuse(folder, "no weights", "model.safetensors", "pytorch_model.bin")


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"\xff" * 64 + data[64:], lambda data: b""]
)
def test_a_corrupt_safetensors_file_is_refused(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refuse(folder, "model.safetensors", "cannot be read")


def as_bin(folder: Path) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


def test_a_bin_file_loads_and_a_truncated_one_is_refused(folder: Path) -> None:
    path = as_bin(folder)
    assert_works(load(folder))
    data = path.read_bytes()
    for cut in (len(data) // 2, 10, 0):
        path.write_bytes(data[:cut])
        refuse(folder, "pytorch_model.bin")


def test_a_bin_file_in_the_old_format_loads(folder: Path) -> None:
    path = as_bin(folder)
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert_works(load(folder))


class Trap:
    """What an evil pickle does: run something while it is read."""

    def __reduce__(self) -> Any:
        return (Path.mkdir, (Path("trap-was-sprung"),))


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_bin_file_with_code_is_refused_and_the_code_not_run(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    path = as_bin(folder)
    if how == "torch":
        torch.save({"lm_head.weight": Trap()}, path)
    else:
        path.write_bytes(pickle.dumps({"lm_head.weight": Trap()}))
    refuse(folder, "pytorch_model.bin")
    assert not Path("trap-was-sprung").exists()
    torch.save({"lm_head.weight": Trap()}, folder / "proof.bin")
    torch.load(folder / "proof.bin", weights_only=False)
    assert Path("trap-was-sprung").exists(), "the trap works, where it is let"


def test_a_bin_file_of_something_else_is_refused(folder: Path) -> None:
    path = as_bin(folder)
    for other in ([1, 2], {"lm_head.weight": 5}, torch.zeros(3)):
        torch.save(other, path)
        refuse(folder, "pytorch_model.bin", "dictionary of tensors")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda state: state.pop("model.layers.1.mlp.down_proj.weight"))
    refuse(folder, "model.layers.1.mlp.down_proj.weight", "lacks")


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda state: state.update({"model.norm.weight": torch.zeros(31)}))
    refuse(folder, "model.norm.weight", "[31]", "[32]")


def test_a_tensor_nobody_needs_is_reported_and_the_model_works(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(folder, lambda state: state.update({"model.extra.weight": torch.zeros(2)}))
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = load(folder)
    assert [record.getMessage() for record in caplog.records if "model.extra.weight" in record.getMessage()]
    assert_works(llm)


def test_a_shard_the_index_names_but_nobody_has_is_refused(folder: Path) -> None:
    shutil.move(folder / "model.safetensors", folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    refuse(folder, "part-2.safetensors", "does not exist")
    for broken in ("{", "[]", "{}", '{"weight_map": 5}'):
        index.write_text(broken)
        refuse(folder, "index")


@pytest.mark.parametrize("text", ["{", "", "[]", "null", '"llama"', "\x00"])
def test_a_corrupt_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refuse(folder, "config.json")


def test_a_config_that_is_not_text_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x80")
    refuse(folder, "config.json")


def test_an_unsupported_model_is_refused_naming_those_supported(folder: Path) -> None:
    for other in ("mamba", None, [], {}, 5):
        configure(folder, model_type=other)
        refuse(folder, repr(other), "llama", "qwen2", "gpt2", "opt")
    with pytest.raises(CheckpointError) as caught:
        LLM(
            transformers.GPTNeoXForCausalLM(
                transformers.GPTNeoXConfig(
                    vocab_size=97, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
                )
            )
        )
    assert_sentence(caught.value, "'gpt_neox'", "llama")


def test_unsupported_rope_scaling_is_refused(folder: Path) -> None:
    configure(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    refuse(folder, "'dynamic'", "default, linear, llama3")


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


# Code that comes with a checkpoint.


def never_asked(*_: Any) -> str:
    raise AssertionError("a question was asked on standard input")


@pytest.fixture
def sprung(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code in it that leaves a mark when it is run."""
    monkeypatch.setattr("builtins.input", never_asked)
    code = "from pathlib import Path\nPath({!r}).touch()\nclass Own:\n    pass\n".format(str(folder / "was-run"))
    (folder / "own.py").write_text(code)
    return folder


def test_a_tokenizer_with_code_of_its_own_is_refused_without_asking_or_running_it(sprung: Path) -> None:
    configure(sprung, model_type="llama", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    values = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (sprung / "tokenizer_config.json").write_text(json.dumps(values))
    refuse(sprung, str(sprung), "code", "never run")
    assert not (sprung / "was-run").exists()


def test_a_known_model_whose_config_names_code_loads_without_it(sprung: Path) -> None:
    configure(sprung, auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
    assert_works(load(sprung))
    assert not (sprung / "was-run").exists()


def test_transformers_is_never_left_to_ask_whether_code_may_run() -> None:
    calls = [
        line
        for path in Path(paceline.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "from_pretrained(" in line
    ]
    assert len(calls) >= 2 and all("trust_remote_code=False" in call for call in calls)


def test_an_unknown_model_whose_config_names_code_is_refused_without_asking(sprung: Path) -> None:
    configure(sprung, model_type="own", auto_map={"AutoConfig": "own.Own"})
    refuse(sprung, "'own'", "llama")
    assert not (sprung / "was-run").exists()


# Shards outside the folder.


@pytest.mark.parametrize("how", ["absolute", "above", "above_inside", "drive", "backslash"])
def test_a_shard_outside_the_folder_is_refused(folder: Path, how: str) -> None:
    moved = folder.parent / "weights.safetensors"
    shutil.move(folder / "model.safetensors", moved)
    shard = {
        "absolute": str(moved),
        "above": "../weights.safetensors",
        "above_inside": "part/../../weights.safetensors",
        "drive": "C:\\weights.safetensors",
        "backslash": "..\\weights.safetensors",
    }[how]
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    refuse(folder, "index.json", repr(shard), "inside the folder")


def test_a_shard_in_a_folder_below_loads(folder: Path) -> None:
    (folder / "part").mkdir()
    shutil.move(folder / "model.safetensors", folder / "part" / "1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part/1.safetensors"}}))
    assert_works(load(folder))


@pytest.mark.parametrize("shard", [5, None, ["part-1.safetensors"], "x" * 5000, ""], ids=lambda value: str(value)[:9])
def test_a_shard_that_is_no_file_name_is_refused(folder: Path, shard: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard, "b": "b"}}))
    refuse(folder)


# Quantised checkpoints.


@pytest.mark.parametrize(
    "values, method",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
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
