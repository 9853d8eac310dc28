"""Numbers that rounds are rounded up to: few sizes serve all, and little of each is left over."""

from __future__ import annotations

FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences that decode
MIXED = (8, 32, 128, 256)  # and those beside prompt chunks
ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # with prompt chunks
NODES = (0, 1, 2, 3, 5, 8, 16, 32, 64)
MIXED_NODES = (0, 8, 64)  # beside prompt chunks, whose rows cost more than nodes that are left over


def up(count: int, allowed: tuple[int, ...]) -> int | None:
    return next((size for size in allowed if size >= count), None)
