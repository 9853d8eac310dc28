"""Rotary positions, half-split layout (the first half of a head rotates against the second)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """[head_dim / 2]; `factors` are per-frequency divisors that a GGUF file carries instead of scaling parameters."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if factors is not None:
        return frequencies / factors.float().cpu()
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope, head_dim)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequencies
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = (1 - blend) * frequencies / rope.factor + blend * frequencies
    result = torch.where(wavelength > low, frequencies / rope.factor, smooth)
    return torch.where(wavelength < high, frequencies, result)


def _yarn(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Waves of many turns within the original length are kept, those of few stretched, with a ramp between them."""

    def place(turns: float) -> float:  # where in a head a wave makes so many
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = place(rope.beta_fast), place(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)


def tables(rope: RopeConfig, head_dim: int, max_position: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [positions, head_dim / 2], made once."""
    frequencies = inverse_frequencies(rope, head_dim, factors)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), frequencies)
    return angles.cos() * rope.amplitude, angles.sin() * rope.amplitude
