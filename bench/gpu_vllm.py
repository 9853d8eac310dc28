"""vLLM's side of gpu.py's part `vllm`: run by a Python that has vLLM, told what to do in a file, answering in JSON.

    python bench/gpu_vllm.py JOB.json

A job: {engine: arguments of vllm.LLM, runs: [{name, prompts: token ids, new, temperature, turns}]}. Answers a line
{name: {seconds: [of each turn], tokens}} to standard output behind whatever vLLM prints. Knows nothing of paceline.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

MARK = "answer: "  # in front of the line that counts


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    found: dict[str, Any] = {}
    for run in job["runs"]:
        params = [
            SamplingParams(
                temperature=run["temperature"], seed=number if run["temperature"] else None, max_tokens=run["new"],
                ignore_eos=True, detokenize=False,
            )
            for number in range(len(run["prompts"]))
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        seconds, tokens = [], 0
        for _ in range(1 + run["turns"]):  # the first is not counted
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        found[run["name"]] = {"seconds": seconds[1:], "tokens": tokens}
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
