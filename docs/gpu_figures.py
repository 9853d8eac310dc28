"""What bench/gpu.py wrote, as tables for the pages: a function for each part. Measures nothing.

Figures that were to be reached and were not are bold.
"""

from __future__ import annotations

from typing import Any

PEER = "vLLM 0.25.0 on an H200"  # whose steps were taken beforehand: bench/gpu_common.py
Cells = list[str]
Table = tuple[Cells, list[Cells]]


def render(data: dict[str, Any]) -> tuple[list[Table], str]:
    """Tables, and what is said below them."""
    tables, told = PARTS[data["part"]](data)
    older = [row["run"]["date"][:10] for row in data["rows"] if "run" in row]
    if older:
        told += f" Of {len(data['rows'])} rows {len(older)} are of other runs ({', '.join(sorted(set(older)))})."
    return tables, f"{told} Cut off before its end: there is more to be measured." if data.get("unfinished") else told


def _mark(text: str, reached: bool) -> str:
    return text if reached else f"**{text}**"


def steps(data: dict[str, Any]) -> tuple[list[Table], str]:
    batches = sorted({row["batch"] for row in data["rows"]})
    rows = []
    for shape in dict.fromkeys(row["shape"] for row in data["rows"]):
        found = {row["batch"]: row for row in data["rows"] if row["shape"] == shape}
        ours, wanted, theirs = list[str](), list[str](), list[str]()
        for batch in batches:
            row = found.get(batch)
            reach, peer = (None, None) if row is None else (row["reach_ms"], row["peer_ms"])
            ours.append("–" if row is None else _mark(f"{row['ms']:.2f}", reach is None or row["ms"] <= reach))
            wanted.append("–" if reach is None else f"{reach:g}")
            theirs.append("–" if peer is None else f"{peer:g}")
        rows += [[f"{shape}: paceline", *ours], ["to be reached", *wanted], [PEER, *theirs]]
    told = "Milliseconds a step by number of sequences; made-up weights, prompts of 512 tokens, greedy: the least time "
    told += "for 160 new tokens less that for 32, over 128. Bold: not reached."
    starts = {row["shape"]: row["start"] for row in data["rows"] if "capturing" in row.get("start", {})}
    for shape, start in starts.items():
        told += f" {shape} started in {start['seconds']:.1f} s: kernels were compiled in {start['compiling']:.1f} s, "
        told += f"{start['rounds']} rounds captured in {start['capturing']:.1f} s."
    return [(["", *map(str, batches)], rows)], told


