"""How many pages of cache there are."""

from __future__ import annotations

import os

import torch

from paceline.errors import OptionError
from paceline.models.config import ModelConfig

CPU_CACHE_LIMIT = 4 * 2**30
DEFAULT_SHARE = 0.9


def count_pages(
    shape: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    max_num_seqs: int,
    block_size: int,
    share: float | None,
    asked: int | None,
) -> int:
    """Pages that every slot could fill, as far as memory goes; at least one sequence of full length must fit."""
    each = -(-max_model_len // block_size) + 1  # one more for drafts that reach over the end of a page
    if asked is not None:
        if asked < each:
            raise OptionError(
                f"num_pages={asked} cannot hold one sequence of max_model_len={max_model_len}; it needs "
                f"{each} pages of {block_size}"
            )
        return asked
    page_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * block_size * dtype.itemsize
    pages = min(_free_bytes(device, share) // page_bytes, each * max_num_seqs)
    if pages < each:
        raise OptionError(
            f"the memory left holds {pages * block_size} tokens of cache, fewer than max_model_len={max_model_len}; "
            "lower max_model_len or raise gpu_memory_utilization"
        )
    return int(pages)


def _free_bytes(device: torch.device, share: float | None) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - (share or DEFAULT_SHARE)) * total))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = int(free * (share or DEFAULT_SHARE))
    return wanted if share is not None else min(wanted, CPU_CACHE_LIMIT)
