"""Models from GGUF files: the same logits as the Hugging Face model they were written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import CheckpointError
from paceline.kernels import select
from paceline.models import loader
from paceline.models.families import FAMILIES
from paceline.models.gguf import GGUFFile
from paceline.models.gguf_config import config_from_gguf
from paceline.models.sources import GGUFSource
from paceline.models.weights import Weights
from tests.models.gguf_files import MODELS, add, finish, metadata, write
from tests.models.running import CPU, run
from tests.sentences import assert_sentence


def load(path: Path) -> loader.Loaded:
    return loader.build(loader.find(path, tokenizer=object()), torch.float32, CPU, "torch", 128)


@pytest.mark.parametrize("quantise", [None, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("kind", MODELS)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(kind: str, quantise: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, kind, quantise)
    loaded = load(path)
    ids = list(range(2, 42))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    assert (run(loaded, ids, [25, 15])[0] - wanted).abs().max() <= 1e-4
    assert loaded.unused == []
    assert loaded.config.eos_ids == (2,)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", None)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load(path)


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), dtype=np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"mamba.*supported"):
        load(path)


def test_names_nobody_knows_stay_as_they_are_and_are_reported() -> None:
    names = FAMILIES["llama"].gguf
    assert names is not None
    assert names.hugging_face("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert names.hugging_face("something.else") == "something.else"


COUNTS = ("block_count", "embedding_length", "feed_forward_length", "context_length")
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"attention.head_count": [4, 4]}, "attention.head_count"),
    ({"attention.head_count_kv": [2, 2]}, "attention.head_count_kv"),
    ({"attention.head_count": 0}, "num_heads=0"),
    ({"attention.head_count": 3, "attention.head_count_kv": 3}, "num_heads=3"),
    ({"attention.head_count": -4}, "num_heads=-4"),
    ({"attention.head_count": 4.0}, "attention.head_count"),
    ({"attention.head_count": "four"}, "attention.head_count"),
    ({"attention.head_count": True}, "attention.head_count"),
    ({"attention.head_count_kv": 0}, "num_kv_heads=0"),
    ({"attention.head_count_kv": -2}, "num_kv_heads=-2"),
    ({"attention.head_count_kv": 3}, "num_kv_heads=3"),
    ({"attention.head_count_kv": 8}, "num_kv_heads=8"),
    ({"attention.head_count_kv": 2**63}, "num_kv_heads"),
    ({"attention.head_count_kv": 1}, "self_attn.k_proj"),
    ({"attention.head_count": 8}, "self_attn.k_proj"),
    ({"attention.key_length": 0}, "head_dim=0"),
    ({"attention.key_length": 15}, "head_dim=15"),
    ({"attention.key_length": [16, 16]}, "attention.key_length"),
    ({"attention.layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon"),
    ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon"),
    ({"rope.freq_base": [1.0]}, "rope.freq_base"),
    ({"rope.dimension_count": 8}, "rope.dimension_count as 8"),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": "two"}, "rope.scaling.factor"),
    ({"tokenizer.ggml.eos_token_id": [2]}, "eos_token_id"),
    ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id"),
    *(({key: value}, "") for key in COUNTS for value in (0, 2**40, [2, 2])),
]


@pytest.mark.parametrize("changes, named", DAMAGED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_damaged_metadata_is_refused_in_one_sentence(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, kind, None, **changes)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert_sentence(caught.value, "model.gguf", named)


@pytest.mark.parametrize("key", [*COUNTS, "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_missing_metadata_is_named(key: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", None, **{key: None})
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert_sentence(caught.value, "model.gguf", f"llama.{key}")


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (97, 32)])
def test_an_embedding_of_another_shape_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata(MODELS["llama"][0](), "llama").items():
        add(writer, key if key.startswith("tokenizer.") else f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros(shape, dtype=np.float32))
    finish(writer)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert_sentence(caught.value, "model.gguf", "embed" if len(shape) == 2 else "token_embd")


@pytest.mark.parametrize("key", ["rope.scaling.type", "general.architecture"])
def test_an_array_where_a_word_is_needed_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", None)
    file = GGUFFile(path)
    file.metadata[key if key.startswith("general") else f"llama.{key}"] = np.arange(3000)
    with pytest.raises(CheckpointError) as caught:
        config_from_gguf(file)
    assert_sentence(caught.value, "model.gguf", "an array of 3000")


def test_a_number_where_a_matrix_is_needed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", None)
    file = GGUFFile(path)
    whole = file.tensors["blk.0.attn_q.weight"]
    file.tensors["blk.0.attn_q.weight"] = replace(whole, shape=(), raw=whole.raw[:1, :4])
    source = GGUFSource(file, config_from_gguf(file))
    weights = Weights(source, select("torch", CPU, torch.float32, None), torch.float32, CPU)
    with pytest.raises(CheckpointError) as caught:
        weights.matrix(["model.layers.0.self_attn.q_proj.weight"], [(64, 64)])
    assert_sentence(caught.value, "model.gguf", "q_proj", "shape []")


def test_flipped_bytes_of_the_metadata_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "llama", None)
    whole = path.read_bytes()
    refused = 0
    for at in range(4, whole.index(b"token_embd.weight")):
        for value in {255, whole[at] ^ 128} - {whole[at]}:
            path.unlink()
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                load(path)
            except CheckpointError:
                refused += 1
    assert refused > 100
