"""A decoder that no library knows, as a checkpoint may bring it: the text of its file, and a folder with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import dynamic_module_utils

CODE = """
from pathlib import Path

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

Path(MARK).touch()


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, **more):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings = 256
        super().__init__(**more)


class Block(nn.Module):
    def __init__(self, config, number):
        super().__init__()
        self.number, self.heads = number, config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, cache):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        if cache is not None:
            k, v = cache.update(k, v, self.number)
        behind = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(behind, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        before = 0 if past_key_values is None else past_key_values.get_seq_length()
        x = self.words(input_ids) + self.places(torch.arange(before, before + input_ids.shape[1]))
        for block in self.blocks:
            x = block(x, past_key_values)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "body"

    def __init__(self, config):
        super().__init__(config)
        self.body, self.head = Own(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.body.words

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        states = self.body(input_ids, past_key_values=past_key_values, use_cache=use_cache)
        return CausalLMOutputWithPast(logits=self.head(states.last_hidden_state))
"""


def keep_apart(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """transformers copies code it runs into a package of its own: into this folder, which goes with the test."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def write(folder: Path, vocab: int = 97) -> Path:
    """Its code, its config and random weights; the code leaves a file `was-run` when it is run."""
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(CODE.replace("MARK", repr(str(folder / "was-run"))))
    named = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": named, "vocab_size": vocab}))
    shapes = {"body.words.weight": (vocab, 32), "body.places.weight": (256, 32), "head.weight": (vocab, 32)}
    for block in ("body.blocks.0", "body.blocks.1"):
        shapes |= {f"{block}.qkv.weight": (96, 32), f"{block}.qkv.bias": (96,)}
        shapes |= {f"{block}.out.weight": (32, 32), f"{block}.out.bias": (32,)}
    source = torch.Generator().manual_seed(0)
    state = {name: 0.4 * torch.randn(shape, generator=source) for name, shape in shapes.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
