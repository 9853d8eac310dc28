"""Tiny checkpoints of GLIDE, PARD and DFlash as their publishers lay them out, with random weights."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from paceline import LLM
from tests.fakes import set_apart

VOCAB = 97
WIDE = 24  # of the feed-forward
State = dict[str, Tensor]


@functools.cache
def large_model(layers: int = 8, vocab: int = VOCAB) -> Any:
    """A target with more layers than the tiny one, and 2 of 4 heads for keys and values."""
    torch.manual_seed(0)
    return llama(vocab, 32, layers, 4)


def llama(vocab: int, hidden: int, layers: int, heads: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=256,
        initializer_range=0.4,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval().float()


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5


def layer(generator: torch.Generator, hidden: int, heads: tuple[int, int, int], prefix: str) -> State:
    """A Llama layer's tensors; heads: of queries, of keys and values, their width."""
    queries, shared, width = heads
    shapes = {
        "self_attn.q_proj": (queries * width, hidden),
        "self_attn.k_proj": (shared * width, hidden),
        "self_attn.v_proj": (shared * width, hidden),
        "self_attn.o_proj": (hidden, queries * width),
        "mlp.gate_proj": (WIDE, hidden),
        "mlp.up_proj": (WIDE, hidden),
        "mlp.down_proj": (hidden, WIDE),
    }
    state = {f"{prefix}{name}.weight": 2 * random(generator, *shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        state[f"{prefix}{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    return state


def write(folder: Path, config: dict[str, Any], state: State) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


# GLIDE

GLIDE_CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": WIDE,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "large_hidden_size": 32,
    "large_num_attention_heads": 4,
    "block_size": 5,
    "use_remap": False,
}


def glide_state(layers: int = 1, hidden: int = 16, large: int = 32, vocab: int = VOCAB, seed: int = 5) -> State:
    g = torch.Generator().manual_seed(seed)
    state = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=g),
        "model.norm.weight": 1 + 0.2 * torch.randn(hidden, generator=g),
        "lm_head.weight": 3 * random(g, vocab, hidden),
    }
    for number in range(layers):
        prefix = f"model.layers.{number}."
        state |= layer(g, hidden, (2, 1, hidden // 2), prefix)
        state[f"{prefix}cross_attn.q_proj.weight"] = 2 * random(g, large, hidden)
        state[f"{prefix}cross_attn.o_proj.weight"] = 2 * random(g, hidden, large)
    return state


def write_glide(folder: Path, layers: int = 1, state: State | None = None, **changes: Any) -> Path:
    """changes: of the config; None takes a key away."""
    config = {**GLIDE_CONFIG, "num_hidden_layers": layers, **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    return write(folder, kept, glide_state(layers) if state is None else state)


# PARD

MASK = 96


def pard_model(layers: int = 1, vocab: int = VOCAB, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return llama(vocab, 16, layers, 2)


def write_pard(folder: Path, model: Any = None, mask: int | None = MASK) -> Path:
    (pard_model() if model is None else model).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ({} if mask is None else {"pard_token": mask})))
    return folder


# DFlash

DFLASH_HEADS = (4, 2, 8)


def dflash_state(layers: int = 2, taps: int = 2, own: int = 0, hidden: int = 32, seed: int = 7) -> State:
    """own: rows of its own lm_head, with d2t; 0: it uses the target's. hidden other than 32: embedding and head too."""
    g = torch.Generator().manual_seed(seed)
    state = {
        "fc.weight": random(g, hidden, 32 * taps),
        "hidden_norm.weight": 1 + 0.2 * torch.randn(hidden, generator=g),
        "norm.weight": 1 + 0.2 * torch.randn(hidden, generator=g),
    }
    for number in range(layers):
        prefix = f"layers.{number}."
        state |= layer(g, hidden, DFLASH_HEADS, prefix)
        for name in "qk":
            state[f"{prefix}self_attn.{name}_norm.weight"] = 1 + 0.2 * torch.randn(8, generator=g)
    if hidden != 32:
        state["embed_tokens.weight"] = torch.randn(VOCAB, hidden, generator=g)
    if own or hidden != 32:
        state["lm_head.weight"] = 3 * random(g, own or VOCAB, hidden)
    if own:
        ids = torch.randperm(VOCAB, generator=g)[:own].sort().values
        state |= {"d2t": ids - torch.arange(own), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    return state


def dflash_config(block_size: int = 4, layer_ids: tuple[int, ...] = (0, 1), **inner: Any) -> dict[str, Any]:
    """The native one; ids are of layers whose output is read."""
    return {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "head_dim": 8,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(layer_ids), **inner},
    }


def speculators_config(block_size: int = 4, boundaries: tuple[int, ...] = (1, 2), **more: Any) -> dict[str, Any]:
    """The same in the speculators format; ids are boundaries."""
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {"model_type": "qwen3", "rms_norm_eps": 1e-5, "rope_theta": 5000.0},
        "block_size": block_size,
        "aux_hidden_state_layer_ids": list(boundaries),
        "mask_token_id": MASK,
        **more,
    }


def write_dflash(folder: Path, config: dict[str, Any] | None = None, state: State | None = None) -> Path:
    return write(folder, dflash_config() if config is None else config, dflash_state() if state is None else state)


@functools.cache
def shared(kind: str) -> str:
    """A folder that lasts as long as the process: for the contract, whose target has two layers."""
    held = tempfile.TemporaryDirectory(prefix="paceline-tiny-")
    _HELD.append(held)
    folder = Path(held.name) / kind
    made = {
        "glide": lambda: write_glide(folder),
        "glide_2": lambda: write_glide(folder, 2),
        "pard": lambda: write_pard(folder),
        "dflash": lambda: write_dflash(folder),
        "dflash_own": lambda: write_dflash(
            folder, speculators_config(sample_from_anchor=True), dflash_state(own=40, hidden=16)
        ),
    }
    return str(made[kind]())


_HELD: list[Any] = []


def llm_with(target: Any, drafter: Any, behind: int | None = None, **options: Any) -> LLM:
    given = {"kernels": "reference", "device": "cpu", "max_model_len": 160, "block_size": 4, **options}
    if behind is None:
        return LLM(target, drafter, **given)
    llm = set_apart(LLM(target, **given), behind)
    llm.set_drafter(drafter)
    return llm
