"""The table of model families is the one place that knows their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import paceline.models
from paceline.errors import CheckpointError
from paceline.models import loader
from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES, Family
from paceline.models.llama import Llama, read_mistral
from paceline.models.transformers_config import from_transformers
from tests.models.running import CPU, run

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def config_of(kind: str) -> ModelConfig:
    config = CONFIG_MAPPING[FAMILIES[kind].spelled or kind]()
    config.model_type = kind
    return from_transformers(config)


def test_every_family_reads_the_default_config_of_its_transformers_type() -> None:
    for kind, family in FAMILIES.items():
        assert family.model_type == kind == config_of(kind).architecture


def test_only_families_with_a_table_of_positions_say_that_theirs_are_learned() -> None:
    assert {kind for kind in FAMILIES if config_of(kind).learned_positions} == {"gpt2", "opt"}


def test_each_gguf_architecture_belongs_to_one_family() -> None:
    spelt = [(family.gguf.architecture, family.gguf.experts) for family in FAMILIES.values() if family.gguf]
    assert sorted(set(spelt)) == sorted(spelt) and {("llama", False), ("llama", True)} <= set(spelt)


def test_no_other_file_of_the_models_names_a_family() -> None:
    folder = Path(paceline.models.__file__).parent
    named = re.compile("|".join(f'"{kind}"' for kind in FAMILIES))
    allowed = {"families.py", "gguf_tokenizer.py", "folder_tokenizer.py"}  # there they name kinds of tokenizers
    found = {path.name for path in folder.rglob("*.py") if named.search(path.read_text())}
    assert found <= allowed and "families.py" in found


def test_a_family_is_added_with_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MinistralConfig(**TINY, head_dim=8, sliding_window=8)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="ministral"):
        loader.find(tmp_path, impl="paceline")
    monkeypatch.setitem(FAMILIES, "ministral", Family("ministral", Llama, read_mistral))
    loaded = loader.build(loader.find(tmp_path), torch.float32, CPU, "torch", 64)
    ids = list(range(5, 35))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    assert (run(loaded, ids, [30])[0] - wanted).abs().max() <= 1e-4
