"""GGUF files to test with: tiny random models, and what the oracle needs to know of the block formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from paceline.models.sources import half_split_order

# Where the halves that scale a block sit, so that random blocks hold finite numbers.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
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
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
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
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "rope_theta": 10000.0}),
    "qwen3moe": (
        transformers.Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


ARCHITECTURES = {"mixtral": "llama"}  # others call themselves as we do
INTERLEAVED = ("llama", "mixtral")


def their_name(name: str, model: str = "llama") -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, number, rest = stem.split(".", 3)
        return f"blk.{number}.{({**NAMES, **GEMMA} if model == 'gemma3' else NAMES)[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama GGUF files keep q and k in."""
    order = np.argsort(half_split_order(len(weight), heads).numpy())
    return weight[order]


def write(path: Path, kind: str, quantise: gguf.GGMLQuantizationType | None, **changes: Any) -> Any:
    """A random model as a file; `changes` are metadata, by the last words of their keys, None to leave one out."""
    model = make(kind)
    spelt = ARCHITECTURES.get(kind, kind)
    writer = gguf.GGUFWriter(path, spelt)
    for key, value in {**metadata(model.config, kind), **changes}.items():
        add(writer, key if key.startswith("tokenizer.") else f"{spelt}.{key}", value)
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if kind == "gemma3" and name == "lm_head.weight":
            continue  # the embedding again
        if kind == "gemma3" and data.ndim == 1:
            data = data + 1  # what norms are multiplied with
        packs = quantise is not None and data.ndim > 1 and data.shape[-1] % 32 == 0 and ".gate." not in name
        if packs:
            packed = gguf.quants.quantize(data, quantise)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(packed, quantise)))
        if kind in INTERLEAVED and (".q_proj" in name or ".k_proj" in name):
            data = interleave(data, 4 if ".q_proj" in name else 2)
        for theirs, part in _parts(name, data, kind).items():
            if packs:
                writer.add_tensor(theirs, gguf.quants.quantize(part, quantise), raw_dtype=quantise)
            else:
                writer.add_tensor(theirs, part)
    finish(writer)
    return model


def _parts(name: str, data: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """A tensor of transformers' as a file has it: gates and ups of all experts are two stacks."""
    if not name.endswith("gate_up_proj"):
        return {their_name(name if name.endswith((".weight", ".bias")) else f"{name}.weight", kind): data}
    wide, number = data.shape[1] // 2, name.split(".")[2]
    halves = {"gate": data[:, :wide], "up": data[:, wide:]}
    return {f"blk.{number}.ffn_{half}_exps.weight": np.ascontiguousarray(part) for half, part in halves.items()}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    config_class, extra = MODELS[kind]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**{**SHAPE, **extra})).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def metadata(config: Any, kind: str) -> dict[str, Any]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": None if kind in ("llama", "qwen2", "mixtral") else 32,
        "attention.sliding_window": 8 if kind == "gemma3" else None,
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "rope.freq_base": 1e6 if kind == "gemma3" else 10000.0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        (writer.add_int64 if value < 0 else writer.add_uint64)(key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
