"""Numbers that rounds are rounded up to: few sizes serve all, and little of each is left over."""

from __future__ import annotations

FEW = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sequences that decode
MIXED = (8, 32, 128, 256)  # and those beside prompt chunks
ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # with prompt chunks
NODES = (0, 1, 2, 3, 5, 7, 15, 31, 63)  # with the token before them, mostly rows that fill a kernel's tiles
MIXED_NODES = (0, 7, 63)  # beside prompt chunks, whose rows cost more than nodes that are left over


def up(count: int, allowed: tuple[int, ...]) -> int | None:
    return next((size for size in allowed if size >= count), None)
