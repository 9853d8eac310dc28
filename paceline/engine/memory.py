"""How many pages of cache there are. It knows devices and what the operating system tells; callers say bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.cache.slots import SPREAD
from paceline.drafters.base import Target
from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.kernels.ops import LayerSpec
from paceline.models.config import ModelConfig

CPU_CACHE_LIMIT = 4 * 2**30
DEFAULT_SHARE = 0.9
ROOT = Path("/")
# On an accelerator, beside weights and cache. Rounds that are captured share one pool, so there are two of the largest.
ROUNDS_AT_ONCE = 2
CODE_BYTES = 256 * 2**20  # kernels and graphs themselves
STREAMS, WIDE_STREAMS, LOGIT_COPIES = 8, 3, 4  # tensors alive at a time: as wide as the state, as the feed-forward; [V]


def page_bytes(specs: Sequence[LayerSpec], block_size: int, tail_bytes: int) -> int:
    """Of one page, in all these layers under it, and its tail."""
    return block_size * sum(spec.row_bytes for spec in specs) + tail_bytes


def check_room(wanted: int, device: torch.device) -> None:
    """Refuse what cannot be had beside what there is; where nobody tells, it is tried."""
    found = free_bytes(device, 1.0)
    if found is not None and wanted > found:
        raise OptionError(
            f"the drafter's part of the cache takes {wanted / 2**20:.0f} MiB and {found / 2**20:.0f} MiB are left; "
            "give the drafter when the model is loaded, or lower max_model_len, max_num_seqs or num_pages"
        )


def round_bytes(config: ModelConfig, dtype: torch.dtype, num_rows: int, num_sampled: int) -> int:
    """What the largest round allocates while it runs: activations of all rows, float32 logits of those looked at."""
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = STREAMS * config.hidden_size + WIDE_STREAMS * config.intermediate_size + attention
    return num_rows * width * dtype.itemsize + num_sampled * config.vocab_size * 4 * LOGIT_COPIES


def working_bytes(target: Target, num_rows: int, num_nodes: int) -> int:
    """What is kept free for rounds of so many rows, with so many drafts each; nothing where memory grows as needed."""
    if target.device.type == "cpu":
        return 0
    sampled = min(target.max_num_seqs * (1 + num_nodes), max(num_rows, target.max_num_seqs))
    return CODE_BYTES + ROUNDS_AT_ONCE * round_bytes(target.model.config, target.dtype, num_rows, sampled)


@dataclass(frozen=True)
class Room:
    """What pages are counted from: a device, the longest sequence, and how many rows a round has at most.

    reserved_bytes: what will be allocated later and is not the cache's: rounds at work, what a drafter says it needs.
    """

    device: torch.device
    max_model_len: int
    num_rows: int
    reserved_bytes: int

    def cache_bytes(self, options: EngineOptions) -> int | None:
        """What the cache may take; None where nobody tells."""
        found = free_bytes(self.device, options.gpu_memory_utilization)
        if found is None:
            return None
        left = max(0, found - self.reserved_bytes)
        return (
            min(left, CPU_CACHE_LIMIT) if self.device.type == "cpu" and options.gpu_memory_utilization is None else left
        )

    def pages_of_one(self, options: EngineOptions) -> int:
        """Of the longest sequence."""
        return -(-self.max_model_len // options.block_size) + 1  # one more for drafts that reach over the end of a page


class Sizes(NamedTuple):
    """Of a cache. width: how far layers see that have pages of their own; None: there are none."""

    num_pages: int
    width: int | None
    num_windowed: int


def size_cache(
    target: Sequence[LayerSpec], drafter: Sequence[LayerSpec], tail_bytes: int, room: Room, options: EngineOptions
) -> Sizes:
    """Layers of the target that look back only so far give pages back, and so have their own; a drafter's never do."""
    windows = [spec for spec in target if spec.window is not None]
    width = max([spec.window or 0 for spec in windows], default=0)
    if not 0 < width < room.max_model_len:  # nothing is ever out of sight
        return Sizes(
            count_pages(page_bytes([*target, *drafter], options.block_size, tail_bytes), room, options), None, 0
        )
    whole = [spec for spec in target if spec.window is None]
    kept, each = (
        page_bytes([*whole, *drafter], options.block_size, tail_bytes),
        page_bytes(windows, options.block_size, 0),
    )
    num_windowed = count_windowed(width, each, kept, room, options)
    return Sizes(count_pages(kept, room, options, each * num_windowed), width, num_windowed)


