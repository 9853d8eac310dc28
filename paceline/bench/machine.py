"""Where and with what a measurement was made, as plain data for a report. Measures nothing itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import paceline

PACKAGE = Path(paceline.__file__).parent


def record() -> dict[str, Any]:
    """Everything a reader needs in order to judge a figure, apart from the options."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "paceline": paceline.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": machine(),
        "revision": revision(),
    }


def machine() -> dict[str, Any]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return {
        "cpu": cpu_name(),
        "cores": (os.cpu_count() or 1) if allowed is None else len(allowed),  # that this process may use
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,  # who wanted a core, at the end
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    """The processor as its maker calls it; what the platform knows where that cannot be had."""
    if sys.platform.startswith("linux"):
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
    return platform.processor() or platform.machine() or "unknown"


def memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def revision() -> str | None:
    """The commit the package was run from, with a plus sign where files differ from it; None outside a checkout."""
    if not (PACKAGE.parent / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
