"""How many threads PyTorch's own operations take beside the native kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FEW = 8  # sequences


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """PyTorch on one thread: for a few rows its team takes as long to meet as to work, and much longer on a machine
    where others want the cores, since its threads spin while they wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
