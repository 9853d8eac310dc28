"""Greedy tokens beside those of transformers, from the same file: how many are the same.

    python bench/same_tokens.py --model gemma3-270m [--num-prompts 20] [--prompt 32] [--max-tokens 64] [--output FILE]

Prompts are pieces of bench/data/prose.txt. transformers computes in float32 on the dequantised weights, "torch" does so
too, "native" on the file's own blocks with 8-bit activations. Free: both go on from the prompt; counted is what comes
before the first difference, for behind it they continue different texts. Forced: at each place of transformers' answer,
whether its token is the one that paceline would have said there. Writes bench/results/same_tokens.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from cpu_peers import show
from peer_processes import PROSE, Peer

RESULTS = Path(__file__).resolve().parent / "results" / "same_tokens.json"
KERNELS = ("native", "torch")


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    peers = {kind: Peer(kind, sys.executable) for kind in ("paceline", "transformers")}
    ours, theirs = peers["paceline"], peers["transformers"]
    length, new = options.prompt + options.max_tokens + 1, options.max_tokens
    sizes: dict[str, Any] = {"length": length, "threads": options.threads}
    result: dict[str, Any] = {"model": Path(options.model).name, "prompt": options.prompt, "counts": {}}
    result["peer_versions"] = ours.versions | theirs.versions
    try:
        about = ours("load", model=options.model, kernels=KERNELS[0], **sizes)
        ids = ours("tokenize", text=PROSE.read_text())
        step = (len(ids) - options.prompt) // options.num_prompts
        prompts = [ids[number * step : number * step + options.prompt] for number in range(options.num_prompts)]
        theirs("load", model=about["path"], **sizes)
        wanted = theirs("greedy", prompts=prompts, new=new)
        forced = [prompt + tokens for prompt, tokens in zip(prompts, wanted)]
        for kernels in KERNELS:
            ours("load", model=options.model, kernels=kernels, at_once=len(prompts), **sizes)
            said = ours("greedy", prompts=prompts, new=new)
            free = [common(*pair) for pair in zip(said, wanted)]
            agreed = [sum(each) for each in ours("agrees", texts=forced, new=new)]
            counts = {"prompts": len(prompts), "tokens": new * len(prompts), "same_texts": free.count(new)}
            total = {**counts, "same_tokens": sum(free), "agreed": sum(agreed)}
            result["counts"][kernels] = {"free": free, "forced": agreed, "total": total}
    finally:
        for peer in peers.values():
            peer.close()
    return result


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m", help="a name or a path")
    parser.add_argument("--num-prompts", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    from paceline.bench import machine, results

    found = measure(options)
    words = sys.argv[1:] if given is None else given
    command = " ".join(["python", "bench/same_tokens.py", *(Path(w).name if "/" in w else w for w in words)])
    results.write(options.output, {"command": command, **machine.record(), **found})
    rows = []
    for kernels, side in found["counts"].items():
        total = side["total"]
        texts, tokens = f"{total['same_texts']} of {total['prompts']}", total["tokens"]
        rows.append([kernels, texts, f"{total['same_tokens']} of {tokens}", f"{total['agreed']} of {tokens}", ""])
    show(["kernels", "same texts", "same tokens", "agreed where forced", ""], rows)


if __name__ == "__main__":
    main()
