"""Qwen3-Next's module: its forward is what its equations say; at run time it is refused, for want of its target."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

from paceline import MTP
from paceline.drafters.base import Target
from paceline.drafters.mtp_form import FORMS
from paceline.drafters.mtp_network import Module
from paceline.errors import CheckpointError
from paceline.kernels import select
from paceline.kernels.training import Sequences, run_dense
from paceline.models.config import make_config
from paceline.models.qwen3_next import Qwen3Next, read
from paceline.models.sources import ModelSource
from paceline.models.weights import Weights
from paceline.testing import tiny_llm
from tests.drafters.equations import State, doubled, look, rms, turn
from tests.drafters.tiny_readers import write
from tests.models.running import CPU

HIDDEN, HEADS, KV_HEADS, WIDTH, EXPERTS, CHOSEN, EPS = 32, 4, 2, 16, 8, 3, 1e-6
CONFIG = transformers.Qwen3NextConfig(
    vocab_size=97,
    hidden_size=HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=WIDTH,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    layer_types=["full_attention"],
    max_position_embeddings=64,
    initializer_range=0.3,
)
CONFIG._attn_implementation = "eager"
TEXT = [int(n) for n in torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(6))]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Files hold what is added to 1."""
    return rms(x, 1 + weight, EPS)


def turn_part(x: Tensor, places: Tensor) -> Tensor:
    part = WIDTH // 4
    return torch.cat([turn(x[..., :part], places, 10000.0), x[..., part:]], dim=-1)


def mixed(x: Tensor, w: State) -> Tensor:
    """The chosen experts, weighed, and a shared one as large as its gate says."""
    chances = torch.softmax(x @ w["mlp.gate.weight"].T, dim=-1)
    share, chosen = chances.topk(CHOSEN)
    out = torch.sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * gated(x, w, "mlp.shared_expert.")
    for row in range(len(x)):
        for weight, expert in zip(share[row] / share[row].sum(), chosen[row].tolist()):
            out[row] = out[row] + weight * gated(x[row], w, f"mlp.experts.{expert}.")
    return out


def gated(x: Tensor, w: State, name: str) -> Tensor:
    gate = torch.nn.functional.silu(x @ w[f"{name}gate_proj.weight"].T)
    return (gate * (x @ w[f"{name}up_proj.weight"].T)) @ w[f"{name}down_proj.weight"].T


def layer(x: Tensor, w: State, places: Tensor) -> Tensor:
    normed = norm(x, w["input_layernorm.weight"])
    both = (normed @ w["self_attn.q_proj.weight"].T).view(len(x), HEADS, 2, WIDTH)
    k, v = ((normed @ w[f"self_attn.{part}_proj.weight"].T).view(len(x), KV_HEADS, WIDTH) for part in "kv")
    q, k = norm(both[:, :, 0], w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
    seen = look(turn_part(q, places), turn_part(k, places), v, places[None] <= places[:, None])
    x = x + (seen * torch.sigmoid(both[:, :, 1].flatten(1))) @ w["self_attn.o_proj.weight"].T
    return x + mixed(norm(x, w["post_attention_layernorm.weight"]), w)


def module(tokens: Tensor, states: Tensor, w: State, embedding: Tensor, first: int) -> Tensor:
    parts = [norm(embedding[tokens], w["pre_fc_norm_embedding.weight"]), norm(states, w["pre_fc_norm_hidden.weight"])]
    x = torch.cat(parts, dim=1) @ w["fc.weight"].T
    return norm(layer(x, doubled(w, "layers.0."), torch.arange(first, first + len(tokens))), w["norm.weight"])


def block() -> Any:
    torch.manual_seed(8)
    made = Qwen3NextDecoderLayer(CONFIG, 0).eval().float()
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.dim() > 1 or "norm" in name else 0.2)
    return made


