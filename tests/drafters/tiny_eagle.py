"""Tiny EAGLE checkpoints with random weights, in every layout they are published in.

One set of facts (`Facts`) and tensors in one spelling; a layout is what it is called on disk.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.fakes import VOCAB, tiny_model

DRAFT_VOCAB = 40
HEADS, KV_HEADS, WIDTH = 4, 2, 8
_FOLDERS = tempfile.TemporaryDirectory(prefix="paceline-eagle-")

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Facts:
    """third: EAGLE-3. target: its hidden size; hidden: the head's own. states: how many are read and joined; 0: the
    last one, as it is."""

    third: bool = True
    hidden: int = 32
    target: int = 32
    wide: int = 48
    states: int = 3
    layers: int = 1
    vocab: int = DRAFT_VOCAB  # of the head; VOCAB: no map
    bias: bool = False  # of EAGLE-1's fusion
    qkv_bias: bool = False
    head_norms: bool = False
    embedding: bool = False
    mask: bool = False
    seed: int = 5


def random_tensors(facts: Facts) -> Tensors:
    """Under the originals' names, EAGLE-3's first layer as `midlayer.`."""
    generator = torch.Generator().manual_seed(facts.seed)
    found: Tensors = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        found[name] = torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def vector(name: str, size: int, about: float = 1.0) -> None:
        found[name] = about + 0.3 * torch.randn(size, generator=generator)

    hidden = facts.hidden
    if facts.states:
        matrix("fc.weight", hidden, facts.states * facts.target if facts.third else 2 * hidden)
    if facts.bias:
        vector("fc.bias", hidden, 0.0)
    for number in range(facts.layers):
        layer = "midlayer." if facts.third and number == 0 else f"layers.{number}."
        reads = 2 * hidden if facts.third and number == 0 else hidden
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{layer}self_attn.{part}_proj.weight", heads * WIDTH, reads)
            if facts.qkv_bias:
                vector(f"{layer}self_attn.{part}_proj.bias", heads * WIDTH, 0.0)
            if facts.head_norms and part != "v":
                vector(f"{layer}self_attn.{part}_norm.weight", WIDTH)
        matrix(f"{layer}self_attn.o_proj.weight", hidden, HEADS * WIDTH)
        matrix(f"{layer}mlp.gate_proj.weight", facts.wide, hidden)
        matrix(f"{layer}mlp.up_proj.weight", facts.wide, hidden)
        matrix(f"{layer}mlp.down_proj.weight", hidden, facts.wide)
        vector(f"{layer}post_attention_layernorm.weight", hidden)
        if facts.third or number:
            vector(f"{layer}input_layernorm.weight", hidden)
        if facts.third and number == 0:
            vector(f"{layer}hidden_norm.weight", hidden)
    if facts.third:
        vector("norm.weight", hidden)
        matrix("lm_head.weight", facts.vocab, hidden)
        if facts.vocab != VOCAB:
            found |= vocabulary(facts.vocab, generator)
    if facts.embedding:
        matrix("embed_tokens.weight", VOCAB, hidden)
    if facts.mask:
        found["mask_hidden"] = torch.randn(1, 1, facts.states * facts.target, generator=generator)
    return found


def vocabulary(size: int, generator: torch.Generator) -> Tensors:
    chosen = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    return {"d2t": chosen - torch.arange(size), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)}


def config_of(facts: Facts) -> dict[str, Any]:
    """As the originals write it."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts.hidden,
        "intermediate_size": facts.wide,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": WIDTH,
        "num_hidden_layers": facts.layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    if facts.third:
        config["draft_vocab_size"] = facts.vocab
    return config


def write(tensors: Tensors, config: dict[str, Any], folder: Path | None = None, file: str = "model.safetensors") -> str:
    """A folder with both; its path."""
    where = Path(tempfile.mkdtemp(dir=_FOLDERS.name)) if folder is None else folder
    where.mkdir(exist_ok=True, parents=True)
    (where / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, where / file)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, where / file)
    return str(where)


def renamed(tensors: Tensors, *changes: tuple[str, str]) -> Tensors:
    """With the fronts of names changed."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in changes:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        found[name] = tensor
    return found


@functools.cache
def tiny_eagle(kind: str) -> str:
    """The checkpoints of the contract suite, for its target of two layers."""
    facts = {
        "first": Facts(third=False, bias=True),
        "third": Facts(),
        "parallel": Facts(mask=True),
    }[kind]
    config = config_of(facts)
    if facts.third:
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    if facts.mask:
        config["mask_token_id"] = 96
    return write(random_tensors(facts), config)


@functools.cache
def deep_target(layers: int = 8) -> Any:
    """A target of eight layers keeps EAGLE-3's three states apart."""
    return tiny_model(layers=layers)
