"""Results as the tables of README and docs, on what the bench really records."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from paceline.bench import machine, results
from tests.bench.examples import IDS, comparison, example, record


def test_a_comparisons_speed_ups_have_their_intervals(figures: ModuleType, tmp_path: Path) -> None:
    results.write(tmp_path / "x.json", record(example("ngram", "suffix")))
    lines = figures.render("x", tmp_path).splitlines()
    tokens = len(IDS) + 6
    per_forward = f"{tokens / (tokens - 8):.2f}"
    assert lines[2] == f"| plain | 2.00 s | {tokens / 2:.1f} | 1.00× | – | 1.00 | – | 2/2 |"
    assert lines[3] == f"| ngram | 1.00 s | {tokens:.1f} | 2.00× | 2.00–2.00 | {per_forward} | 40% | 2/2 |"
    assert lines[-1].startswith("tiny: 2 prompts, at most 20 tokens each")


def test_a_sweep_becomes_a_table_by_draft_length_with_its_verdict(figures: ModuleType, tmp_path: Path) -> None:
    data = record(comparison({"plain": [1.0, 1.0], "1": [0.8, 0.8], "3": [0.5, 0.5]}), "sweep")
    results.write(tmp_path / "x.json", data)
    lines = figures.render("x", tmp_path).splitlines()
    assert lines[0].startswith(
        "| draft length | time | tokens/s | speed-up in time | 95% interval | speed-up in forwards |"
    )
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| plain", "| 1", "| 3"]
    assert " | 2.00× | 2.00–2.00 | " in lines[4]
    assert lines[6] == data["best"]["verdict"]
    assert lines[8].startswith("tiny: Drafter 1; 2 prompts, at most 20 tokens each")


def test_a_file_of_the_layout_before_intervals_is_still_read(figures: ModuleType) -> None:
    lines = figures.render("compare_qwen").splitlines()
    assert lines[2].startswith("| plain | ")
    assert all(line.endswith(" |") for line in lines[:4])


def test_what_can_be_counted_of_a_run_is_weighed_with_the_measured_cost_of_a_row(figures: ModuleType) -> None:
    data = record(example("ngram"))
    lines = figures.counts(data).splitlines()
    cost = figures.json.loads((figures.RESULTS / "cpu_peers.json").read_text("utf-8"))["figures"]["rows"]["rows"]
    each = (next(row["ratio"] for row in cost if row["figure"] == "8 rows") - 1) / 7
    row = data["variants"][1]
    drafts = sum(row["proposed_by_position"]) / row["forwards"]
    assert f"if a draft costs {each:.0%} of a forward" in lines[0]
    gain = row["tokens_per_forward"] / (1 + each * drafts)
    assert lines[2] == f"| ngram | {row['tokens_per_forward']:.2f} | {drafts:.2f} | 40% | {gain:.2f}× |"


def test_dtypes_stand_beside_what_another_checkout_gave(figures: ModuleType, tmp_path: Path) -> None:
    figure = {"weights": "bfloat16", "dtype": "auto", "prefill": [500.0], "rows": [1.5]}
    rows = [
        {"when": "now", **figure, "kernels": "native", "decode": [60.0, 80.0, 70.0]},
        {"when": "before", **figure, "kernels": "torch", "decode": [10.0, 30.0, 20.0]},
        {"when": "now", **figure, "dtype": "float16", "kernels": "native", "decode": [1.0, 1.0, 1.0]},
    ]
    results.write(tmp_path / "x.json", {**machine.record(), "dtypes": rows})
    lines = figures.render("x", tmp_path).splitlines()
    assert lines[2] == "| bfloat16 | auto | 70.0 (20.0) | 500 (500) | 1.50× (1.50×) | native (torch) |"
    assert lines[3] == "| bfloat16 | float16 | 1.0 | 500 | 1.50× | native |"
    assert lines[-1].endswith("one thread, medians of 3 turns.")


def test_a_verdict_may_be_of_the_prompts_of_one_kind(figures: ModuleType, tmp_path: Path) -> None:
    data = record(comparison({"plain": [1.0, 3.0, 1.0], "ngram": [0.5, 3.0, 0.5]}))
    data["prompts"][1]["name"] = "open: it"
    results.write(tmp_path / "x.json", data)
    page = "<!-- verdict: x open -->\n<!-- /verdict -->\n<!-- verdict: x -->\n<!-- /verdict -->\n"
    told = [line for line in figures.rewrite(page, tmp_path).splitlines() if line.startswith("> ")]
    assert (
        told[0] == "> Nothing was faster than plain decoding here; ngram lost least, 1.00× as fast as plain decoding."
    )
    assert "ngram, 1.25× as fast as plain decoding" in told[1] and "6" not in told[0]