def state_of(made: Any) -> State:
    """As published, without `mtp.`."""
    generator = torch.Generator().manual_seed(9)
    found = {f"{name}.weight": 0.3 * torch.randn(HIDDEN, generator=generator) for name in NORMS}
    found["fc.weight"] = 0.2 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
    for name, tensor in made.state_dict().items():
        if ".experts." not in name:
            found[f"layers.0.{name}"] = tensor.detach().clone()
            continue
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate", "up"), matrix.chunk(2)) if "gate_up" in name else (("down", matrix),)
            found |= {f"layers.0.mlp.experts.{expert}.{part}_proj.weight": rows.clone() for part, rows in parts}
    return found


NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def test_the_layers_equations_are_those_of_transformers() -> None:
    made, x = block(), torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(1))
    places = torch.arange(12)
    turns = Qwen3NextRotaryEmbedding(CONFIG)(x[None], places[None])
    mask = torch.full((1, 1, 12, 12), float("-inf")).triu(1)
    with torch.no_grad():
        wanted = made(x[None], position_embeddings=turns, attention_mask=mask)[0]
    found = layer(x.double(), doubled(state_of(made), "layers.0."), places)
    assert (found - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_the_module_gives_what_its_equations_give(kernels: str) -> None:
    torch.manual_seed(2)
    base = transformers.Qwen3NextForCausalLM(CONFIG).eval().float()
    config = make_config({**read(CONFIG), "architecture": "qwen3_next"}, "the config")
    ops = select(kernels, CPU, torch.float32, None)
    model = Qwen3Next(config, ops, Weights(ModelSource(base), ops, torch.float32, CPU), 64)
    state = state_of(block())
    form = next(form for form in FORMS if form.families == ("qwen3_next",))
    target = Target(model, None, CPU, torch.float32, 64, 2, kernels)
    made = Module(form, Weights(Held(state), ops, torch.float32, CPU), target, 0)
    features = torch.randn(len(TEXT) - 1, HIDDEN, generator=torch.Generator().manual_seed(3))
    ids, places = torch.tensor(TEXT[1:]), torch.arange(1, len(TEXT))
    found = run_dense(made, Sequences(ids[None], places[None], {"states": features[None]})).final[0]
    embedding = base.model.embed_tokens.weight.detach().double()
    own = doubled(state)
    wanted = module(ids, features.double(), own, embedding, 1)
    assert (found - wanted).abs().max() <= 1e-4
    own["fc.weight"] = own["fc.weight"].roll(HIDDEN, 1)
    assert (found - module(ids, features.double(), own, embedding, 1)).abs().max() > 0.1, "which half is which is seen"


class Held:
    """A source of tensors in memory."""

    label = "a module"

    def __init__(self, state: State) -> None:
        self.files: list[Path] = []
        self._state = state

    def names(self) -> Collection[str]:
        return self._state.keys()

    def read(self, name: str) -> Tensor:
        return self._state[name]

    def kind(self, name: str) -> str:
        return "float"

    def release(self) -> None:
        """Nothing was opened."""


def test_the_target_of_such_layers_alone_says_what_transformers_says() -> None:
    torch.manual_seed(2)
    base = transformers.Qwen3NextForCausalLM(CONFIG).eval().float()
    for name, parameter in base.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    config = make_config({**read(CONFIG), "architecture": "qwen3_next"}, "the config")
    ops = select("torch", CPU, torch.float32, None)
    model = Qwen3Next(config, ops, Weights(ModelSource(base), ops, torch.float32, CPU), 64)
    places = torch.arange(len(TEXT))[None]
    final = run_dense(model, Sequences(torch.tensor([TEXT]), places)).final
    with torch.no_grad():
        wanted = base(torch.tensor([TEXT])).logits
    assert (model.logits(final[0]) - wanted[0]).abs().max() <= 1e-4


def test_at_run_time_it_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, {f"mtp.{name}": tensor for name, tensor in state_of(block()).items()})
    told = r"holds an MTP module of qwen3_next: its target has layers of linear attention, which cannot be run yet$"
    with pytest.raises(CheckpointError, match=told):
        tiny_llm(MTP(str(folder)))
    with pytest.raises(CheckpointError, match=told):
        tiny_llm(str(folder))
