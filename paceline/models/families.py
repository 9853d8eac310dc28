"""The one table of model families. A new one is a file of its own, with its forward and its config, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.kernels import Ops
from paceline.models import deepseek, gemma3, glm4_moe, gpt2, llama, mimo, mixture, opt
from paceline.models.base import Model
from paceline.models.config import ModelConfig
from paceline.models.gguf_names import GGUFNames
from paceline.models.weights import Weights


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name, and ours
    build: Callable[[ModelConfig, Ops, Weights, int | None], Model]  # with tables for so many positions
    read: Callable[[Any], dict[str, Any]]  # a transformers config as fields of ModelConfig
    traits: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelConfig that no file decides
    gguf: GGUFNames | None = None  # None: not read from GGUF files
    spelled: str = ""  # the transformers type whose config it has, where transformers does not know its own


_NO_BIAS = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
_LEARNED = {"learned_positions": True}

FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", llama.Llama, llama.read, gguf=GGUFNames("llama", *llama.GGUF, interleaved=True)),
        Family("mistral", llama.Llama, llama.read_mistral, _NO_BIAS),  # in GGUF it calls itself llama
        Family("qwen2", llama.Llama, llama.read_qwen, {**_NO_BIAS, "qkv_bias": True}, GGUFNames("qwen2", *llama.GGUF)),
        Family(
            "qwen3", llama.Llama, llama.read_qwen, {"mlp_bias": False, "qk_norm": True}, GGUFNames("qwen3", *llama.GGUF)
        ),
        Family(
            "mimo",
            mimo.MiMo,
            llama.read_qwen,
            {**_NO_BIAS, "qkv_bias": True},
            spelled="qwen2",
        ),
        Family(
            "mixtral",
            mixture.MixtureLlama,
            mixture.read_mixtral,
            _NO_BIAS,
            GGUFNames(
                "llama", *mixture.GGUF, interleaved=True, experts=True, more=mixture.read_gguf("feed_forward_length")
            ),
        ),
        Family(
            "qwen3_moe",
            mixture.MixtureLlama,
            mixture.read_qwen,
            {"mlp_bias": False, "qk_norm": True},
            GGUFNames("qwen3moe", *mixture.GGUF, experts=True, more=mixture.read_gguf("expert_feed_forward_length")),
        ),
        Family("glm4_moe", glm4_moe.GLM4MoE, glm4_moe.read, {"out_bias": False, "mlp_bias": False}),
        Family(
            "gemma3_text",
            gemma3.Gemma3,
            gemma3.read,
            {"mlp_bias": False, "qk_norm": True},
            GGUFNames("gemma3", *gemma3.GGUF, activation="gelu_new", more=gemma3.read_gguf),
        ),
        Family("deepseek_v3", deepseek.DeepSeek, deepseek.read, {"mlp_bias": False}),
        Family("gpt2", gpt2.GPT2, gpt2.read, _LEARNED),
        Family("opt", opt.OPT, opt.read, _LEARNED),
    )
}
