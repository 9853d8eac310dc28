"""Models from GGUF files: the same logits as the Hugging Face model they were written from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from paceline.errors import CheckpointError
from paceline.models import loader
from paceline.models.sources import half_split_order, hugging_face_name
from tests.models.test_parity import CPU, run

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MODELS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
}


def their_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama GGUF files keep q and k in."""
    order = np.argsort(half_split_order(len(weight), heads).numpy())
    return weight[order]


def write(path: Path, kind: str, quantise: gguf.GGMLQuantizationType | None) -> Any:
    torch.manual_seed(0)
    config_class, extra = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SHAPE, **extra)).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if kind == "qwen3":
        writer.add_key_length(32)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if quantise is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
            packed = gguf.quants.quantize(data, quantise)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quantise)))
        if kind == "llama" and (".q_proj" in name or ".k_proj" in name):
            data = interleave(data, 4 if ".q_proj" in name else 2)
        if quantise is not None and data.ndim == 2 and data.shape[1] % 32 == 0:
            writer.add_tensor(their_name(name), gguf.quants.quantize(data, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(their_name(name), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"mamba.*supported"):
        load(path)


def test_names_nobody_knows_stay_as_they_are_and_are_reported() -> None:
    assert hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert hugging_face_name("something.else") == "something.else"
