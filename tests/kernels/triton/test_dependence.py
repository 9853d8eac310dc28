"""A GPU runs programs in any order, and starts a kernel before the last has ended: no text depends on it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline import Eagle
from paceline.engine.budget import FixedBudget
from paceline.testing import SETTINGS, prompts, tiny_llm, tiny_model
from tests.drafters.contract import DRAFTERS
from tests.drafters.tiny_eagle import tiny_eagle
from tests.kernels.triton.dependence import Dependence

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]

EARLY = {"fold", "store_heads", "_join", "_pack_kernel", "_walk_kernel", "_observe_kernel", "_put_kernel"}


def windowed() -> Any:
    """Three layers see eight positions, one sees all; heads are normed."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=8, layer_types=kinds,
        max_position_embeddings=256, initializer_range=0.4, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval().float()


def latent() -> Any:
    from tests.models.tiny_deepseek import tiny_deepseek

    return tiny_deepseek("experts", num_hidden_layers=2)


CASES: dict[str, tuple[str, Callable[[], Any], Callable[[], Any]]] = {
    "a head's chain": ("greedy", tiny_model, lambda: Eagle(tiny_eagle("third"), 2)),
    "a head's grown tree": (
        "seeded",
        tiny_model,
        lambda: Eagle(tiny_eagle("third"), 4, tree="dynamic", top_k=2, depth=1),
    ),
    "a draft model": ("everything", tiny_model, lambda: DRAFTERS["draft_model"]({})),
    "lookups": ("seeded", tiny_model, lambda: DRAFTERS["ngram"]({})),
    "windows": ("greedy", windowed, lambda: DRAFTERS["ngram"]({})),
    "latent layers and experts": ("seeded", latent, lambda: None),
}


@pytest.mark.parametrize("case", CASES)
def test_programs_in_any_order_and_kernels_that_start_early_say_the_same(case: str, monkeypatch: Any) -> None:
    pytest.importorskip("triton")
    setting, target, drafter = CASES[case]
    params = dataclasses.replace(SETTINGS[setting], min_tokens=0, max_tokens=3)
    asked = [prompt[:length] for prompt, length in zip(prompts(2), (12, 4) if case == "windows" else (6, 4))]
    wanted = tiny_llm(target=target()).generate(asked, params)
    alike = {"kernels": "triton", "budget": "fixed", "max_num_seqs": 2}
    llm = tiny_llm(drafter(), behind=1, captured=True, target=target(), **alike)
    llm.engine.budget = FixedBudget(4)
    with Dependence(monkeypatch, random.Random(case)) as found:
        said = llm.generate(asked, params)
    assert [output.outputs[0].token_ids for output in said] == [output.outputs[0].token_ids for output in wanted]
    assert found.faults == []
    assert {"product", "look"} <= {launch.name for launch in found.launches if launch.waits_first}
    early = {launch.name for launch in found.launches if not launch.waits_first}
    assert early & EARLY, "kernels let the next one start at once"
    assert any(launch.too_early for launch in found.launches if launch.name == "look"), "and it looks around meanwhile"


@pytest.mark.parametrize(
    ("tile", "kernel"), [({"parts": 4}, "product_of_parts"), ({"boxes": True}, "product_of_boxes")]
)
def test_products_of_boxes_and_in_parts_read_nothing_too_early(tile: Any, kernel: str, monkeypatch: Any) -> None:
    """Of sixteen bits, and a head's of eight; a chain that is sampled."""
    pytest.importorskip("triton")
    from paceline.kernels.triton import matmul
    from paceline.kernels.triton.tiles import Tile

    params, asked = dataclasses.replace(SETTINGS["seeded"], min_tokens=0, max_tokens=3), [prompts(1)[0][:4]]
    alike = {"kernels": "triton", "dtype": "bfloat16", "max_num_seqs": 2}
    wanted = tiny_llm(**alike).generate(asked, params)
    monkeypatch.setattr(matmul, "find_tile", lambda *given: Tile(16, 16, 64, **tile))
    llm = tiny_llm(Eagle(tiny_eagle("third"), 2), behind=1, captured=True, budget="fixed", **alike)
    with Dependence(monkeypatch, random.Random(kernel)) as found:
        said = llm.generate(asked, params)
    assert [output.outputs[0].token_ids for output in said] == [output.outputs[0].token_ids for output in wanted]
    assert found.faults == [] and kernel in {launch.name for launch in found.launches}


def faults_of_a_round() -> list[str]:
    params = dataclasses.replace(SETTINGS["greedy"], max_tokens=1)
    llm = tiny_llm(behind=1, kernels="triton")
    with pytest.MonkeyPatch.context() as patch, Dependence(patch) as found:
        llm.generate([[5, 6, 7]], params)
    return found.faults


def test_a_product_that_lets_the_next_kernel_start_before_it_has_waited_is_found(monkeypatch: Any) -> None:
    """Then those behind it read a layout that may not be there yet."""
    pytest.importorskip("triton")
    from paceline.kernels.triton import product

    assert faults_of_a_round() == []
    begin = product.begin
    monkeypatch.setattr(product, "begin", lambda pdl, early=False: begin(pdl, True))
    assert "store_heads reads what _pack_kernel may still write" in faults_of_a_round()


def test_each_mistake_is_found(monkeypatch: Any) -> None:
    pytest.importorskip("triton")
    from tests.kernels.triton.mistaken import leave, read_at_once, write, write_at_once

    found, x, y, z = Dependence(monkeypatch), *torch.zeros(3, 2)
    write[(2,)](x, EARLY=False)
    write[(2,)](z, EARLY=False)
    read_at_once[(2,)](x, y, SHARED=True)
    assert found.faults == [] and y.tolist() == [1.0, 1.0], "a kernel that waits first stands between them"
    read_at_once[(2,)](x, y, SHARED=False)
    write[(2,)](z, EARLY=True)
    read_at_once[(2,)](y, x, SHARED=True)
    write_at_once[(2,)](x)
    leave[(2,)](x, FIRST=True)
    leave[(2,)](x, FIRST=False)
    assert found.faults == [
        "read_at_once reads from its own cache what write wrote",
        "read_at_once reads what read_at_once may still write",
        "write_at_once writes before it waits",
        "leave: no program waits",
    ]
