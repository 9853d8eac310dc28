"""What the engine's process builds: no module of the tests' clients is imported there, which would take seconds."""

from __future__ import annotations

from typing import Any

from paceline import LLM
from paceline.kernels.cpu.library import library


def build(folder: str, drafter: Any, options: dict[str, Any]) -> LLM:
    import torch

    torch.set_num_threads(1)
    if (native := library()) is not None:
        native.paceline_threads(1)
    return LLM(folder, drafter, device="cpu", **options)
