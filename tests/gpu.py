"""`make test-gpu`: the tests that need a GPU, those of the Triton kernels among them; one line where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


class Passed:
    """Counts tests: where all are skipped nothing was tested."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was tested")
        return 0
    failed = False
    for asked in (["-m", "gpu", str(FOLDER / "engine")], [str(FOLDER / "kernels" / "triton")]):
        passed = Passed()
        failed |= bool(pytest.main(asked, [passed])) or not passed.count
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