def count_windowed(width: int, window_bytes: int, page_bytes: int, room: Room, options: EngineOptions) -> int:
    """Pages for layers that see `width` positions at most: what all slots can hold at a time, if memory allows.

    window_bytes: of one such page; page_bytes: of one of the others. Sequences of full length must fit beside them, and
    where there is little memory they are no more than the others: short sequences need as many of both.
    """
    size, each, slots = options.block_size, room.pages_of_one(options), options.max_num_seqs
    seen = min(each, -(-(width + SPREAD) // size) + 2)  # of a sequence that decodes
    rows = -(-room.num_rows // size)  # a round's prompt chunks lie beside what is seen
    most = min(each * slots, seen * slots + 3 * rows)  # so many rounds may be on their way
    left = room.cache_bytes(options)
    if options.num_pages is not None or left is None:
        return min(options.num_pages or each, most)
    fitting = min(left // (page_bytes + window_bytes), (left - each * page_bytes) // window_bytes)
    return max(min(each, seen + rows), min(most, fitting))


def count_pages(page_bytes: int, room: Room, options: EngineOptions, taken: int = 0) -> int:
    """Pages that every slot could fill, as far as memory goes; at least one sequence of full length must fit.

    page_bytes: of one page, in all layers under it, the target's and the drafter's, and its tail.
    taken: what pages of the other kind take of the cache's bytes.
    """
    size, max_model_len, each = options.block_size, room.max_model_len, room.pages_of_one(options)
    asked = options.num_pages
    if asked is not None:
        if asked < each:
            raise OptionError(
                f"num_pages={asked} cannot hold one sequence of max_model_len={max_model_len}; it needs "
                f"{each} pages of {size}"
            )
        return asked
    found = room.cache_bytes(options)
    if found is None:
        raise OptionError(
            f"this system does not say how much memory is available; give num_pages, {each} or more (pages of {size})"
        )
    pages = min(max(0, found - taken) // max(page_bytes, 1), each * options.max_num_seqs)
    if pages < each:
        raise OptionError(
            f"the memory left holds {pages * size} tokens of cache, fewer than max_model_len={max_model_len}; "
            "lower max_model_len or raise gpu_memory_utilization"
        )
    return pages


def free_bytes(device: torch.device, share: float | None) -> int | None:
    """What may be used: on a GPU its share of all, less what is taken; on a CPU its share of what is available."""
    share = share or DEFAULT_SHARE
    if device.type == "cuda":
        free, total = ask_device(device)
        return max(0, int(free - (1 - share) * total))
    found = available_bytes(ROOT)
    return None if found is None else int(found * share)


def ask_device(device: torch.device) -> tuple[int, int]:
    """What is free of an accelerator's memory and what there is, once PyTorch has given back what it only holds."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)


def available_bytes(root: Path) -> int | None:
    """What the kernel could give without swapping, or what the container may still take if that is less.

    None where no kernel tells: only Linux has these files.
    """
    machine = _figures(root / "proc/meminfo").get("MemAvailable:")
    if machine is None:
        return None
    return int(max(0, min([machine * 1024, *(_left(*group) for group in _groups(root))])))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """The process's memory control groups up to the outermost, each with the names of its limit and its usage."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            top, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            top, limit, usage = mount, "memory.max", "memory.current"
        else:
            continue
        inner = top / path.strip("/")  # in a container perhaps the host's path, which is not there: the top is its own
        for folder in (inner, *inner.parents):
            yield folder, limit, usage
            if folder == top:
                break


def _left(folder: Path, limit: str, usage: str) -> float:
    """What a group may still take. Cached files count as used, but make room when asked; so they are no use."""
    most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
    if not most.isdigit() or not used.isdigit():  # "max", or no such group
        return float("inf")
    figures = _figures(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in figures else ""  # of the groups inside it too
    cached = sum(figures.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return int(most) - int(used) + cached


def _figures(path: Path) -> dict[str, int]:
    rows = [line.split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """A file's text; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
