"""Configs and tensors of published drafters spoiled one by one: each loads, or is refused in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import DFlash, DraftModel, Eagle, Glide, Hydra, Medusa, MLPSpeculator, Pard
from paceline.errors import PacelineError
from paceline.testing import tiny_llm
from tests.drafters.tiny_eagle import tiny_eagle
from tests.drafters.tiny_hydra import knowing_hydra
from tests.drafters.tiny_medusa import medusa
from tests.drafters.tiny_mlp import mlp
from tests.drafters.tiny_readers import shared

Made = tuple[Callable[[str], Any], Callable[[], str]]
HEADS: dict[str, Made] = {
    "eagle": (Eagle, lambda: tiny_eagle("first")),
    "eagle3": (Eagle, lambda: tiny_eagle("third")),
    "peagle": (Eagle, lambda: tiny_eagle("parallel")),
    "medusa": (Medusa, lambda: medusa("vllm_map")[0]),
    "mlp_speculator": (lambda path: MLPSpeculator(path, tree=True), lambda: mlp()[0]),
    "mlp_speculator_tied": (MLPSpeculator, lambda: mlp(True)[0]),
    "hydra": (Hydra, lambda: knowing_hydra({}, "prefix-mlp")),
    "glide": (Glide, lambda: shared("glide")),
    "pard": (Pard, lambda: shared("pard")),
    "dflash": (DFlash, lambda: shared("dflash_own")),
}
VALUES = ("x", -1, 0, None, True, 1.5, 10**9, [1, "x"], {"a": 1})
# What some config of some kind says, beside what these say.
MORE = [
    *("rms_norm_eps", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "num_attention_heads"),
    *("eagle_config", "model", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
    *("mask_token_id", "pard_token", "n_predict", "n_candidates", "top_k_tokens_per_head", "tie_weights"),
    *("logit_scale", "hidden_state_offset", "hydra_head_arch", "block_size", "dflash_config", "layer_types"),
    *("large_num_attention_heads", "aux_hidden_state_layer_ids"),
]


def try_loading(make: Callable[[str], Any], path: Path) -> bool:
    """Whether it loads; any error but a sentence of ours goes on."""
    try:
        tiny_llm(make(str(path)), kernels="torch")
    except PacelineError as error:
        assert len(str(error).splitlines()) == 1
        return False
    return True


@pytest.mark.parametrize("name", HEADS)
def test_a_config_with_any_value_spoiled_loads_or_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, written = HEADS[name]
    path = Path(shutil.copytree(written(), tmp_path / "head"))
    config = json.loads((path / "config.json").read_text())
    loaded = 0
    for key in dict.fromkeys([*config, *MORE]):
        for value in VALUES:
            (path / "config.json").write_text(json.dumps({**config, key: value}))
            loaded += try_loading(make, path)
    (path / "config.json").write_text(json.dumps(config))
    assert try_loading(make, path) and loaded, "it is the value that is refused"


MAPS = ("d2t", "t2d", "token_map", "mask_hidden")  # in any number of dimensions


@pytest.mark.parametrize("name", sorted(HEADS.keys() - {"hydra", "pard", "mlp_speculator_tied"}))
def test_a_tensor_that_is_missing_or_of_another_shape_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    make, written = HEADS[name]
    path = Path(shutil.copytree(written(), tmp_path / "head"))
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for key, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != key}
        spoiled = [torch.cat([tensor, tensor[:1]]), tensor.flatten()[:1]]
        spoiled += [] if key == "mask_hidden" else [tensor[:-1]]  # of one row
        spoiled += [] if key in MAPS else [tensor[None, None]]
        for value in spoiled:
            save_file({**rest, key: value.contiguous()}, file)
            assert not try_loading(make, path), (key, value.shape)
        save_file(rest, file)
        assert try_loading(make, path) == (key in ("t2d", "fc.bias")), f"{key}: the only ones that need not be there"
    save_file(tensors, file)
    assert try_loading(make, path)


@pytest.mark.parametrize("name", HEADS)
def test_a_folder_may_be_given_as_a_path_and_nothing_that_is_none(name: str) -> None:
    make, written = HEADS[name]
    tiny_llm(make(Path(written())), kernels="torch")  # type: ignore[arg-type]
    wrong: Any
    for wrong in (5, None, ["head"], {"a": 1}):
        with pytest.raises(PacelineError, match=r"^model must be a .*, not "):
            tiny_llm(make(wrong), kernels="torch")


def test_a_draft_model_given_as_a_path_is_no_head() -> None:
    with pytest.raises(PacelineError, match="holds an EAGLE drafter, not a draft model"):
        tiny_llm(DraftModel(Path(tiny_eagle("third"))), kernels="torch")
