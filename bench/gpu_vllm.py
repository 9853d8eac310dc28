"""vLLM's side of gpu.py's part `vllm`: run by a Python that has vLLM, told what to do in a file, answering in JSON.

    python bench/gpu_vllm.py JOB.json

A job: {engine: arguments of vllm.LLM, runs: [{name, prompts: token ids, new, temperature, turns}], served: [{name,
prompts, due: seconds, new}]}. Answers a line {name: {seconds: [of each turn], tokens}} to standard output behind
whatever vLLM prints; of those served what `gpu_arrivals.ask` finds. With a drafter also {rounds: of the first prompt}.
Knows nothing of paceline.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from gpu_arrivals import ask

MARK = "answer: "  # in front of the line that counts


def params(new: int, temperature: float = 0.0, seed: int | None = None, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=new, ignore_eos=True, detokenize=False, **more
    )  # fmt: skip


def run_all(engine: dict[str, Any], runs: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    from vllm import LLM

    llm = LLM(**engine)
    for run in runs:
        heat = run["temperature"]
        asked = [params(run["new"], heat, number if heat else None) for number in range(len(run["prompts"]))]
        prompts = [{"prompt_token_ids": ids} for ids in run["prompts"]]
        seconds, tokens = [], 0
        for _ in range(1 + run["turns"]):  # the first is not counted
            begin = time.perf_counter()
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        found: dict[str, Any] = {"seconds": seconds[1:], "tokens": tokens}
        if "speculative_config" in engine:
            found["rounds"] = rounds_of(llm, prompts[0], params(run["new"], heat, 0 if heat else None, **deltas()))
        yield run["name"], found


def deltas() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return {"output_kind": RequestOutputKind.DELTA}


def rounds_of(llm: Any, prompt: dict[str, Any], asked: Any) -> int:
    """In how many of the engine's rounds this prompt's tokens came. Not timed: does its head guess as ours does?"""
    llm.llm_engine.add_request("rounds", prompt, asked)
    rounds = 0
    while llm.llm_engine.has_unfinished_requests():
        rounds += sum(bool(output.outputs[0].token_ids) for output in llm.llm_engine.step())
    return rounds


async def serve_all(engine: dict[str, Any], served: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    from vllm.usage.usage_lib import UsageContext

    usage = UsageContext.OPENAI_API_SERVER  # as `vllm serve` has it: 8192 tokens a round here, 2048 otherwise
    llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**engine), usage_context=usage)
    numbers, found = itertools.count(), {}
    for run in served:
        asked = params(run["new"], **deltas())

        async def stream(prompt: list[int], asked: Any = asked) -> AsyncIterator[int]:
            async for output in llm.generate({"prompt_token_ids": prompt}, asked, str(next(numbers))):
                yield len(output.outputs[0].token_ids)

        found[run["name"]] = await ask(stream, run["prompts"], run["due"])
    llm.shutdown()
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = dict(run_all(job["engine"], job["runs"])) if job["runs"] else {}
    if job["served"]:
        found |= asyncio.run(serve_all(job["engine"], job["served"]))
    print(MARK + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
