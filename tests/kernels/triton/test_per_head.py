"""Heads that go through matrices of their own, and the models that have them: DeepSeek's."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.products import check, make, rows_of

HEADS, KEPT, DEPTH, WIDTH = 3, 7, 100, 70


@pytest.mark.parametrize("kept", [0, KEPT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_is_multiplied_by_its_matrix_and_the_rest_is_kept(
    device: torch.device, dtype: torch.dtype, kept: int
) -> None:
    from paceline.kernels.triton.per_head import per_head

    x = rows_of(device, 5, HEADS * (kept + DEPTH) + 9, dtype=dtype)[:, 9:]  # rows lie apart
    weight = rows_of(device, HEADS * WIDTH, DEPTH, seed=1, dtype=dtype)
    found = per_head(x, weight, HEADS).view(5, HEADS, kept + WIDTH)
    given = x.reshape(5, HEADS, kept + DEPTH)
    wanted = torch.einsum("tha,hba->thb", given[..., kept:].double(), weight.view(HEADS, WIDTH, DEPTH).double())
    assert torch.equal(found[..., :kept], given[..., :kept])
    check(found[..., kept:].flatten(1), wanted.flatten(1), dtype)
    assert per_head(x[:0], weight, HEADS).shape == (0, HEADS * (kept + WIDTH))


def test_a_row_has_the_same_bits_however_many_are_computed(device: torch.device) -> None:
    from paceline.kernels.triton.per_head import per_head

    x, weight = make(device, 130, HEADS * DEPTH), make(device, HEADS * WIDTH, DEPTH, seed=1)
    whole = per_head(x, weight, HEADS)
    for count in (1, 17, 64, 65):
        assert torch.equal(per_head(x[:count], weight, HEADS), whole[:count])


def test_matrices_of_another_dtype_or_depth_are_refused_in_a_sentence(device: torch.device) -> None:
    from paceline.kernels.triton.per_head import per_head

    x, weight = rows_of(device, 2, HEADS * DEPTH), rows_of(device, HEADS * WIDTH, DEPTH + 1)
    with pytest.raises(ValueError, match="need matrices"):
        per_head(x, weight, HEADS)
    with pytest.raises(ValueError, match="need matrices"):
        per_head(x, weight[:, :DEPTH].bfloat16(), HEADS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a model on a CPU")
@pytest.mark.parametrize("absorbed", [True, False])
def test_deepseek_says_what_transformers_says_whole_and_token_by_token(device: torch.device, absorbed: bool) -> None:
    """And a position's logits have the same bits, whatever is computed with it."""
    from tests.models.running import run
    from tests.models.tiny_deepseek import build, tiny_deepseek

    model, ids = tiny_deepseek("experts", num_hidden_layers=2), list(range(3, 12))
    loaded = build(model, "triton", absorbed)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    found = [run(loaded, ids, chunks)[0] for chunks in ([9], [4, 1, 4])]
    assert (found[0] - wanted).abs().max() <= 1e-4 and wanted.std() > 0.05
    assert torch.equal(*found)
