"""Float weights on a CPU by their dtype: tokens a second, in turn.

    python bench/cpu_dtypes.py [--before FOLDER] [--turns 7] [--tokens 24]

The model is a Llama of SmolLM2-135M's shape with random weights. Every side (dtype of the weights, dtype asked for) is
a process of its own that is kept open, and turns alternate. Each computes on one thread, and its own processor time is
counted, not what others take from it. --before: another checkout of paceline, whose sides are measured in the same
turns. "6 rows" is one forward over six tokens against one over one: what checking five drafts costs. Prints medians;
all turns go to bench/results/cpu_dtypes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cpu_dtypes.json"
SIDES = [
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("bfloat16", "bfloat16"),
    ("float16", "auto"),
    ("float16", "float16"),
]
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
PROMPT = list(range(1000, 1128))
ROWS = (1, 6)
FIGURES = ("decode", "prefill", "rows")


def answer(stored: str, asked: str, layers: int) -> None:
    """A side's process: for every line that comes, one turn's figures as JSON."""
    import cpu_sides
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(SHAPE | {"num_hidden_layers": layers}))
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, stored))
    cpu_sides.clock = time.process_time
    side = cpu_sides.Paceline()
    from paceline import LLM

    side.llm = LLM(model, dtype=asked, device="cpu", max_model_len=256, max_num_seqs=1, prefix_caching=False)
    del model
    if (library := getattr(side.llm.model.ops, "library", None)) is not None:
        library.paceline_threads(1)
    print(json.dumps(side.llm.model.ops.name), flush=True)
    for line in sys.stdin:
        told = side.answers([PROMPT], int(line), [])[0]
        one, some = (min(side.rows(PROMPT, len(PROMPT) - max(ROWS), [rows], 3)[str(rows)]) for rows in ROWS)
        figures = {"decode": (int(line) - 1) / told["rest"], "prefill": len(PROMPT) / told["first"], "rows": some / one}
        print(json.dumps(figures), flush=True)


class Side:
    def __init__(self, tree: Path, stored: str, asked: str, layers: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--side", stored, asked, "--layers", str(layers)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.row: dict[str, Any] = {"weights": stored, "dtype": asked, "kernels": self._read()}
        self.row |= {name: [] for name in FIGURES}

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"a side ended with code {self._process.wait()}")
        return json.loads(line)

    def turn(self, tokens: int, counts: bool) -> None:
        assert self._process.stdin is not None
        print(tokens, file=self._process.stdin, flush=True)
        for name, value in self._read().items():
            if counts:
                self.row[name].append(value)

    def close(self) -> None:
        self._process.communicate()


def read_options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24, help="decoded in a turn")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    options = read_options(given)
    if options.side:
        return answer(*options.side, options.layers)
    trees = {"now": HERE.parent} | ({"before": options.before.resolve()} if options.before else {})
    sides = {(when, *side): Side(tree, *side, options.layers) for side in SIDES for when, tree in trees.items()}
    for turn in range(options.turns + 1):  # the first is not counted
        for side in sides.values():
            side.turn(options.tokens, counts=turn > 0)
    rows = []
    for (when, *_), side in sides.items():
        side.close()
        rows.append({"when": when, **side.row})
        decode, prefill, many = (statistics.median(side.row[name]) for name in FIGURES)
        names = f"{when:7} {side.row['weights']:9} {side.row['dtype']:9} {side.row['kernels']:7}"
        print(f"{names} decode {decode:6.1f} tokens/s   prefill {prefill:6.1f} tokens/s   {ROWS[1]} rows {many:.2f}×")
    from paceline.bench import machine, results

    shape = SHAPE | {"num_hidden_layers": options.layers}
    command = f"python bench/cpu_dtypes.py --turns {options.turns} --tokens {options.tokens}"
    command += " --before FOLDER" if options.before else ""
    results.write(options.output, {"command": command, **machine.record(), "shape": shape, "dtypes": rows})


if __name__ == "__main__":
    main()
