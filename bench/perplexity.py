"""Perplexity on a fixed text: what quantised arithmetic costs, ours and llama.cpp's, beside float32.

    python bench/perplexity.py [--peer-python PATH] [--model smollm2-135m] [--chunk 512]

The text is bench/data/prose.txt, tokenised once; every side scores the same tokens in the same chunks, each chunk from
nothing. "native" computes on the file's own blocks, "torch" in float32 on the dequantised weights. Prints the ratios to
the latter and writes bench/results/perplexity.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from cpu_peers import show
from peer_processes import PROSE, Peer, PeerError

RESULTS = Path(__file__).resolve().parent / "results" / "perplexity.json"
EXACT = "paceline, torch float32"
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    EXACT: ("paceline", {"kernels": "torch"}),
    "paceline, native": ("paceline", {"kernels": "native"}),
    "llama.cpp": ("llama.cpp", {}),
}


def cut(ids: list[int], size: int) -> list[list[int]]:
    """Chunks of `size` tokens; a last one too short to predict anything is dropped."""
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    return [chunk for chunk in chunks if len(chunk) > 1]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Side → its losses by chunk, or why there are none."""
    result: dict[str, Any] = {"sides": {}, "chunk_sizes": [], "peer_versions": {}}
    peers: dict[str, Peer] = {}
    chunks: list[list[int]] = []
    path = options.model
    try:
        for name, (kind, own) in SIDES.items():
            try:
                if kind not in peers:
                    python = options.peer_python if kind == "llama.cpp" and options.peer_python else sys.executable
                    peers[kind] = Peer(kind, python)
                    result["peer_versions"] |= peers[kind].versions
                ask = peers[kind]
                extra = options.llama_options if kind == "llama.cpp" else own
                about = ask("load", model=path, length=options.chunk + 1, threads=options.threads, **extra)
                if not chunks:
                    path = about["path"]
                    chunks = cut(ask("tokenize", text=PROSE.read_text())[: options.max_tokens], options.chunk)
                result["sides"][name] = {"losses": ask("losses", chunks=chunks)}
            except PeerError as error:
                result["sides"][name] = {"note": str(error)}
    finally:
        for peer in peers.values():
            peer.close()
    return result | {"chunk_sizes": [len(chunk) for chunk in chunks]}


def judge(result: dict[str, Any]) -> None:
    """Perplexity and its ratio to float32's, written beside the losses."""
    predicted = sum(size - 1 for size in result["chunk_sizes"])
    for side in result["sides"].values():
        side["perplexity"] = math.exp(sum(side["losses"]) / predicted) if "losses" in side else None
    exact = result["sides"][EXACT]["perplexity"]
    for side in result["sides"].values():
        side["ratio"] = side["perplexity"] / exact if side["perplexity"] and exact else None


def cells(name: str, side: dict[str, Any]) -> list[str]:
    figures = [f"{side[key]:.5f}" if side[key] else "–" for key in ("perplexity", "ratio")]
    return [name, *figures, side.get("note", "")]


def read_options(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chunk", type=int, default=512, help="tokens a chunk; 2 to 512")
    parser.add_argument("--max-tokens", type=int, help="of the text; by default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer-python", help="a Python that has llama_cpp")
    parser.add_argument("--llama-options", type=json.loads, default={}, help="as for cpu_peers.py")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(given)
    if not 2 <= options.chunk <= 512:  # llama.cpp's batch holds 512
        parser.error("--chunk needs 2 to 512")
    return options


def main(given: list[str] | None = None) -> None:
    options = read_options(given)
    result = measure(options)
    judge(result)
    show(["side", "perplexity", "over float32", ""], [cells(name, side) for name, side in result["sides"].items()])
    from paceline.bench import machine, results

    told = machine.record()
    versions = told["versions"] | result.pop("peer_versions")
    words = sys.argv[1:] if given is None else given
    command = " ".join(["python", "bench/perplexity.py", *(Path(w).name if "/" in w else w for w in words)])
    model = Path(options.model).name
    results.write(options.output, {"command": command, **told, "versions": versions, "model": model, **result})
    if result["sides"][EXACT]["perplexity"] is None:
        sys.exit(f"{EXACT}: {result['sides'][EXACT]['note']}")


if __name__ == "__main__":
    main()
