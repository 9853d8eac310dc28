"""The part of gpu.py that counts: is every token plain decoding's, whoever drafts and whoever runs beside?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_common import Bench, Row, accepted_lengths, different, greedy
from gpu_drafters import Replay

from paceline import LLM, DraftModel, NGram, SamplingParams, Suffix
from paceline.outputs import RequestOutput

BESIDE = 32  # sequences that run at the same time
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.8, "top_p": 0.95}}


def exact(bench: Bench) -> Iterator[Row]:
    """For each model, setting and drafter: how many texts are the same, in a crowd and alone.

    The crowd has a cache that cannot hold it, so sequences are preempted and begin again, and prompts that come twice
    hit the prefix cache. What is compared with: plain decoding with room for all, nobody's prefix shared.
    """
    same = texts = 0
    for model in bench.models:
        for row in check_model(bench, model):
            assert row["texts"] > 0
            same, texts = same + row["identical"], texts + row["texts"]
            yield row
    print(f"exact: {same} of {texts} texts identical", flush=True)


def check_model(bench: Bench, model: str) -> Iterator[Row]:
    length, new = (128, 16) if bench.quick else (1024, bench.options.tokens)
    roomy = bench.llm(model, max_model_len=length, max_num_seqs=BESIDE, num_pages=BESIDE * (length // 16 + 1))
    texts = [] if roomy.tokenizer is None else bench.texts("mt_bench.jsonl", "spec_bench.jsonl")
    prompts = different(roomy, texts, bench.options.prompts, new)  # an answer is known by its prompt
    if len(prompts) < bench.options.prompts:
        print(f"exact: {len(prompts)} different prompts fit, {bench.options.prompts} were asked for", flush=True)
    params = {name: _params(prompts, new, **more) for name, more in SETTINGS.items()}
    plain = {name: _answers(roomy, prompts, params[name]) for name in SETTINGS}
    roomy.close()
    pages = _few_pages(prompts, new, length)
    given = {"max_model_len": length, "max_num_seqs": BESIDE, "num_pages": pages, "budget": "fixed"}
    with bench.llm(model, prefix_caching=True, **given) as tight:
        for name, drafter in drafters(bench, model).items():
            tight.set_drafter(drafter)
            for setting, known in plain.items():
                if isinstance(drafter, Replay):
                    drafter.tell({tuple(ids): list(text) for ids, text in zip(prompts, known)})
                row = {"model": Path(model).name, "setting": setting, "drafter": name}
                row |= _check(tight, prompts, params[setting], known, bench.options.alone)
                print(row, flush=True)
                yield row


def drafters(bench: Bench, model: str) -> dict[str, Any]:
    options = bench.options
    small = model == options.small
    draft = options.draft or options.small
    found: dict[str, Any] = {
        "none": None,
        "ngram": NGram(5, 1, 3),
        "suffix": Suffix(),
        "suffix, trees": Suffix(tree=True),
        "draft model": DraftModel(draft, 3, cross_vocabulary=not small),
        "replay, chains": Replay({}, 4),
        "replay, trees": Replay({}, 4, 3),
    }
    return {**found, **bench.heads()} if small else found


def _params(prompts: list[list[int]], new: int, **more: Any) -> list[SamplingParams]:
    return [greedy(new, seed=1000 + number, **more) for number in range(len(prompts))]


def _answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def _few_pages(prompts: list[list[int]], new: int, length: int) -> int:
    """Two thirds of what a crowd usually takes, and at least one sequence of full length."""
    each = [-(-(len(ids) + new) // 16) for ids in prompts]
    return max(sum(each) * min(BESIDE, len(each)) * 2 // (3 * len(each)), length // 16 + 2)


def _check(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], known: list[list[int]], alone: int
) -> dict[str, Any]:
    """In a crowd, shuffled, some of them twice; then a few one at a time."""
    order = [*range(len(prompts)), *range(0, len(prompts), 4)]
    random.Random(len(prompts)).shuffle(order)
    crowd = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    singles = [llm.generate([prompts[i]], params[i])[0] for i in range(min(alone, len(prompts)))]
    different = [i for i, output in zip([*order, *range(len(singles))], [*crowd, *singles]) if said(output) != known[i]]
    total = len(crowd) + len(singles)
    outputs = [output.outputs[0] for output in (*crowd, *singles)]
    made = llm.engine.drafter
    return {
        "texts": total,
        "identical": total - len(different),
        "different": sorted(set(different)),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "accepted_lengths": {str(size): n for size, n in sorted(accepted_lengths([*crowd, *singles]).items())},
        "branches": made.branches[:-1].tolist() if isinstance(made, Replay) else None,
        "preemptions": sum(output.stats.preemptions for output in outputs),
        "prefix_hits": sum(output.stats.prefix_hit > 0 for output in outputs),
    }


def said(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
