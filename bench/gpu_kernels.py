"""What the GPU's kernels cost and whether they keep their bits, a file for each kind.

python bench/gpu_kernels.py matmul [--output FILE] [--tune] [--tiles FILE] …
python bench/gpu_kernels.py attention [--output FILE]
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import torch

KINDS = ("matmul", "attention")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="What the GPU's kernels cost and whether they keep their bits.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--output", type=Path, help="where the figures go (bench/results/gpu_KIND.json)")
    options, others = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return
    module = importlib.import_module(f"gpu_{options.kind}")
    module.run(options.output or RESULTS / f"gpu_{options.kind}.json", *others)


if __name__ == "__main__":
    main()
