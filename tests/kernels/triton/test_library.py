"""Fast kernels: products may be PyTorch's library's. Close to ours, chosen by rows or by what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.kernels.ops import activate
from paceline.testing import SETTINGS, prompts, tiny_llm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of nobody hold anything


@pytest.fixture
def table(tables: Any) -> Any:
    """What was measured of the library: nothing."""
    return tables.library


def rows_of(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def expected(x: Tensor, weight: Tensor, around: dict[str, Any]) -> Tensor:
    given, norm = x.double(), around.get("norm")
    if norm is not None:
        given = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()
    made = given @ weight.double().T
    if "bias" in around:
        made = made + around["bias"].double()
    if "gate" in around:
        first, second = made.chunk(2, dim=-1)
        made = activate(first, around["gate"]) * second
    return made + around["residual"].double() if "residual" in around else made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stands_around_a_product_is_done_to_the_librarys_too(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.kernels.triton import library
    from paceline.kernels.triton.matmul import Norm

    x, weight = rows_of(device, 5, 192).to(dtype), rows_of(device, 80, 192, seed=1).to(dtype)
    norm = Norm(1 + 0.1 * rows_of(device, 192, seed=2).to(dtype), 1e-5)
    bias, residual = rows_of(device, 80, seed=3).to(dtype), rows_of(device, 5, 80, seed=4).to(dtype)
    for around in (
        {"norm": norm},
        {"residual": residual},
        {"bias": bias, "residual": residual},
        {"norm": norm, "bias": bias, "gate": "silu", "residual": residual[:, 40:]},
    ):
        every = {"bias": None, "norm": None, "residual": None, "gate": None, **around}
        made, wanted = library.product(x, weight, **every), expected(x, weight, around)  # type: ignore[arg-type]
        assert made.dtype == dtype
        assert (made.double() - wanted).abs().max() <= wanted.abs().max() * (1e-5 if dtype == torch.float32 else 2e-2)


def test_few_rows_stay_ours_and_what_was_measured_decides_first(device: torch.device, table: Any) -> None:
    from paceline.kernels.triton.tiles import Shape, prefers_library

    shape, gated = Shape(4096, 4096, False, True), Shape(4096, 4096, True, True)
    assert [prefers_library(rows, shape, torch.bfloat16) for rows in (1, 31, 32, 256)] == [False, False, True, True]
    assert [prefers_library(rows, gated, torch.bfloat16) for rows in (256, 512)] == [False, True]
    table[256, shape, torch.bfloat16], table[16, shape, torch.bfloat16] = False, True
    assert [prefers_library(rows, shape, torch.bfloat16) for rows in (1, 128, 256)] == [True, True, False]


def test_who_was_faster_is_measured_kept_in_a_file_and_found_again(
    device: torch.device, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import tuning
    from paceline.kernels.triton.tiles import Shape

    shapes = [Shape(64, 32, False, True), Shape(32, 64, True, False)]
    times = iter([2.0, 1.0, 1.0, 2.0])  # ours, theirs
    monkeypatch.setattr(tuning, "measure", lambda calls: next(times))
    monkeypatch.setattr(tuning, "MOST_COPIES", 1)
    tuning.try_library(shapes, [16], device, torch.bfloat16)
    wanted = {(16, shapes[0], torch.bfloat16): True, (16, shapes[1], torch.bfloat16): False}
    assert table == wanted
    tuning.save(tmp_path / "tiles.json", device)
    table.clear()
    assert tuning.load(tmp_path / "tiles.json", device)
    assert table == wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model on a CPU")
def test_an_engine_with_fast_kernels_takes_the_librarys_products_for_many_rows(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.kernels.triton import library

    seen: list[int] = []
    product = library.product
    monkeypatch.setattr(library, "product", lambda x, *rest: seen.append(len(x)) or product(x, *rest))
    long = [(prompts(1)[0] * 8)[:32]]
    made = []
    for exact in (True, False):
        llm = tiny_llm(kernels="triton", exact_kernels=exact)
        made.append(llm.generate(long, dataclasses.replace(SETTINGS["greedy"], max_tokens=1))[0].outputs[0].token_ids)
        assert bool(seen) is not exact
    assert {*seen} == {32}
    assert made[0] == made[1]


def test_fast_kernels_are_refused_in_one_sentence_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("paceline.kernels.triton.device.INTERPRETED", False)
    with pytest.raises(OptionError, match=r"^fast kernels \(exact_kernels=False\) need a GPU, not cpu"):
        tiny_llm(kernels="auto", exact_kernels=False)
    with pytest.raises(OptionError, match=r"are Triton's, not 'native'; allowed kernels: auto, triton$"):
        tiny_llm(kernels="native", exact_kernels=False)
    with pytest.raises(OptionError, match="exact_kernels='no'"):
        tiny_llm(kernels="triton", exact_kernels="no")