def verify(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["round", "sequences", "ms", "plain step, ms", "ratio", "wanted"]
    rows = []
    for row in data["rows"]:
        ratio = _mark(f"{row['ratio']:.2f}", row["reach"] is None or row["ratio"] <= row["reach"])
        wanted = "–" if row["reach"] is None else f"≤ {row['reach']:g}"
        rows.append([row["round"], str(row["batch"]), f"{row['ms']:.2f}", f"{row['plain_ms']:.2f}", ratio, wanted])
    return [(heads, rows)], f"{data['rows'][0]['shape']}, made-up weights."


def profile(data: dict[str, Any]) -> tuple[list[Table], str]:
    tables = []
    for row in data["rows"]:
        cells = [[f"`{one['kernel']}`", f"{one['ms']:.3f}"] for one in row["kernels"][:12]]
        sampled = f" at temperature {row['sampling']['temperature']:g}" if row.get("sampling") else ""
        named = f"kernel ({row['shape']}, {row['batch']} sequences, {row['round']}{sampled}: "
        named += f"{row['step_ms']:.2f} ms a round)"
        rest = [["all kernels", f"{row['kernels_ms']:.3f}"], ["nothing runs", f"{row['idle_ms']:.3f}"]]
        tables.append(([named, "ms it adds"], [*cells, *rest]))
    told = "Of rounds of decoding alone, by PyTorch's profiler. Kernels overlap: what one adds is how much later than "
    return tables, told + "all before it it ended."


def exact(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["model", "sampling", "drafter", "same texts", "accepted: rounds", "branches", "preemptions", "prefix hits"]
    rows = []
    for row in data["rows"]:
        lengths = ", ".join(f"{size}: {count}" for size, count in row["accepted_lengths"].items()) or "–"
        same = _mark(f"{row['identical']} of {row['texts']}", row["identical"] == row["texts"])
        branches = "–" if row["branches"] is None else ", ".join(map(str, row["branches"]))
        named = [row["model"], row["setting"], row["drafter"]]
        rows.append([*named, same, lengths, branches, str(row["preemptions"]), str(row["prefix_hits"])])
    same, texts = (sum(row[name] for row in data["rows"]) for name in ("identical", "texts"))
    return [(heads, rows)], f"{same} of {texts} texts are plain decoding's, token for token."


def speed(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["model", "drafter", "prompts", "sequences", "temperature", "tokens/s", "speed-up", "95% interval"]
    heads += ["wanted", "tokens per forward", "same texts"]
    rows = []
    for row in data["rows"]:
        bounds = row["speed_up_interval"]
        rows.append(
            [
                *(row["model"], row["drafter"], row.get("prompts_of", "MT-bench"), str(row["batch"])),
                *(f"{row['temperature']:g}", f"{row['tokens_per_second']:.0f}"),
                _mark(f"{row['speed_up']:.2f}×", row["speed_up"] >= row["reach"]),
                "–" if bounds is None else f"{bounds[0]:.2f}–{bounds[1]:.2f}",
                f"≥ {row['reach']:g}",
                f"{row['tokens_per_forward']:.2f}",
                f"{row['identical']} of {row['prompts']}",
            ]
        )
    return [(heads, rows)], "Against our own plain decoding, in turns. Bold: not reached."


def fast(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["shape", "", "sequences", "exact kernels, ms", "fast kernels, ms", "exactness costs", "at most"]
    rows = []
    for row in data["rows"]:
        times = [f"{row[name]:.2f}" for name in ("exact_ms", "fast_ms")]
        cost = _mark(f"{row['cost']:.1%}", row["cost"] <= row["reach"])
        rows.append([row["shape"], row["what"], str(row["batch"]), *times, cost, f"{row['reach']:.0%}"])
    return [(heads, rows)], "Made-up weights; both engines in turns. Below 0 the exact kernels were the faster ones."


def long(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["shape", "context", "ms to read the cache", "attention, ms a step", "ratio", "wanted", "ms a step"]
    heads += ["after 512 tokens", "longer, in times to read what is between"]
    rows = []
    for row in data["rows"]:
        told = [f"{row['cache_read_ms']:.2f}", "–" if row["ratio"] is None else f"{row['attention_ms']:.2f}"]
        ratio = "–" if row["ratio"] is None else _mark(f"{row['ratio']:.2f}", row["ratio"] <= row["reach"])
        steps = [f"{row[name]:.2f}" for name in ("step_ms", "short_step_ms")]
        longer = _mark(f"{row['longer_ratio']:.2f}", row["longer_ratio"] <= row["reach"])
        rows.append([row["shape"], str(row["context"]), *told, ratio, f"≤ {row['reach']:g}", *steps, longer])
    speed = data["rows"][0]["bytes_per_second"] / 1e12
    told = (
        "One sequence. Attention: by how much later than all before them its kernels ended, by PyTorch's profiler. A "
    )
    return [(heads, rows)], f"{told}copy ran at {speed:.2f} TB/s in the same run."


def serving(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = [
        "requests a second",
        "requests",
        "",
        "tokens/s",
        "first token, ms: median",
        "p99",
        "between tokens, ms: median",
        "p99",
    ]
    heads.append("rounds with prompts")
    rows = []
    for row in sorted(data["rows"], key=lambda row: row["rate"]):  # of equals as they were found: ours first
        times = [f"{row[name][part]:.1f}" for name in ("ttft_ms", "itl_ms") for part in ("p50", "p99")]
        share = f"{row['rounds_with_prompts'] / max(row['rounds'], 1):.0%}" if "rounds" in row else "–"
        rows.append(
            [f"{row['rate']:g}", str(row["requests"]), row["who"], f"{row['tokens_per_second']:.0f}", *times, share]
        )
    first = data["rows"][0]
    asked = f"requests of {first['input']} tokens, {first['output']} new"
    told = f"{first['shape']}, made-up weights; {asked}, at the same random times for all."
    return [(heads, rows)], told


def transformers(data: dict[str, Any]) -> tuple[list[Table], str]:
    rows = [[row["who"], f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}×"] for row in data["rows"]]
    first = data["rows"][0]
    absent = "".join(f" {name}: {why}." for name, why in first["absent"].items() if name == "transformers")
    table = ["", "tokens/s", "our plain decoding against it"], rows
    return [table], f"{first['model']}, one prompt at a time.{absent}"


def vllm(data: dict[str, Any]) -> tuple[list[Table], str]:
    heads = ["", "sequences", "paceline, ms", "vLLM, ms", "times as fast", "wanted", "tokens a round", "vLLM's"]
    rows = []
    for row in data["rows"]:
        times = [f"{row[name]:.2f}" for name in ("ours_ms", "peer_ms")]
        ratio = _mark(f"{row['ratio']:.2f}×", row["ratio"] >= row["reach"])
        rounds = [row.get(name) for name in ("ours_rounds", "peer_rounds")]
        brought = ["–" if count is None else f"{row['tokens'] / count:.2f}" for count in rounds]
        rows.append([row["what"], str(row["batch"]), *times, ratio, f"≥ {row['reach']:.2g}", *brought])
    told = "One after the other in one run; of real weights, milliseconds a token of one sequence, and how many tokens "
    return [(heads, rows)], told + "a round of the first prompt brought. Bold: not reached."


def compiled(data: dict[str, Any]) -> tuple[list[Table], str]:
    """Of one sequence: plain rounds, and those with as many nodes as there are."""
    names = {"plain": "plain", "chain": "EAGLE chain", "fixed": "EAGLE fixed tree", "grown": "EAGLE grown tree"}
    heads = ["shape", "rounds", "nodes", "launches, greedy", "sampled", "kernels of all sizes", "of them spill"]
    rows = []
    for row in data["rows"]:
        alone = [one for one in row["rounds"] if one["sequences"] == 1]
        most = max(one["nodes"] for one in alone)
        told = {one["greedy"]: str(one["launches"]) for one in alone if one["nodes"] == most}
        spilled = sum(kernel["spilled"] > 0 for kernel in row["kernels"])
        named = [row["shape"], names.get(row["rounds_of"], row["rounds_of"]), str(most)]
        rows.append([*named, told[True], told[False], str(len(row["kernels"])), str(spilled)])
    target = f"Compiled for an H200 (sm_90) by Triton {data['triton']}, on a machine without a GPU."
    return [(heads, rows)], f"One sequence. {target}"


PARTS = {
    "compile": compiled,
    "steps": steps,
    "verify": verify,
    "profile": profile,
    "exact": exact,
    "head": speed,
    "lookup": speed,
    "fast": fast,
    "long": long,
    "serving": serving,
    "transformers": transformers,
    "vllm": vllm,
}
