"""Mixtral and Qwen3-MoE beyond their logits: packed experts, files, what their configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from paceline import LLM, NGram, SamplingParams
from paceline.errors import CheckpointError
from paceline.kernels.blocks import Blocks
from paceline.kernels.cpu.library import KINDS, library
from paceline.kernels.cpu.native import NativeOps
from paceline.kernels.quantise import METHODS, quantise
from paceline.models import loader, tile_cache
from paceline.models.mixture import Layer, MixtureLlama
from paceline.models.sources import half_split_order
from tests.kernels.tiny import write_mixed
from tests.models.folders import configure, refuse, rewrite
from tests.models.gguf_files import SHAPE, finish, write
from tests.models.running import CPU, run
from tests.native import needs_native
from tests.sentences import assert_sentence

IDS = list(range(2, 42))
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32),
}
pytestmark = needs_native
GGUF = {"mixtral": "mixtral", "qwen3_moe": "qwen3moe"}


def make(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).eval().float()


def load(path: Any, kernels: str = "native", quantization: str | None = None) -> loader.Loaded:
    found = loader.find(path, tokenizer=object()) if isinstance(path, Path) else loader.find(path)
    return loader.build(found, torch.float32, CPU, kernels, 128, quantization)


def experts_of(loaded: loader.Loaded) -> list[Layer]:
    assert isinstance(loaded.model, MixtureLlama)
    return [layer for layer in loaded.model.layers if isinstance(layer, Layer)]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of the middle row: rounding sends a few rows to another expert, and those are far off."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median())


# ---- packed


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("quantization, kind", [("int8", "W8"), ("int4", "W4")])
def test_experts_are_packed_at_load_and_routers_are_not(name: str, quantization: str, kind: str) -> None:
    model = make(name)
    packed = load(model, quantization=quantization)
    for layer in experts_of(packed):
        experts = layer.mixture.experts
        for weight in (experts.gate_up, experts.down):
            assert {KINDS[found] for found, _, _ in weight.data.segments} == {kind}
        assert [KINDS[found] for found, _, _ in layer.mixture.router.data.segments] == ["F32"]
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() > 1 and ".gate." not in key:
                rounded = quantise(tensor.flatten(0, -2), METHODS[quantization])
                assert isinstance(rounded, Blocks)
                tensor.copy_(rounded.dequantize().view_as(tensor))
        wanted = model(torch.tensor([IDS])).logits[0]
    assert distance(run(packed, IDS, [40])[0], wanted) <= 0.1  # activations are rounded too; other weights are 0.3 off


def test_a_router_keeps_its_bits_in_a_model_of_16_bits() -> None:
    model = make("mixtral")
    ops = [loader.build(loader.find(model), torch.bfloat16, CPU, kernels, 128) for kernels in ("native", "torch")]
    native, torchs = (experts_of(loaded)[0].mixture for loaded in ops)
    assert [KINDS[found] for found, _, _ in native.router.data.segments] == ["F32"]
    assert {KINDS[found] for found, _, _ in native.experts.down.data.segments} == {"BF16"}
    assert torchs.router.data.dtype == torch.float32 and torchs.experts.down.data.dtype == torch.bfloat16
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    for loaded in ops:
        assert distance(run(loaded, IDS, [40])[0].float(), wanted) <= 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_of_packed_experts_are_the_same_with_drafts(name: str) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8] * 6]
    said = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        for llm in (
            LLM(make(name), quantization="int4", drafter=d, max_model_len=64) for d in (None, NGram(4, min_match=1))
        )
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_experts_take_the_bytes_of_their_tiles_and_no_more(name: str, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", GGUF[name], gguf.GGMLQuantizationType.Q4_1)
    found = library()
    assert found is not None
    for layer in experts_of(load(tmp_path / "model.gguf")):
        experts = layer.mixture.experts
        for weight in (experts.gate_up, experts.down):
            segments = weight.data.segments
            wanted = [found.paceline_weight_bytes(kind, rows, weight.shape[1]) for kind, _, rows in segments]
            assert [len(data) for _, data, _ in segments] == [-(-size // 64) * 64 for size in wanted]
            starts = [data.ctypes.data for _, data, _ in segments]
            assert len(set(starts)) == len(starts) and sum(rows for _, _, rows in segments) == weight.shape[0]


# ---- files


def test_packed_experts_of_a_file_are_what_the_gguf_package_reads(tmp_path: Path) -> None:
    """Q4_K gates, Q6_K ups and downs, dequantised by that package and put into transformers' model."""
    path = write_mixed(tmp_path / "model.gguf", num_experts=5)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))

    config = transformers.MixtralConfig(
        **{**SHAPE, "hidden_size": 256, "intermediate_size": 256}, num_local_experts=5, rope_theta=10000.0
    )
    model = transformers.MixtralForCausalLM(config).eval().float()
    state = {"model.embed_tokens.weight": read("token_embd.weight"), "lm_head.weight": read("output.weight")}
    state["model.norm.weight"] = read("output_norm.weight")
    for n in range(2):
        ours, theirs = f"model.layers.{n}", f"blk.{n}"
        for part, heads in (("q", 4), ("k", 2)):
            rows = read(f"{theirs}.attn_{part}.weight")
            state[f"{ours}.self_attn.{part}_proj.weight"] = rows[half_split_order(len(rows), heads)]
        state[f"{ours}.self_attn.v_proj.weight"] = read(f"{theirs}.attn_v.weight")
        state[f"{ours}.self_attn.o_proj.weight"] = read(f"{theirs}.attn_output.weight")
        state[f"{ours}.input_layernorm.weight"] = read(f"{theirs}.attn_norm.weight")
        state[f"{ours}.post_attention_layernorm.weight"] = read(f"{theirs}.ffn_norm.weight")
        state[f"{ours}.mlp.gate.weight"] = read(f"{theirs}.ffn_gate_inp.weight")
        halves = [read(f"{theirs}.ffn_{half}_exps.weight") for half in ("gate", "up")]
        state[f"{ours}.mlp.experts.gate_up_proj"] = torch.cat(halves, dim=1)
        state[f"{ours}.mlp.experts.down_proj"] = read(f"{theirs}.ffn_down_exps.weight")
    model.load_state_dict(state)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    assert (run(load(path, "torch"), IDS, [25, 15])[0] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert distance(run(load(path), IDS, [25, 15])[0], wanted) <= 0.05 and wanted.std() > 0.5


def test_files_that_have_their_experts_one_by_one_are_read_too(tmp_path: Path) -> None:
    write(tmp_path / "stacks.gguf", "mixtral", gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(tmp_path / "stacks.gguf")
    writer = gguf.GGUFWriter(tmp_path / "apart.gguf", "llama")
    for key, field in reader.fields.items():
        if key.startswith(("llama.", "tokenizer.")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        apart = tensor.name.endswith("_exps.weight")
        for number, part in enumerate(tensor.data if apart else [tensor.data]):
            name = tensor.name.replace("_exps.weight", f".{number}.weight")
            writer.add_tensor(name, np.array(part), raw_dtype=tensor.tensor_type)
    finish(writer)
    stacks, apart = (load(tmp_path / f"{name}.gguf") for name in ("stacks", "apart"))
    assert apart.unused == [] and torch.equal(run(stacks, IDS, [40])[0], run(apart, IDS, [40])[0])


@pytest.mark.parametrize("layout", ["file", "folder", "folder as int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_experts_are_kept_and_not_packed_again(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tile_cache, "LEAST_BYTES", 1)
    path, quantization = tmp_path / "model.gguf", "int4" if "int4" in layout else None
    if layout == "file":
        write(path, GGUF[name], gguf.GGMLQuantizationType.Q8_0)
    else:
        path = tmp_path / "model"
        make(name).save_pretrained(path)
    first = run(load(path, quantization=quantization), IDS, [40])[0]
    monkeypatch.setattr(NativeOps, "pack", None)
    again = load(path, quantization=quantization)
    assert torch.equal(run(again, IDS, [40])[0], first) and again.unused == []


# ---- what is refused


def save(name: str, tmp_path: Path) -> Path:
    make(name).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "name, changes, named",
    [
        ("mixtral", {"num_local_experts": 0}, "num_experts=0"),
        ("mixtral", {"num_local_experts": 5}, "gate.weight"),
        ("mixtral", {"num_local_experts": 3}, "gate"),
        ("mixtral", {"num_experts_per_tok": 0}, "0 experts"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 31}, "experts.0"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "width=0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "mlp.gate_proj"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_its_experts_is_refused(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = save(name, tmp_path)
    configure(folder, **changes)
    refuse(folder, named)


def test_a_router_that_is_missing_is_called_as_its_file_calls_it(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path)
    name = "model.layers.0.block_sparse_moe.gate.weight"
    rewrite(folder, lambda state: state.pop(name))
    refuse(folder, name)


@pytest.mark.parametrize(
    "kind, changes, named",
    [
        ("mixtral", {"expert_used_count": None}, "expert_used_count"),
        ("mixtral", {"expert_used_count": 5}, "5 experts"),
        ("mixtral", {"expert_used_count": 1.5}, "1.5 experts"),
        ("mixtral", {"expert_count": [4, 4]}, "expert_count"),
        ("mixtral", {"expert_count": 3}, "mlp.gate"),
        ("mixtral", {"expert_count": 0}, "mlp.gate_proj"),
        ("qwen3moe", {"expert_count": None}, "0 experts"),
        ("qwen3moe", {"expert_feed_forward_length": 96}, "experts.gate_proj"),
        ("qwen2", {"expert_count": 4}, "4 experts"),
    ],
    ids=str,
)
def test_metadata_that_does_not_fit_its_experts_is_refused(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", kind, None, **changes)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "model.gguf", "torch")
    assert_sentence(caught.value, "model.gguf", named)
