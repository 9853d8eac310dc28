"""One thread a test process: tiny tensors gain nothing from more, and the suite itself runs in parallel.

So for PyTorch and for the native kernels; tests of more threads choose their own.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: its kernels are run by its interpreter

from paceline.kernels.cpu.library import library

TRITON = Path(__file__).parent / "kernels" / "triton"

torch.set_num_threads(1)
if (native := library()) is not None:
    native.paceline_threads(1)

gc.disable()  # until all is collected: a quarter of that time would go into looking for garbage among what stays

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where a test names no device, it means a CPU, and so do programs it starts, whatever the machine has.

    But for `make test-gpu`, which asks for the marker alone, or for Triton's kernels alone.
    """
    if session.config.option.markexpr == "gpu" or all(TRITON in item.path.parents for item in session.items):
        return
    if torch.cuda.is_available():
        torch.cuda.init()  # before the variable hides it: for children alone
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.enable()
    torch.cuda.is_available = lambda: False


@pytest.fixture(scope="module")
def settled() -> Iterator[None]:
    """For tests that close engines, which is a full collection each: none goes through all that was there before."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests want people to see (histograms of what was accepted), also when they ran in other processes."""
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    shown = sorted(value for report in reports for name, value in report.user_properties if name == "shown")
    if shown:
        terminalreporter.section("shown by tests")
        for line in shown:
            terminalreporter.write_line(line)
