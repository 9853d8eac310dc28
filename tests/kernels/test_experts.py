"""Experts: who is chosen, what they are summed to, on all kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from paceline.kernels import experts, select
from paceline.kernels.eager import EagerOps
from paceline.kernels.ops import Experts, Forward, Inputs, Routing, Weight
from paceline.kernels.training import Sequences, run_dense, weights_of
from tests.kernels.mixtures import EXPERTS, HIDDEN, ROUTINGS, WIDE, Mixture, by_hand, choose, rows
from tests.kernels.tiny import CPU, same_bits

KERNELS = ["torch", "native", "reference"]
TOLERANCE = 1e-5
META = torch.device("meta")


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_go_through_their_experts(kernels: str, name: str) -> None:
    mixture = Mixture(name, select(kernels, CPU, torch.float32))
    for count in (1, 3, 40):
        x, scores = rows(count, count)
        found, wanted = mixture.run(x, scores), by_hand(mixture, x, scores)
        assert (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
        assert wanted.std() > 0.1


@pytest.mark.parametrize("way", [experts._by_expert, experts._by_row, experts._by_all])
@pytest.mark.parametrize("name", ROUTINGS)
def test_all_ways_of_the_torch_kernels_agree(name: str, way: Any) -> None:
    mixture = Mixture(name, EagerOps())
    x, scores = rows(20)
    stacks = (
        mixture.experts.gate_up.data.view(EXPERTS, 2 * WIDE, HIDDEN),
        mixture.experts.down.data.view(EXPERTS, HIDDEN, WIDE),
    )
    found = way(x, experts.route(scores, mixture.routing, mixture.bias), *stacks, "silu")
    assert (found - by_hand(mixture, x, scores)).abs().max() <= 1e-5


def test_what_an_expert_makes_of_rows_that_did_not_choose_it_is_nothing() -> None:
    mixture = Mixture("mixtral", EagerOps())
    mixture.experts.gate_up.data[: 2 * WIDE] = torch.nan
    x, scores = rows(6)
    scores[:, 0] = -9
    scores[2, 0] = 9
    chosen = experts.route(scores, mixture.routing, None)
    stacks = (
        mixture.experts.gate_up.data.view(EXPERTS, 2 * WIDE, HIDDEN),
        mixture.experts.down.data.view(EXPERTS, HIDDEN, WIDE),
    )
    for way in (experts._by_expert, experts._by_row, experts._by_all):
        assert way(x, chosen, *stacks, "silu").isnan().all(1).tolist() == [row == 2 for row in range(6)]


@pytest.mark.parametrize("name", ROUTINGS)
def test_of_equals_the_lower_expert_and_the_lower_group_are_chosen(name: str) -> None:
    routing = ROUTINGS[name]
    for seed in range(50):
        scores = torch.randint(0, 3, (1, EXPERTS), generator=torch.Generator().manual_seed(seed)).float()
        wanted = choose(scores[0].tolist(), routing, [0.0] * EXPERTS)
        found = experts.route(scores, routing, None)
        assert found.ids[0].tolist() == list(wanted)
        assert found.weights[0].tolist() == pytest.approx(list(wanted.values()), rel=1e-5)


class Cancelling:
    """Three experts that give 2e8, -2e8 and 2, each weighed a half; the third is the best, the second the worst."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        one = torch.zeros(WIDE, HIDDEN)
        one[0, 0] = 1.0
        down = [torch.zeros(HIDDEN, WIDE) for _ in range(3)]
        for matrix, value in zip(down, (2e8, -2e8, 2.0)):
            matrix[:, 0] = value
        stacks = [ops.pack(parts, torch.float32, CPU) for parts in ([one] * 6, down)]
        self.experts = Experts(*stacks, "relu", Routing(3, "sigmoid", False), torch.tensor([0.1, 0.0, 0.2]))

    def describe(self, f: Forward) -> Any:
        return f.experts(f.input("x", HIDDEN), f.input("scores", 3), self.experts)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sums_are_in_ascending_order_of_the_experts(kernels: str) -> None:
    """In any other the small one is lost beside a large one."""
    described = Cancelling(select(kernels, CPU, torch.float32))
    inputs = Inputs(None, None, {"x": torch.ones(5, HIDDEN), "scores": torch.zeros(5, 3)})
    assert (described.ops.run(described, inputs, (), (), None).final == 1.0).all()
    if kernels == "torch":
        chosen = experts.route(torch.zeros(5, 3), described.experts.routing, described.experts.bias)
        given = described.experts
        stacks = given.gate_up.data.view(3, 2 * WIDE, HIDDEN), given.down.data.view(3, HIDDEN, WIDE)
        for way in (experts._by_expert, experts._by_row, experts._by_all):
            assert (way(torch.ones(5, HIDDEN), chosen, *stacks, "relu") == 1.0).all()


@pytest.mark.parametrize("kernels", ["torch", "reference"])
@pytest.mark.parametrize("rows_of", [1, 30])
def test_shapes_need_no_data(kernels: str, rows_of: int) -> None:
    """A guard runs rounds on a device that has none."""
    mixture = Mixture("groups", select(kernels, CPU, torch.float32))
    for weight in (mixture.experts.gate_up, mixture.experts.down):
        weight.data = weight.data.to(META)
    mixture.experts.bias = torch.empty(EXPERTS, device=META)
    found = mixture.run(torch.empty(rows_of, HIDDEN, device=META), torch.empty(rows_of, EXPERTS, device=META))
    assert found.shape == (rows_of, HIDDEN) and found.device == META


