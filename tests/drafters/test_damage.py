"""Learned drafters given wrong options, their folders spoiled one value at a time: each loads, or is refused in a
sentence; and none changes the text."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import LLM, MTP, DFlash, DraftModel, Eagle, Glide, Hydra, Medusa, MLPSpeculator, Pard
from paceline.errors import CheckpointError, OptionError, PacelineError
from paceline.testing import tiny_llm, tokens_of
from tests.drafters.tiny_eagle import tiny_eagle
from tests.drafters.tiny_hydra import knowing_hydra
from tests.drafters.tiny_medusa import medusa
from tests.drafters.tiny_mlp import mlp
from tests.drafters.tiny_mtp import tiny_mtp
from tests.drafters.tiny_readers import shared
from tests.fakes import tiny_model
from tests.native import EXACT
from tests.tokens import NUM_IDS, tokenizer

Made = tuple[Callable[[str], Any], Callable[[], str]]
HEADS: dict[str, Made] = {
    "eagle": (Eagle, lambda: tiny_eagle("first")),
    "eagle3": (Eagle, lambda: tiny_eagle("third")),
    "peagle": (Eagle, lambda: tiny_eagle("parallel")),
    "medusa": (Medusa, lambda: medusa("vllm_map")[0]),
    "mlp_speculator": (lambda path: MLPSpeculator(path, tree=True), lambda: mlp()[0]),
    "mlp_speculator_tied": (MLPSpeculator, lambda: mlp(tied=True, scaled=True)[0]),
    "hydra": (Hydra, lambda: knowing_hydra({}, "prefix-mlp")),
    "glide": (Glide, lambda: shared("glide")),
    "pard": (Pard, lambda: shared("pard")),
    "dflash": (DFlash, lambda: shared("dflash")),
    "dflash_own": (DFlash, lambda: shared("dflash_own")),
    "mtp": (MTP, lambda: tiny_mtp("mimo", 2)),
    "mtp_copies": (MTP, lambda: tiny_mtp("deepseek", copies=True)),
}
KINDS = (Eagle, Glide, MLPSpeculator, DFlash, Medusa, Hydra, MTP)
VALUES = ("x", -1, 0, None, True, 1.5, 10**9, 10**30, float("inf"), [1, "x"], {"a": 1})
FEW = ("x", -1, 10**30, float("inf"), [1, "x"], {"a": 1})  # one of each sort
# What some config of some kind says, beside what these say: few values will do, since most kinds read none of them.
MORE = [
    *("rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "num_attention_heads"),
    *("eagle_config", "model", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
    *("mask_token_id", "pard_token", "n_predict", "n_candidates", "top_k_tokens_per_head", "tie_weights"),
    *("logit_scale", "hidden_state_offset", "hydra_head_arch", "block_size", "dflash_config", "layer_types"),
    *("large_num_attention_heads", "aux_hidden_state_layer_ids", "max_position_embeddings"),
]


@functools.cache
def target() -> LLM:
    """One for every folder: a drafter that is refused leaves it as it was."""
    return tiny_llm(kernels="torch")


def try_loading(make: Callable[[str], Any], path: Path) -> bool:
    """Whether it loads; any error but a sentence of ours goes on."""
    try:
        target().set_drafter(make(str(path)))
    except PacelineError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


def copied(name: str, folder: Path, **changes: Any) -> Path:
    """A copy of a folder, its config changed."""
    path = Path(shutil.copytree(HEADS[name][1](), folder / "head"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"dflash"}))  # its config is that of dflash_own
def test_a_config_with_any_value_spoiled_loads_or_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, path = HEADS[name][0], copied(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    loaded = 0
    for key in dict.fromkeys([*config, *MORE]):
        for value in VALUES if key in config else FEW:
            (path / "config.json").write_text(json.dumps({**config, key: value}))
            loaded += try_loading(make, path)
    (path / "config.json").write_text(json.dumps(config))
    assert try_loading(make, path) and loaded, "it is the value that is refused"


MAPS = ("d2t", "t2d", "token_map", "mask_hidden")  # in any number of dimensions


def misshapen(key: str, tensor: Tensor) -> list[Tensor]:
    """A row more and a row fewer, one value, none; a number, flat, deep."""
    found = [torch.cat([tensor, tensor[:1]]), tensor.flatten()[:1], tensor[:0]]
    found += [] if key == "mask_hidden" else [tensor[:-1]]  # of one row
    found += [] if key in MAPS else [tensor.flatten()[0], tensor.flatten(), tensor[None]]
    return [one for one in found if one.shape != tensor.shape]


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"hydra", "pard"}))
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, path = HEADS[name][0], copied(name, tmp_path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for key, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != key}
        for value in misshapen(key, tensor):
            save_file({**rest, key: value.contiguous().clone()}, file)
            assert not try_loading(make, path), (key, value.shape)
        save_file(rest, file)
        spare = key in ("t2d", "fc.bias") or (name == "mlp_speculator_tied" and ".proj.0." not in key)
        spare = spare or (name == "mtp_copies" and key.endswith((".embed_tokens.weight", ".shared_head.head.weight")))
        assert try_loading(make, path) == spare, f"{key}: maps told twice, biases, copies, tied ones need not be there"
    save_file(tensors, file)
    assert try_loading(make, path)


@pytest.mark.parametrize(
    ("name", "key", "value", "told"),
    [
        ("eagle3", "rms_norm_eps", "x", "a config gives rms_norm_eps='x'; allowed: a number above 0"),
        ("glide", "rope_theta", [1], r"a config gives rope_theta=\[1\]; allowed: a number above 0"),
        ("eagle3", "hidden_act", ["a"], r"activation \['a'\] is not supported; supported: silu"),
        ("eagle3", "eagle_aux_hidden_state_layer_ids", 3, "layer_ids=3; allowed: a list of numbers"),
        ("mlp_speculator_tied", "n_predict", 10**30, "=10+; allowed: for tied weights a whole number from 2 to 64"),
        ("mlp_speculator_tied", "n_predict", 1, "=1; allowed: for tied weights a whole number from 2 to 64"),
    ],
)
def test_a_value_no_config_may_hold_is_named(name: str, key: str, value: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=told):
        target().set_drafter(HEADS[name][0](str(copied(name, tmp_path, **{key: value}))))


@pytest.mark.parametrize("name", ["eagle3", "glide"])
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    """What joins several states; a head that is not the target's."""
    path = copied(name, tmp_path)
    (file,), key = path.glob("*.safetensors"), {"eagle3": "fc.weight", "glide": "lm_head.weight"}[name]
    save_file({other: value for other, value in load_file(file).items() if other != key}, file)
    with pytest.raises(CheckpointError, match=rf" lacks the tensor {key}, which this drafter needs$"):
        target().set_drafter(HEADS[name][0](str(path)))


