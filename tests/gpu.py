"""`make test-gpu`: the tests that need a GPU, those of the Triton kernels among them; one line where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was tested")
        return 0
    engine = pytest.main(["-m", "gpu", str(FOLDER / "engine")])
    kernels = pytest.main([str(FOLDER / "kernels" / "triton")])
    return int(engine or kernels)


if __name__ == "__main__":
    sys.exit(main())
