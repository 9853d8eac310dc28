"""One run of the whole engine on a GPU: does it work there, is the noise the same, what does a step cost?

    python bench/gpu_smoke.py MODEL [--output bench/results/gpu_smoke.json]

Speed on a GPU is not a claim yet (PyTorch's own kernels, no graphs); the figures say where it stands.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, FirstOf, NGram, SamplingParams, Suffix, __version__
from paceline.sampling import noise

QUESTIONS = [
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "List the numbers from one to twenty in words.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a bicycle race.",
]


def noise_agrees() -> bool:
    """The same bits and the same Gumbel values on both devices."""
    results = []
    for device in ("cpu", "cuda"):
        keys = noise.Keys(*torch.tensor([[3, -7, 2**62], [0, 1, 2]], device=device))
        positions = torch.tensor([5, 6, 7], device=device)
        results.append(noise.gumbel(keys, positions, noise.SAMPLE, 49152).cpu())
    return torch.equal(*results)


def measure(llm: LLM, drafter: Any, params: SamplingParams) -> dict[str, Any]:
    llm.set_drafter(drafter)
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    llm.chat(prompts, params)
    llm.set_drafter(drafter)  # afresh: a suffix tree that has seen these answers would only recite them
    torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.chat(prompts, params)]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    count = sum(len(output.token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "tokens": count,
        "tokens_per_second": count / seconds,
        "tokens_per_forward": count / sum(output.stats.rounds for output in outputs),
        "token_ids": [output.token_ids for output in outputs],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, default=Path("bench/results/gpu_smoke.json"))
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python bench/gpu_smoke.py MODEL",
        "date": date.today().isoformat(),
        "machine": torch.cuda.get_device_name(),
        "versions": {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "noise_agrees_with_cpu": noise_agrees(),
        "runs": [],
    }
    drafters = {
        "plain": None,
        "ngram": NGram(5, 1, 3),
        "suffix": Suffix(),
        "first_of": FirstOf(Suffix(tree=True), NGram()),
    }
    settings = {
        "greedy": SamplingParams(temperature=0, max_tokens=128),
        "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=128),
    }
    for dtype in ("float32", "bfloat16"):
        llm = LLM(options.model, device="cuda", dtype=dtype, max_model_len=2048)
        for setting, params in settings.items():
            plain = None
            for name, drafter in drafters.items():
                run = measure(llm, drafter, params)
                ids = run.pop("token_ids")
                plain = plain or ids
                run["identical_to_plain"] = sum(a == b for a, b in zip(ids, plain))
                report["runs"].append({"dtype": dtype, "setting": setting, "drafter": name, "prompts": len(ids), **run})
                print(report["runs"][-1], flush=True)
        llm.engine.cache.pool.check()
        del llm
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1))
    print("noise agrees with the CPU:", report["noise_agrees_with_cpu"])


if __name__ == "__main__":
    main()
