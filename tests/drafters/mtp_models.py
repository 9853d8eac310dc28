"""GLM-4.5 and DeepSeek-V3 with MTP modules, all of transformers' own classes, written to disk as they are published."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.cli.checkpoints import make_tokenizer
from tests.drafters.equations import State
from tests.drafters.mtp_by_hand import Hand
from tests.drafters.tiny_readers import write

LAYERS = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
GLM = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = {**SHAPE, **LATENT, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
# For commands: of so many tokens as the tests' tokenizer has, of many positions, and of widths that can be packed.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "max_position_embeddings": 8192}
WIDE |= {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
KINDS = ("glm4_moe", "deepseek_v3")


def shake(module: Any, seed: int) -> None:
    """Norms and biases that are no longer ones and zeros, routers that have a choice."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("inv_freq"):
            continue
        about = 1.0 if "norm" in name else 0.0
        if tensor.dim() == 1 or name.endswith("gate.weight"):
            with torch.no_grad():
                tensor.copy_(about + 0.3 * torch.randn(tensor.shape, generator=generator))


@functools.cache
def model_of(kind: str) -> Any:
    torch.manual_seed(4)
    own = {"vocab_size": len(make_tokenizer()), "eos_token_id": 1, **WIDE} if kind == "deepseek_wide" else {}
    if kind == "glm4_moe":
        model = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**GLM)).eval().float()
    else:
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**DEEPSEEK, **own})).eval().float()
    shake(model, 4)
    return model


@functools.cache
def modules_of(kind: str, count: int) -> Any:
    torch.manual_seed(5)
    model = model_of(kind)
    model.config.num_mtp_layers = count
    made = MtpModel(model, count).eval().float()
    for layer in made.layers:
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.3)
    shake(made.layers, 5)
    return made


def module_state(kind: str, count: int, number: int, fused: bool = False) -> State:
    """One module's tensors as files name them behind its prefix; fused: experts in one stack, as transformers has."""
    found: State = {}
    for name, tensor in modules_of(kind, count).layers[number].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if fused or ".experts." not in f".{name}" or "shared_experts" in name:
            found[name] = tensor
        else:
            for expert, matrix in enumerate(tensor):
                parts = zip(("gate", "up"), matrix.chunk(2)) if "gate_up" in name else (("down", matrix),)
                found |= {f"mlp.experts.{expert}.{part}_proj.weight": rows for part, rows in parts}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def copies_of(kind: str) -> State:
    """What published modules hold of their target over again."""
    model = model_of(kind)
    return {"embed_tokens.weight": model.model.embed_tokens.weight, "shared_head.head.weight": model.lm_head.weight}


def named_modules(kind: str, count: int, copies: bool = False) -> State:
    found = {}
    for number in range(count):
        state = module_state(kind, count, number) | (copies_of(kind) if copies else {})
        found |= {f"model.layers.{LAYERS + number}.{name}": tensor.detach().clone() for name, tensor in state.items()}
    return found


def write_whole(folder: Path, kind: str, count: int, copies: bool = False) -> str:
    """A checkpoint with its modules inside."""
    model_of(kind).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    whole = load_file(folder / "model.safetensors") | named_modules(kind, count, copies)
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, folder / "model.safetensors")
    return str(folder)


def write_apart(folder: Path, kind: str, count: int, copies: bool = False) -> str:
    """The modules alone."""
    config = {**model_of(kind).config.to_dict(), "num_nextn_predict_layers": count}
    return str(write(folder, json.loads(json.dumps(config, default=str)), named_modules(kind, count, copies)))


def features_of(kind: str, text: list[int]) -> Tensor:
    """[n-1, H] behind the last norm."""
    with torch.no_grad():
        found: Tensor = model_of(kind).model(torch.tensor([text[:-1]])).last_hidden_state[0]
    return found


def drafts_of(kind: str, text: list[int], count: int) -> list[int]:
    """As many as there are modules, by transformers' own drafting."""
    cache = MtpCache(config=model_of(kind).config.get_mtp_config())
    places, ids = torch.arange(1, len(text))[None], torch.tensor([text[1:]])
    with torch.no_grad():
        drafted, _, _ = modules_of(kind, count)(ids, features_of(kind, text)[None], None, places, cache)
    return list(map(int, drafted[0]))


def hand_of(kind: str, count: int) -> Hand:
    """The equations around transformers' decoder layers."""
    made, model = modules_of(kind, count), model_of(kind)

    def layer(number: int, x: Tensor, w: State, places: Tensor) -> Tensor:
        rows, ids = x.float()[None], places[None]
        turns = model.model.rotary_emb(rows, position_ids=ids)
        mask = torch.full((1, 1, len(x), len(x)), float("-inf")).triu(1)
        with torch.no_grad():
            out = made.layers[number].mtp_block(rows, attention_mask=mask, position_ids=ids, position_embeddings=turns)
        return out[0].double()

    states = [module_state(kind, count, number) for number in range(count)]
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    return Hand("deepseek", states, layer, embedding, head, model.config.rms_norm_eps, state_first=False)
