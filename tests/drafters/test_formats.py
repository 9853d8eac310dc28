"""Published drafters of kinds that do not load yet are named as what they are, whatever their folder is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline import LLM, DraftModel
from paceline.drafters import make
from paceline.drafters.formats import find_kind
from paceline.errors import CheckpointError, OptionError
from tests.drafters.tiny_eagle import tiny_eagle
from tests.fakes import tiny_model

# config, tensors, what it is; as their publishers write them
PUBLISHED: list[tuple[dict[str, Any], list[str], str | None]] = [
    ({"speculators_config": {}}, [], "a drafter in the speculators format"),
    ({"speculators_config": {}, "speculators_model_type": "eagle3"}, [], "an EAGLE drafter"),
    ({"speculators_config": {}, "speculators_model_type": "eagle"}, ["fusion_fc.weight"], "an EAGLE drafter"),
    ({"speculators_config": {}, "speculators_model_type": "peagle"}, ["mask_hidden"], "an EAGLE drafter"),
    ({"speculators_config": {}, "speculators_model_type": "dflash"}, ["fc.weight", "d2t"], "a DFlash drafter"),
    ({"speculators_config": {}, "speculators_model_type": "mlp"}, [], "an MLP speculator"),
    ({"speculators_config": {}, "speculators_model_type": "mtp"}, ["mtp_layers.0.input_proj.weight"], "an MTP module"),
    ({"speculators_config": {}, "speculators_model_type": "dspark"}, [], "a drafter in the speculators format"),
    ({"model_type": "mlp_speculator"}, ["speculator.emb.0.weight"], "an MLP speculator"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, [], "an MLP speculator"),
    ({"medusa_num_heads": 4}, [], "Medusa heads"),
    ({}, ["0.0.linear.weight", "0.1.weight"], "Medusa heads"),
    ({"model_type": "medusa"}, [], "Medusa heads"),
    ({"model_type": "llama"}, ["lm_head.weight", "medusa_head.0.0.linear.weight"], "Medusa heads"),
    ({"model_type": "llama"}, ["model.medusa_heads.0.1.weight"], "Medusa heads"),
    ({}, ["blocks.0.layers.0.weight", "lm_heads.0.weight"], "Medusa heads"),
    ({"hydra_num_heads": 4}, [], "Hydra heads"),
    ({}, ["hydra_mlp.0.0.linear.weight"], "Hydra heads"),
    ({"model_type": "llama"}, ["midlayer.self_attn.q_proj.weight", "d2t"], "an EAGLE drafter"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, [], "an EAGLE drafter"),
    ({"model_type": "llama", "large_hidden_size": 4096}, [], "a GLIDE drafter"),
    ({"model_type": "llama"}, ["model.layers.0.cross_attn.q_proj.weight"], "a GLIDE drafter"),
    ({"model_type": "llama"}, ["layers.0.self_attn.q_proj.weight", "fc.weight"], "an EAGLE drafter"),
    ({"model_type": "deepseek_v3"}, ["model.layers.61.eh_proj.weight"], "an MTP module"),
    ({"model_type": "deepseek_v3"}, ["model.norm.weight", "model.layers.61.eh_proj.weight"], None),
    ({}, ["deepseek_v3_mtp.enorm.weight", "deepseek_v3_mtp.eh_proj.weight"], "an MTP module"),
    ({}, ["mtp.fc.weight", "mtp.norm.weight"], "an MTP module"),
    ({"model_type": "llama", "pard_token": 7}, [], "a PARD drafter"),
    ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, ["fc.weight"], "a DFlash drafter"),
    ({"model_type": "qwen3", "dflash_config": {}}, ["fc.weight", "d2t"], "a DFlash drafter"),
    ({"model_type": "llama"}, ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.norm.weight"], None),
    ({"model_type": "gpt2"}, ["transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"], None),
    ({"model_type": "opt"}, ["model.decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc2.weight"], None),
]


@pytest.mark.parametrize(("config", "tensors", "kind"), PUBLISHED)
def test_a_kind_is_told_by_config_or_tensors(config: dict[str, Any], tensors: list[str], kind: str | None) -> None:
    found = find_kind(config, tensors)
    assert (found and found.called) == kind


def folder_with(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A tiny llama's folder with more in it."""
    tiny_model().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        state = {name: tensor.contiguous().clone() for name, tensor in tiny_model().state_dict().items()}
        save_file(state | tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("marks", ["config", "tensors"])
def test_a_glide_folder_is_not_taken_for_a_llama(tmp_path: Path, marks: str) -> None:
    config = {"large_hidden_size": 64} if marks == "config" else {}
    tensors = {} if config else {"model.layers.0.cross_attn.q_proj.weight": torch.zeros(4, 4)}
    glide = folder_with(tmp_path / "my-draft", config, tensors)
    with pytest.raises(OptionError, match="holds a GLIDE drafter, not a draft model; write glide:model="):
        LLM(tiny_model(), DraftModel(str(glide)), kernels="reference", max_model_len=32)


def test_a_drafter_given_as_the_model_is_told_how_it_is_used() -> None:
    head = tiny_eagle("third")
    with pytest.raises(CheckpointError) as refused:
        LLM(head)
    assert str(refused.value) == (
        f"{head} holds an EAGLE drafter, which is no model by itself; give the model it drafts for, and it as the "
        "drafter: eagle:model=… on the command line, Eagle(model=…) in Python"
    )


def test_a_word_nearly_a_drafter_s_is_answered_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"'sufix' is not known and no such path exists; did you mean 'suffix'\?"):
        LLM(tiny_model(), "sufix", kernels="reference", max_model_len=32)
    monkeypatch.chdir(tmp_path)
    folder_with(Path("sufix"), {}, {})  # a folder of that name is what was meant
    LLM(tiny_model(), "sufix", kernels="reference", max_model_len=32)


@pytest.mark.parametrize(
    "given, allowed",
    [
        ("eagle:/some/head", "eagle:model=… on the command line, Eagle(model=…) in Python"),
        ("eagle:model=/some/head", "eagle:model=… on the command line, Eagle(model=…) in Python"),
        ("ngram:3", "ngram:option=… on the command line, NGram(option=…) in Python"),
    ],
)
def test_options_behind_a_colon_are_not_taken_for_a_model_s_name(given: str, allowed: str) -> None:
    with pytest.raises(OptionError) as refused:
        make(given)
    assert str(refused.value) == f"drafter {given!r} is not known; allowed: {allowed}"


def test_a_path_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_with(Path("eagle:3"), {}, {})
    assert make("eagle:3") == DraftModel("eagle:3")
