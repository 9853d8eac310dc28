"""Quantised Hugging Face checkpoints, known by config, tensor names or dtypes, so that none is read as plain numbers.

Of their methods one can be read: 8-bit floats in blocks (`fp8`). GGUF files are another matter: their blocks say what
they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

from paceline.errors import CheckpointError
from paceline.models.fp8 import find_block

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUPPORTED = "supported: float checkpoints, fp8 ones with weight_block_size, and GGUF files"

# What the names of scales and packed matrices end in → who writes them.
_MARKS = {
    re.compile(r"\.(qweight|qzeros|scales|g_idx)$"): "gptq or awq",
    re.compile(r"(_scale_inv|\.weight_scale\w*|\.weight_packed|\.weight_zero_point)$"): "fp8 or compressed-tensors",
    re.compile(r"\.(SCB|weight\.(absmax|quant_map|quant_state\..+))$"): "bitsandbytes",
}


def refuse_config(values: Any, label: str) -> None:
    """By a config's `quantization_config`: a dictionary, transformers' object, or nothing."""
    if not values or find_block(values) is not None:
        return
    given: dict[str, Any] = values if isinstance(values, dict) else getattr(values, "__dict__", {})
    method = given.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(given) else "an unnamed method")
    raise CheckpointError(
        f"{label} is quantised with {getattr(method, 'value', method)}, which cannot be loaded yet; {SUPPORTED}"
    )


def _is_bitsandbytes(given: dict[str, Any]) -> bool:
    """Its older configs name no method."""
    return bool(given.get("load_in_8bit") or given.get("load_in_4bit"))


def refuse_names(names: Collection[str], label: str) -> None:
    for name in names:
        for mark, method in _MARKS.items():
            if mark.search(name):
                raise CheckpointError(
                    f"{label} holds {name}, so it is quantised with {method}, which cannot be loaded yet; {SUPPORTED}"
                )


def refuse_dtype(name: str, dtype: torch.dtype, label: str) -> None:
    if dtype not in FLOATS:
        kind = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{label}: tensor {name} is stored as {kind}, so it is quantised, which cannot be loaded yet; {SUPPORTED}"
        )
