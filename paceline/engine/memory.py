"""How many pages of cache there are. It knows devices and what the operating system tells; callers say bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from paceline.engine.options import EngineOptions
from paceline.errors import OptionError
from paceline.kernels.ops import LayerSpec

CPU_CACHE_LIMIT = 4 * 2**30
DEFAULT_SHARE = 0.9
ROOT = Path("/")


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


def count_pages(
    page_bytes: int, reserved_bytes: int, device: torch.device, max_model_len: int, options: EngineOptions
) -> int:
    """Pages that every slot could fill, as far as memory goes; at least one sequence of full length must fit.

    page_bytes: of one page, in all layers under it, the target's and the drafter's, and its tail.
    reserved_bytes: what will be allocated later and is not the cache's: the drafter's weights.
    """
    size = options.block_size
    each = -(-max_model_len // size) + 1  # one more for drafts that reach over the end of a page
    asked = options.num_pages
    if asked is not None:
        if asked < each:
            raise OptionError(
                f"num_pages={asked} cannot hold one sequence of max_model_len={max_model_len}; it needs "
                f"{each} pages of {size}"
            )
        return asked
    found = free_bytes(device, options.gpu_memory_utilization)
    if found is None:
        raise OptionError(
            f"this system does not say how much memory is available; give num_pages, {each} or more (pages of {size})"
        )
    left = max(0, found - reserved_bytes)
    if device.type == "cpu" and options.gpu_memory_utilization is None:
        left = min(left, CPU_CACHE_LIMIT)
    pages = min(left // page_bytes, each * options.max_num_seqs)
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
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - share) * total))
    found = available_bytes(ROOT)
    return None if found is None else int(found * share)


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
