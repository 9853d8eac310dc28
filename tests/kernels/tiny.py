"""Tiny models in every shape the kernels branch on, and a table of sequences to run them by hand."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from paceline.cache.kv import KVCache
from paceline.cache.pages import PagePool
from paceline.cache.slots import Slots
from paceline.kernels.blocks import BLOCKS, Blocks
from paceline.kernels.cpu.library import library
from paceline.models import loader
from paceline.models.batch import Batch, Nodes, Work, pack
from tests.models.gguf_files import SCALES, their_name
from tests.models.gguf_files import write as write_gguf
from tests.models.tiny_deepseek import PACKABLE, build, tiny_deepseek

CPU = torch.device("cpu")
VOCAB = 97
LONGEST = 160
BLOCK_SIZE = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GATED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
OPT = {**{k: v for k, v in SHAPE.items() if k != "initializer_range"}, "ffn_dim": 48, "init_std": 0.2}
CONFIGS = {  # head widths 8, 16, 64 and 128; odd columns; windows; both norms; all activations
    "llama": transformers.LlamaConfig(**GATED, attention_bias=True, mlp_bias=True),
    "llama_64": transformers.LlamaConfig(**{**GATED, "num_key_value_heads": 1}, head_dim=64),
    "llama_128": transformers.LlamaConfig(**GATED, head_dim=128),
    "llama_odd": transformers.LlamaConfig(**{**GATED, "intermediate_size": 47}, head_dim=6),
    "qwen3": transformers.Qwen3Config(**GATED, head_dim=16),
    "mixtral": transformers.MixtralConfig(**GATED, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **{**GATED, "num_hidden_layers": 3},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=23,
        mlp_only_layers=[1],
        head_dim=16,
    ),
    "mistral_window": transformers.MistralConfig(**GATED, sliding_window=8),
    "mistral_window_64": transformers.MistralConfig(**GATED, sliding_window=7, head_dim=64),
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, eos_token_id=2
    ),
    "opt": transformers.OPTConfig(**OPT, word_embed_proj_dim=32),
    "opt_350m": transformers.OPTConfig(
        **OPT, word_embed_proj_dim=16, do_layer_norm_before=False, activation_function="gelu"
    ),
}
EXPERTS = {"experts_Q4_1": "mixtral", "experts_Q8_0": "qwen3moe"}
PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "K_mixed", *EXPERTS, "experts_K_mixed")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LATENT: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent_naive": {"absorbed": False},
    "latent_int8": {"quantization": "int8"},
    "latent_int4": {"quantization": "int4"},
}
ALL = (*CONFIGS, *HALVES, *PACKED, *LATENT)


def make(name: str) -> Any:
    """A transformers model whose norms and biases are not the ones and zeros they start as."""
    torch.manual_seed(0)
    config = CONFIGS["llama" if name in HALVES else name]
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(HALVES.get(name, torch.float32))


@functools.cache
def load(name: str, kernels: str = "native") -> loader.Loaded:
    if name in CONFIGS or name in HALVES:
        return loader.build(loader.find(make(name)), torch.float32, CPU, kernels, LONGEST)
    if name in LATENT:
        packs = kernels == "native"  # which alone can
        how = {key: value for key, value in LATENT[name].items() if packs or key != "quantization"}
        return build(tiny_deepseek("experts_yarn", **PACKABLE), kernels, **how)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        if name.endswith("K_mixed"):
            write_mixed(path, num_experts=5 if name.startswith("experts") else 0)
        else:
            write_gguf(path, EXPERTS.get(name, "llama"), gguf.GGMLQuantizationType[name.removeprefix("experts_")])
        return loader.build(loader.find(path, tokenizer=object()), torch.float32, CPU, kernels, 128)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, spread: float = 0.05) -> np.ndarray:
    """Any quants, and scales that make values of about `spread`; some are negative, some subnormal, some zero."""
    rng = np.random.default_rng(seed)
    elements, size = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    largest = {"Q8_0": 128, "Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 128 * 32}.get(kind, 16)
    for place, at in enumerate(SCALES[kind]):
        scale = rng.standard_normal(len(blocks)) * spread / (largest if place == 0 else largest / 15)
        scale[rng.random(len(blocks)) < 0.02] = 0
        scale[rng.random(len(blocks)) < 0.02] = 3e-7
        blocks[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def packed(kind: str, rows: int, columns: int, seed: int = 0) -> Blocks:
    return Blocks(kind, (rows, columns), random_blocks(kind, rows, columns, seed))


def write_mixed(path: Path, spoil: Any = None, num_experts: int = 0) -> Path:
    """A llama whose fused weights mix Q4_K with Q6_K; `spoil(name, blocks)` may damage its blocks.

    With experts two are chosen for a row.
    """
    sizes = {"embed": VOCAB, "wide": 256}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(2)
    layer = {
        "self_attn.q_proj": ("Q4_K", 256),
        "self_attn.k_proj": ("Q4_K", 128),
        "self_attn.v_proj": ("Q6_K", 128),
        "self_attn.o_proj": ("Q5_K", 256),
        "mlp.gate_proj": ("Q4_K", 256),
        "mlp.up_proj": ("Q6_K", 256),
        "mlp.down_proj": ("Q6_K", 256),
    }
    matrices = {"model.embed_tokens": ("Q4_K", sizes["embed"]), "lm_head": ("Q6_K", sizes["embed"])}
    matrices |= {f"model.layers.{n}.{key}": value for n in range(2) for key, value in layer.items()}
    for seed, (name, (kind, rows)) in enumerate(matrices.items()):
        blocks = random_blocks(kind, rows, 256, seed, spread=0.4)
        if spoil is not None:
            spoil(name, blocks)
        spelt = their_name(f"{name}.weight")
        if num_experts and ".mlp." in name:
            blocks = random_blocks(kind, num_experts * rows, 256, seed, spread=0.4).reshape(num_experts, rows, -1)
            spelt = spelt.replace(".weight", "_exps.weight")
        writer.add_tensor(spelt, blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    rng = np.random.default_rng(99)
    for n in range(2):
        if num_experts:
            writer.add_tensor(f"blk.{n}.ffn_gate_inp.weight", rng.normal(0, 0.1, (num_experts, 256)).astype(np.float32))
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = rng.normal(1.0, 0.2, 256).astype(np.float32)
            writer.add_tensor(their_name(f"model.layers.{n}.{name}.weight"), norm)
    writer.add_tensor("output_norm.weight", rng.normal(1.0, 0.2, 256).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Table:
    """Some sequences of one model, each on a slot with pages in no order, computed as a test asks for."""

    def __init__(
        self, loaded: loader.Loaded, num_slots: int = 4, longest: int = LONGEST, block_size: int = BLOCK_SIZE
    ) -> None:
        self.loaded, self.block_size = loaded, block_size
        pages = -(-longest // block_size)
        self.slots = Slots(num_slots, longest, pages, CPU)
        self.cache = KVCache(PagePool(num_slots * pages, block_size), CPU)
        self.cache.layers = self.cache.add_layers(loaded.model.layer_specs(torch.float32))
        for layer in self.cache.layers:  # what was never written must not be read
            for part, value in zip(layer, (1e3, -1e3)):
                part.fill_(value)
        order = 1 + np.random.default_rng(7).permutation(num_slots * pages).reshape(num_slots, pages)
        for slot in range(num_slots):
            self.slots.pages.write(slot, 0, order[slot].tolist())

    def begin(self, slot: int, tokens: list[int]) -> None:
        self.slots.begin(slot, tokens, len(tokens))

    def run(
        self,
        work: list[Work],
        nodes: tuple[Tensor, Tensor | None] | None = None,
        taps: tuple[int, ...] = (),
        first: Tensor | None = None,
    ) -> Any:
        return self.loaded.model.forward(self.pack(work, nodes, first), self.cache.layers, taps)

    def pack(
        self, work: list[Work], nodes: tuple[Tensor, Tensor | None] | None = None, first: Tensor | None = None
    ) -> Batch:
        given = None
        if nodes is not None:
            drafted, paths = nodes
            given = Nodes(drafted, torch.tensor([item.num_nodes for item in work[: len(drafted)]]), paths)
        batch = pack(work, self.slots, self.block_size, given)
        batch.layout.first = None if first is None else first[batch.places.owner]
        return batch

    def one_by_one(self, slot: int, start: int, stop: int) -> Tensor:
        """Final states of positions start … stop-1, a row at a time."""
        return torch.cat([self.run([Work(slot, position, 1)]).final for position in range(start, stop)])


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def same_bits(left: Tensor, right: Tensor) -> bool:
    assert left.dtype == right.dtype == torch.float32 and left.shape == right.shape
    return left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()


def random_tree(rng: np.random.Generator, size: int) -> list[int]:
    """Parents of `size` nodes: bushy, or deep, or anything between."""
    depth_first = rng.random()
    return [node - 1 if rng.random() < depth_first else int(rng.integers(-1, node)) for node in range(size)]


def path_of(parents: list[int], node: int) -> list[int]:
    above = [node]
    while parents[above[0]] >= 0:
        above.insert(0, parents[above[0]])
    return above


def paths_built() -> list[str]:
    """The dispatch paths this processor can run."""
    found = library()
    assert found is not None
    before = found.paceline_path()
    names = [name for name in ("portable", "avx2", "avx512", "amx") if found.paceline_select(name.encode())]
    found.paceline_select(before)
    return names
