"""Our models against transformers: the same logits in one pass, in chunks, token by token, on all kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.kernels import KERNELS
from paceline.models import loader
from paceline.models.base import FINAL
from tests.models.running import CPU, SINGLY, run

LENGTH = 40
TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GATED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OPT = {**{k: v for k, v in SHAPE.items() if k != "initializer_range"}, "ffn_dim": 48, "init_std": 0.2}
CONFIGS = {
    "llama": transformers.LlamaConfig(**GATED),
    "llama_tied_biased": transformers.LlamaConfig(
        **GATED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama_mha": transformers.LlamaConfig(**{**GATED, "num_key_value_heads": 4}),
    "llama3_rope": transformers.LlamaConfig(**GATED, rope_scaling=LLAMA3),
    "llama_yarn": transformers.LlamaConfig(**GATED, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "llama_yarn_said": transformers.LlamaConfig(
        **GATED, rope_scaling={**YARN, "attention_factor": 1.3, "truncate": False, "beta_fast": 4, "beta_slow": 2}
    ),
    "llama_linear_rope": transformers.LlamaConfig(**GATED, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "mistral": transformers.MistralConfig(**GATED, sliding_window=None),
    "mistral_window": transformers.MistralConfig(**GATED, sliding_window=8),
    "qwen2": transformers.Qwen2Config(**GATED),
    "qwen2_yarn": transformers.Qwen2Config(**GATED, rope_scaling=YARN),
    "qwen2_window": transformers.Qwen2Config(**GATED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16),
    "mixtral": transformers.MixtralConfig(**GATED, num_local_experts=4),
    "mixtral_window": transformers.MixtralConfig(
        **GATED, num_local_experts=5, num_experts_per_tok=3, sliding_window=8, head_dim=16
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**GATED, **EXPERTS, norm_topk_prob=True, attention_bias=True),
    "qwen3_moe_some": transformers.Qwen3MoeConfig(
        **{**GATED, "num_hidden_layers": 4}, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3], head_dim=16
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **{**GATED, "num_hidden_layers": 7}, head_dim=16, sliding_window=8, query_pre_attn_scalar=24
    ),
    "gemma3_bias": transformers.Gemma3TextConfig(**GATED, head_dim=16, sliding_window=8, attention_bias=True),
    "gemma3_linear_rope": transformers.Gemma3TextConfig(
        **GATED,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2, eos_token_id=2
    ),
    "opt": transformers.OPTConfig(**OPT, word_embed_proj_dim=32),
    "opt_350m": transformers.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval().float()
    for parameter in model.parameters():  # biases start at zero, which would hide a missing one
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.5, 0.2)
    return model


@pytest.mark.parametrize("kernels", [name for name in KERNELS if name not in ("auto", "triton")])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, kernels: str) -> None:
    model = make(name)
    ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    loaded = loader.build(loader.find(model), torch.float32, CPU, kernels, 256)
    assert loaded.unused == []
    for chunks in ([LENGTH], [13, 20, 7], SINGLY):
        logits, _ = run(loaded, ids, chunks)
        assert (logits - wanted).abs().max() <= TOLERANCE
    assert wanted.std() > 0.05, "logits that hardly differ would prove nothing"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter says what numpy makes of masked values
@pytest.mark.parametrize("name", ["llama_tied_biased", "qwen3", "gemma3_linear_rope", "mixtral", "gpt2"])
def test_logits_by_the_kernels_for_a_gpu_are_those_of_transformers(name: str) -> None:
    """Under Triton's interpreter, which takes its time: a short text in pieces."""
    pytest.importorskip("triton")
    model, ids = make(name), list(range(3, 15))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    loaded = loader.build(loader.find(model), torch.float32, CPU, "triton", 256)
    logits, _ = run(loaded, ids, [7, 4, 1])
    assert (logits - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_taps_are_the_residual_stream(name: str) -> None:
    model = make(name)
    ids = list(range(3, 33))
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    loaded = loader.build(loader.find(model), torch.float32, CPU, "torch", 256)
    _, tapped = run(loaded, ids, [20, 10], taps=(1, 2, FINAL))
    wanted = torch.cat([states[1][0], states[2][0], states[3][0]], dim=1)
    assert (tapped - wanted).abs().max() <= TOLERANCE


@pytest.mark.parametrize("layout", ["one", "shards", "bin", "bin_shards"])
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied_biased", "qwen3", "mixtral", "qwen3_moe_some", "gpt2", "opt_350m"]
)
def test_every_file_layout_loads_the_same_model(name: str, layout: str, tmp_path: Path) -> None:
    model = make(name)
    write(model, tmp_path, layout)
    loaded = loader.build(loader.find(tmp_path), torch.float32, CPU, "torch", 256)
    direct = loader.build(loader.find(model), torch.float32, CPU, "torch", 256)
    ids = list(range(5, 45))
    assert torch.equal(run(loaded, ids, [40])[0], run(direct, ids, [40])[0])
    assert loaded.unused == []


def write(model: Any, folder: Path, layout: str) -> None:
    if layout in ("one", "shards"):
        model.save_pretrained(folder, max_shard_size="5GB" if layout == "one" else "10KB")
        return
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state = {k: v for k, v in state.items() if k != "lm_head.weight"}
    if layout == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = sorted(state)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{number}.bin"
        torch.save({name: state[name].clone() for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


def test_gpt2_checkpoints_without_a_prefix_load_too(tmp_path: Path) -> None:
    model = make("gpt2")
    model.config.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state["h.0.attn.bias"] = torch.ones(1)  # the causal mask older files carry
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = loader.build(loader.find(tmp_path), torch.float32, CPU, "torch", 256)
    direct = loader.build(loader.find(model), torch.float32, CPU, "torch", 256)
    assert torch.equal(run(loaded, [1, 2, 3], [3])[0], run(direct, [1, 2, 3], [3])[0])
