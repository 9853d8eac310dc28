"""What the parts of gpu.py share: shapes to be made up, what is to be reached, how a step is timed, what is asked."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, Eagle, SamplingParams
from paceline.bench.prompts import read_questions
from paceline.outputs import RequestOutput

LONG, SHORT, PROMPT = 160, 32, 512  # new tokens of the two runs a step is taken from, and tokens of a prompt
BATCHES = (1, 4, 16, 64, 256)

# Milliseconds a decode step, by batch. The peer: vLLM 0.25.0 on one H200, bfloat16, dummy weights, prompt 512, greedy,
# (time for 160 new tokens - time for 32) / 128, best of 3; detokenising, prefix caching and EOS off. Taken 2026-11-15.
# To be reached: what we want to be below, with the same method.
PEER = "vLLM 0.25.0 on an H200"
THEIRS = {
    "llama-8b": dict(zip(BATCHES, (4.88, 4.97, 5.29, 6.68, 13.87))),
    "smollm2": dict(zip(BATCHES, (1.17, 1.38, 1.54, 2.39, 4.39))),
}
REACH = {
    "llama-8b": dict(zip(BATCHES, (4.4, 4.6, 5.1, 6.6, 13.8))),
    "smollm2": dict(zip(BATCHES, (0.7, 0.8, 1.0, 1.8, 3.8))),
}
FASTEST: dict[str, Any] = {"exact_kernels": False}  # an engine whose rows need not have the same bits in any company
REACH_ROUNDS = {"8 rows, all accepted": 1.05, "8 rows, none accepted": 1.05, "EAGLE-shaped, 5 drafts": 1.25}  # of plain

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu"}
LLAMA |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "eos_token_id": 2, "bos_token_id": 1}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {**dict(zip(SIZES, (32, 4096, 32, 8, 14336))), "vocab_size": 128256, "tie_word_embeddings": False},
    "smollm2": {**dict(zip(SIZES, (30, 576, 9, 3, 1536))), "vocab_size": 49152, "tie_word_embeddings": True},
    "tiny": {**dict(zip(SIZES, (2, 64, 4, 2, 96))), "vocab_size": 256, "tie_word_embeddings": True},
}


Row = dict[str, Any]  # what a part finds: plain data


@dataclass
class Bench:
    """What was asked for, and a folder for configs without weights."""

    options: argparse.Namespace
    folder: Path

    @property
    def quick(self) -> bool:
        return bool(self.options.quick)

    @property
    def models(self) -> list[str]:
        """With real weights."""
        return [model for model in (self.options.small, self.options.large) if model != "none"]

    def batches(self, *usual: int) -> list[int]:
        """Sequences at a time: those asked for, else a part's own."""
        return list(self.options.batches or usual)

    def shape(self, name: str, positions: int = 4096) -> str:
        """A folder with the config of that shape; quick: of a tiny one."""
        place = self.folder / f"{name}-{positions}"
        place.mkdir(exist_ok=True)
        config = {**LLAMA, **SHAPES["tiny" if self.quick else name], "max_position_embeddings": positions}
        (place / "config.json").write_text(json.dumps(config))
        return str(place)

    def head(self, name: str) -> str:
        """The same of an EAGLE-3 head of one layer for that shape."""
        place = self.folder / f"{name}-eagle3"
        place.mkdir(exist_ok=True)
        shape = SHAPES["tiny" if self.quick else name]
        layers = shape["num_hidden_layers"]
        more = {"num_hidden_layers": 1, "draft_vocab_size": min(32000, shape["vocab_size"])}
        states = {"eagle_aux_hidden_state_layer_ids": [0, layers // 2, layers]}
        named = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 4096}
        (place / "config.json").write_text(json.dumps({**LLAMA, **shape, **more, **states, **named}))
        return str(place)

    def heads(self, drafts: int = 5) -> dict[str, Eagle]:
        """The real head's drafters by name: a chain of so many, and trees; none where no head was given."""
        head = self.options.head
        if not head:
            return {}
        found = {"EAGLE head": Eagle(head, drafts), "EAGLE head, fixed trees": Eagle(head, tree="wide")}
        for nodes, top_k, depth in self.options.grown:
            found[f"EAGLE head, grown trees of {nodes}: {top_k} children, {depth + 1} levels"] = Eagle(
                head, nodes, "dynamic", top_k, depth
            )
        return found

    def llm(self, model: str, drafter: Any = None, **more: Any) -> LLM:
        options = self.options
        given = {"device": options.device, "dtype": options.dtype, "prefix_caching": False, "seed": 0, **more}
        if options.kernels:
            given["kernels"] = options.kernels
        return LLM(model, drafter, **given)

    def dummy(self, name: str, drafter: Any = None, **more: Any) -> LLM:
        positions = more.get("max_model_len", 1024)
        return self.llm(self.shape(name, positions), drafter, load_format="dummy", **{"max_model_len": 1024, **more})

    def texts(self, *names: str, category: tuple[str, ...] = ()) -> list[list[dict[str, str]]]:
        """Conversations from files of the data folder; of some categories, if any are named."""
        if self.options.data is None:
            raise SystemExit(f"this part asks what is in {', '.join(names)}: give --data FOLDER")
        found = [question for name in names for question in read_questions(Path(self.options.data) / name)]
        return [question.messages for question in found if not category or question.category in category]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    chooser = random.Random(seed)
    return [[chooser.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def different(llm: LLM, texts: list[list[dict[str, str]]], count: int, most: int) -> list[list[int]]:
    """So many that leave room for an answer, as token ids, no two the same, from all over `texts`: files of questions
    are in the order of their kinds. Fewer where no more are there."""
    if llm.tokenizer is None:  # a tiny model
        return random_prompts(count, 40, llm.config.vocab_size)
    room = llm.max_model_len - most - 1
    read = {tuple(ids): None for text in texts if len(ids := llm.read_chat(text).ids) <= room}
    if not read:
        raise SystemExit(f"no prompt fits into {room} tokens")
    found = list(read)
    count = min(count, len(found))
    return [list(found[number * len(found) // count]) for number in range(count)]


def asking(llm: LLM, texts: list[list[dict[str, str]]], count: int, most: int) -> list[list[int]]:
    """`different` ones, from the beginning again where they are few."""
    read = different(llm, texts, count, most)
    return [read[number % len(read)] for number in range(count)]


def greedy(most: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": most, "ignore_eos": True, "detokenize": False, **more})


def timed(llm: LLM, prompts: list[list[int]], params: Any) -> tuple[float, list[RequestOutput]]:
    synchronize()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    synchronize()
    return time.perf_counter() - begin, outputs


def rounds_of(outputs: Iterable[RequestOutput]) -> int:
    """Of the sequence that took most."""
    return max(output.outputs[0].stats.rounds for output in outputs)


def per_round(llm: LLM, prompts: list[list[int]], turns: int, quick: bool = False, **sampling: Any) -> dict[str, Any]:
    """Milliseconds a round: the least time for LONG new tokens less that for SHORT, over the rounds between."""
    return per_rounds([llm], prompts, turns, quick, **sampling)[0]


def per_rounds(
    llms: list[LLM], prompts: list[list[int]], turns: int, quick: bool = False, **sampling: Any
) -> list[dict[str, Any]]:
    """The same of several engines that take turns."""
    sizes = (24, 8) if quick else (LONG, SHORT)
    taken: list[dict[int, list[float]]] = [{size: [] for size in sizes} for _ in llms]
    rounds: list[dict[int, int]] = [{} for _ in llms]
    for llm in llms:
        timed(llm, prompts, greedy(sizes[1], **sampling))  # whatever is made once is made now
    for _ in range(turns):
        for number, llm in enumerate(llms):
            for size in sizes:
                seconds, outputs = timed(llm, prompts, greedy(size, **sampling))
                taken[number][size].append(seconds)
                rounds[number][size] = rounds_of(outputs)
    found = []
    for spent, told in zip(taken, rounds):
        steps = told[sizes[0]] - told[sizes[1]]
        ms = 1e3 * (min(spent[sizes[0]]) - min(spent[sizes[1]])) / steps
        found.append({"ms": ms, "rounds": steps, "seconds": {str(size): spent[size] for size in sizes}})
    return found


def accepted_lengths(outputs: Iterable[RequestOutput]) -> Counter[int]:
    """How many drafts each round that had some accepted."""
    found: Counter[int] = Counter()
    for output in outputs:
        kinds: dict[int, list[str]] = {}
        for token in output.outputs[0].provenance:
            kinds.setdefault(token.round, []).append(token.kind)
        found.update(told.count("accepted") for told in kinds.values() if told != ["plain"])
    return found