def test_the_reference_computes_a_row_the_same_wherever_it_stands() -> None:
    mixture = Mixture("groups", select("reference", CPU, torch.float32))
    x, scores = rows(17)
    whole = mixture.run(x, scores)
    assert all(same_bits(mixture.run(x[r : r + 1], scores[r : r + 1]), whole[r : r + 1]) for r in range(17))
    assert same_bits(mixture.run(x[3:9].clone(), scores[3:9].clone()), whole[3:9])


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_a_router_wider_than_the_rows_widens_them_and_nothing_narrows_them(kernels: str) -> None:
    forward = select(kernels, CPU, torch.float32).forward(Inputs(None, None), (), ())  # type: ignore[attr-defined]
    matrix, x = torch.randn(EXPERTS, HIDDEN), torch.randn(3, HIDDEN).bfloat16()
    found = forward.linear(x, Weight(matrix, (EXPERTS, HIDDEN)), None)
    assert found.dtype == torch.float32 and torch.allclose(found, x.float() @ matrix.T, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"dtype|BFloat16"):
        forward.linear(x.float(), Weight(matrix.bfloat16(), (EXPERTS, HIDDEN)), None)


# ---- transformers' own blocks

SHAPE: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "hidden_act": "silu"}
SHARED: dict[str, Any] = {**SHAPE, "moe_intermediate_size": WIDE, "n_routed_experts": EXPERTS}
BLOCKS: dict[str, tuple[Any, Any, Routing]] = {
    "mixtral": (
        MixtralSparseMoeBlock,
        transformers.MixtralConfig(**SHAPE, intermediate_size=WIDE, num_local_experts=EXPERTS),
        Routing(3, "softmax", True),
    ),
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=WIDE, num_experts=EXPERTS, norm_topk_prob=True),
        Routing(3, "softmax", True),
    ),
    "qwen3 as it is": (
        Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=WIDE, num_experts=EXPERTS, norm_topk_prob=False),
        Routing(3, "softmax", False),
    ),
    "deepseek": (
        DeepseekV3MoE,
        transformers.DeepseekV3Config(**SHARED, n_group=4, topk_group=2, routed_scaling_factor=2.5),
        Routing(3, "sigmoid", True, 2.5, 4, 2),
    ),
    "glm": (
        Glm4MoeMoE,
        transformers.Glm4MoeConfig(**SHARED, n_group=2, topk_group=1, routed_scaling_factor=1.7, norm_topk_prob=False),
        Routing(3, "sigmoid", False, 1.7, 2, 1),
    ),
}


def make_block(name: str) -> Any:
    kind, config, _ = BLOCKS[name]
    torch.manual_seed(1)
    block = kind(config).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
    if hasattr(block.gate, "e_score_correction_bias"):
        block.gate.e_score_correction_bias.copy_(torch.randn(EXPERTS) / 4)
    return block


class Described:
    """A block of transformers' as a description: its router's linear, then the experts."""

    def __init__(self, block: Any, routing: Routing, ops: Any) -> None:
        self.ops = ops
        wide, narrow = block.experts.gate_up_proj.detach(), block.experts.down_proj.detach()
        self.router = ops.pack([block.gate.weight.detach()], torch.float32, CPU, exact=True)
        stacks = [ops.pack(list(stack), torch.float32, CPU) for stack in (wide, narrow)]
        self.experts = Experts(*stacks, "silu", routing, getattr(block.gate, "e_score_correction_bias", None))

    def describe(self, f: Forward) -> Any:
        x = f.input("x", HIDDEN)
        return f.experts(x, f.linear(x, self.router, None), self.experts)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_transformers(name: str, kernels: str) -> None:
    block = make_block(name)
    if hasattr(block, "shared_experts"):
        nn.init.zeros_(block.shared_experts.down_proj.weight)
    described = Described(block, BLOCKS[name][2], select(kernels, CPU, torch.float32))
    x = torch.randn(1, 50, HIDDEN)
    with torch.no_grad():
        wanted = block(x)[0]
    found = described.ops.run(described, Inputs(None, None, {"x": x[0]}), (), (), None).final
    assert (found - wanted).abs().max() <= 1e-5
    assert wanted.std() > 0.1


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_those_of_transformers(name: str) -> None:
    block = make_block(name)
    if hasattr(block, "shared_experts"):
        nn.init.zeros_(block.shared_experts.down_proj.weight)
    described = Described(block, BLOCKS[name][2], EagerOps())
    weights = weights_of(described)
    assert [weight.shape for weight in weights] == [
        (EXPERTS, HIDDEN),
        (EXPERTS * 2 * WIDE, HIDDEN),
        (EXPERTS * HIDDEN, WIDE),
    ]
    for weight in weights:
        weight.requires_grad_()
    theirs = torch.randn(2, 25, HIDDEN)
    ours = theirs.clone().requires_grad_()
    theirs.requires_grad_()
    positions = torch.arange(25).expand(2, -1)
    found = run_dense(described, Sequences(None, positions, {"x": ours})).final
    slope: Tensor = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * slope).sum().backward()
    (block(theirs) * slope).sum().backward()
    assert theirs.grad is not None and ours.grad is not None
    wanted = [block.gate.weight.grad, block.experts.gate_up_proj.grad, block.experts.down_proj.grad, theirs.grad]
    for tensor, gradient in zip([*weights, ours], wanted, strict=True):
        assert tensor.grad is not None and gradient.abs().max() > 0.1
        assert (tensor.grad.view_as(gradient) - gradient).abs().max() <= 1e-4 * gradient.abs().max()
