"""Numbers in configs that no model can have: one sentence each, whatever the family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from paceline.errors import CheckpointError
from paceline.models import loader
from tests.models.folders import load, rewrite
from tests.sentences import assert_sentence

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SIGMOID: dict[str, Any] = {
    "glm4_moe": (transformers.Glm4MoeConfig, {}),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    ),
}
FAMILIES: dict[str, Any] = {
    "mistral": transformers.MistralConfig,
    "mixtral": transformers.MixtralConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "glm4_moe": transformers.Glm4MoeConfig,
    "gemma3": transformers.Gemma3TextConfig,
}


def refuse(family: str, named: str, **changes: Any) -> None:
    config = FAMILIES[family](**SHAPE)
    loader.from_transformers(config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(CheckpointError) as caught:
        loader.from_transformers(config)
    assert_sentence(caught.value, named, "allowed:")


@pytest.mark.parametrize("width", [-8, -1])
@pytest.mark.parametrize("family", ["mistral", "mixtral", "qwen3_moe", "gemma3"])
def test_a_window_that_shows_nothing_is_refused(family: str, width: int) -> None:
    refuse(family, f"sliding_window={width}", sliding_window=width)


@pytest.mark.parametrize("scalar", [0, -1])
def test_gemmas_scores_have_a_scale_that_is_a_number_above_0(scalar: int) -> None:
    refuse("gemma3", f"query_pre_attn_scalar={scalar}", query_pre_attn_scalar=scalar)


@pytest.mark.parametrize("part", [-1, 0, 2.0])
def test_no_more_of_a_head_turns_than_it_has(part: float) -> None:
    turning = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part}
    refuse("glm4_moe", f"lets {int(8 * part)} values", rope_parameters=turning)


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf])
def test_norms_have_a_number_to_keep_them_from_0(eps: float) -> None:
    refuse("mistral", f"norm_eps={eps}", rms_norm_eps=eps)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_experts_are_multiplied_by_a_number(factor: float) -> None:
    refuse("glm4_moe", f"{factor}", routed_scaling_factor=factor)


@pytest.mark.parametrize("family", SIGMOID)
def test_a_router_that_lost_its_bias_is_told_from_a_model_without_biases(family: str, tmp_path: Path) -> None:
    kind, more = SIGMOID[family]
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "moe_intermediate_size": 16}
    groups = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SHAPE, **few, **groups, **more}))
    model.save_pretrained(tmp_path)
    lost = "model.layers.1.mlp.gate.e_score_correction_bias"
    rewrite(tmp_path, lambda state: state.pop(lost))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert_sentence(caught.value, lost)
    rewrite(tmp_path, lambda state: state.pop(lost.replace("1", "0", 1)))
    load(tmp_path)