@pytest.mark.parametrize("given", [True, 3, 2.5, "LlamaForCausalLM", {"a": 1}])
def test_a_folders_kind_is_told_whatever_its_architectures_are(given: Any, tmp_path: Path) -> None:
    llm = tiny_llm(str(copied("eagle3", tmp_path, architectures=given)))
    assert llm.engine.drafter is not None and llm.engine.drafter.name == "eagle"


@functools.cache
def plain(kernels: str, setting: str) -> Any:
    return tokens_of(tiny_llm(kernels=kernels), 3, setting)


@pytest.mark.parametrize("kernels", EXACT)
@pytest.mark.parametrize("name", ["eagle", "eagle3", "glide", "mlp_speculator", "mtp"])
def test_weights_that_are_no_numbers_change_no_text(name: str, kernels: str, tmp_path: Path) -> None:
    make, path = HEADS[name][0], copied(name, tmp_path)
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for value, setting in ((float("nan"), "seeded"), (float("inf"), "greedy")):
        spoiled = {key: torch.full_like(one, value) if one.is_floating_point() else one for key, one in tensors.items()}
        save_file(spoiled, file)
        assert tokens_of(tiny_llm(make(str(path)), kernels=kernels), 3, setting) == plain(kernels, setting)


@pytest.mark.parametrize("name", HEADS)
def test_a_folder_may_be_given_as_a_path_and_nothing_that_is_none(name: str) -> None:
    make, written = HEADS[name]
    target().set_drafter(make(Path(written())))  # type: ignore[arg-type]
    wrong: Any
    for wrong in (5, None, b"x", ["head"], {"a": 1}, dict):
        if not (name.startswith("mtp") and wrong is None):  # the target's own
            with pytest.raises(PacelineError, match=r"^model must be a .*, not "):
                target().set_drafter(make(wrong))


def test_a_draft_model_given_as_a_path_is_no_head() -> None:
    with pytest.raises(PacelineError, match="holds an EAGLE drafter, not a draft model"):
        target().set_drafter(DraftModel(Path(tiny_eagle("third"))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_not_there_is_said_to_be_missing(kind: Any) -> None:
    with pytest.raises(CheckpointError, match="'/nowhere/at all' was not found"):
        target().set_drafter(kind(Path("/nowhere/at all")))


@pytest.mark.parametrize("kind", [*KINDS, Pard])
@pytest.mark.parametrize("given", [[], {}, ["int8"], None, 8])
def test_a_packing_is_one_of_its_words(kind: Any, given: Any) -> None:
    with pytest.raises(OptionError, match=r"^quantization=.* is not known; allowed: int8, "):
        kind("somewhere", quantization=given)


FLAGS = [(Eagle, "norm_before_residual"), (Glide, "cape"), (MLPSpeculator, "tree"), (DraftModel, "cross_vocabulary")]


@pytest.mark.parametrize(("kind", "name"), FLAGS)
@pytest.mark.parametrize("given", ["false", 0, 1, [], np.bool_(True)])
def test_what_is_on_or_off_is_true_or_false(kind: Any, name: str, given: Any) -> None:
    with pytest.raises(OptionError, match=rf"^{name}=.* is not allowed; allowed: True or False$"):
        kind("somewhere", **{name: given})


@pytest.mark.parametrize("name", ["rms_norm_eps", "rope_theta", "num_attention_heads", "large_num_attention_heads"])
@pytest.mark.parametrize("given", [0, -1, "x", [1], float("nan"), float("inf")])
def test_what_overrides_glides_config_is_a_number(name: str, given: Any) -> None:
    with pytest.raises(OptionError, match=rf"^{name}=.* is not allowed; allowed: a "):
        Glide("somewhere", **{name: given})


def test_what_is_no_tokenizer_is_no_draft_models_either() -> None:
    llm = LLM(tiny_model(vocab=NUM_IDS), tokenizer=tokenizer(), kernels="reference", max_model_len=64, device="cpu")
    with pytest.raises(OptionError, match=r"^tokenizer must be one that tells its tokens \(get_vocab\), not object$"):
        llm.set_drafter(DraftModel(tiny_model(layers=1, vocab=NUM_IDS), tokenizer=object()))
