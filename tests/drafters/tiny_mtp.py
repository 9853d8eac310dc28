"""Tiny MTP modules with random weights, apart from their target or inside its folder, named as families name them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.drafters.tiny_readers import write
from tests.fakes import VOCAB

State = dict[str, Tensor]
HIDDEN, WIDE, HEADS, KV_HEADS, WIDTH = 32, 48, 4, 2, 8
# In front of a module's names; the number of the first; what it calls embedding norm, state norm, fusion, last norm.
NAMES: dict[str, tuple[str, int, tuple[str, str, str, str]]] = {
    "mimo": ("model.mtp_layers.", 0, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "speculators": ("mtp_layers.", 0, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "deepseek": ("model.layers.", 2, ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
}


def randoms(seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def vector(size: int, about: float = 1.0) -> Tensor:
        return about + 0.3 * torch.randn(size, generator=generator)

    return matrix, vector


def llama_layer(seed: int, bias: bool = False) -> State:
    """A layer of the tiny target's shape."""
    matrix, vector = randoms(seed)
    state: State = {}
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        state[f"self_attn.{part}_proj.weight"] = matrix(heads * WIDTH, HIDDEN)
        if bias:
            state[f"self_attn.{part}_proj.bias"] = vector(heads * WIDTH, 0.0)
    state["self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * WIDTH)
    state["mlp.gate_proj.weight"], state["mlp.up_proj.weight"] = matrix(WIDE, HIDDEN), matrix(WIDE, HIDDEN)
    state["mlp.down_proj.weight"] = matrix(HIDDEN, WIDE)
    for name in ("input_layernorm", "post_attention_layernorm"):
        state[f"{name}.weight"] = vector(HIDDEN)
    return state


def around(kind: str, layer: State, seed: int, copies: bool = False) -> State:
    """A module around a layer, named without its prefix; copies: with an embedding and a head of its own."""
    matrix, vector = randoms(seed + 1000)
    embedding_norm, state_norm, fusion, last_norm = NAMES[kind][2]
    state = {f"{name}.weight": vector(HIDDEN) for name in (embedding_norm, state_norm, last_norm)}
    state[f"{fusion}.weight"] = matrix(HIDDEN, 2 * HIDDEN)
    if copies:
        state |= {"embed_tokens.weight": matrix(VOCAB, HIDDEN), "shared_head.head.weight": matrix(VOCAB, HIDDEN)}
    return layer | state


def modules(kind: str, count: int, bias: bool = False, copies: bool = False) -> list[State]:
    """Several modules around layers of the tiny target's shape."""
    return [around(kind, llama_layer(50 + n, bias), 50 + n, copies) for n in range(count)]


def named(kind: str, states: list[State]) -> State:
    """As files name them."""
    prefix, first, _ = NAMES[kind]
    return {f"{prefix}{first + n}.{name}": tensor for n, state in enumerate(states) for name, tensor in state.items()}


def mimo_config(**changes: Any) -> dict[str, Any]:
    """As MiMo's folders have it; transformers knows no such type."""
    shape = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": 2}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 256}
    config = transformers.Qwen2Config(**shape, **heads, initializer_range=0.4, eos_token_id=2).to_dict()
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return {**config, **own, **changes}


@functools.cache
def mimo_model() -> Any:
    """What a MiMo is without its modules."""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(**{k: v for k, v in mimo_config().items() if k != "model_type"})
    model = transformers.Qwen2ForCausalLM(config).eval().float()
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model


def write_mimo(folder: Path, count: int = 1, states: list[State] | None = None) -> str:
    """A whole checkpoint, its modules inside."""
    own = named("mimo", modules("mimo", count, bias=True) if states is None else states)
    whole = {name: tensor.detach().clone() for name, tensor in mimo_model().state_dict().items()}
    return str(write(folder, mimo_config(num_nextn_predict_layers=count), whole | own))


@functools.cache
def tiny_mtp(kind: str, count: int = 1, copies: bool = False) -> str:
    """Modules apart, for the tiny Llama of the contract suite; a folder that lasts as long as the process."""
    held = tempfile.TemporaryDirectory(prefix="paceline-mtp-")
    _HELD.append(held)
    config = {"model_type": "mimo" if kind == "mimo" else "deepseek_v3", "num_nextn_predict_layers": count}
    return str(write(Path(held.name), config, named(kind, modules(kind, count, copies=copies))))


_HELD: list[Any] = []
