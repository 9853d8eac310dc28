"""Float matrices packed at load are blocks as a file would keep them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from paceline.kernels.blocks import Blocks
from paceline.kernels.quantise import METHODS, quantise


@pytest.mark.parametrize("kind, steps", [("Q8_0", 254), ("Q4_1", 15)])
def test_a_packed_matrix_is_read_as_the_oracle_reads_it_and_is_near_the_matrix(kind: str, steps: int) -> None:
    matrix = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    packed = quantise(matrix, kind)
    assert isinstance(packed, Blocks) and packed.kind == kind and packed.shape == (7, 96)
    wanted = gguf.quants.dequantize(packed.raw, gguf.GGMLQuantizationType[kind])
    assert packed.dequantize().numpy().tobytes() == wanted.astype(np.float32).tobytes()
    groups, found = matrix.view(7, -1, 32), packed.dequantize().view(7, -1, 32)
    reach = 2 * groups.abs().amax(2) if kind == "Q8_0" else groups.amax(2) - groups.amin(2)
    allowed = 0.55 * reach / steps + 2e-3  # half a step, and what scale and minimum lost as halves
    assert ((found - groups).abs().amax(2) <= allowed).all()


def test_every_method_makes_one_of_these_kinds_and_odd_widths_stay_as_they_are() -> None:
    assert set(METHODS.values()) == {"Q8_0", "Q4_1"}
    matrix = torch.ones(2, 33)
    assert quantise(matrix, "Q8_0") is matrix
