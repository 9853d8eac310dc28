"""`paceline bench offline` and `paceline bench report`, from options to files."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline import SamplingParams
from paceline.bench import compare as bench
from paceline.bench import peers
from paceline.bench.measured import Pass, Plan
from paceline.cli import app, bench_offline
from paceline.llm import LLM
from tests.cli import measured

SMALL = ["--max-tokens", "6", "--num-prompts", "2"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return measured.write_rows(tmp_path / "rows.jsonl")


def run(checkpoint: Path, folder: Path, *words: str) -> Result:
    given = ["bench", "offline", "--model", str(checkpoint), "--output", str(folder), *SMALL, *words]
    return CliRunner().invoke(app, given)


def report(*words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "report", *words])


def test_every_dataset_batch_size_and_temperature_is_measured_with_every_drafter_and_peer(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(dataset.read_text())
    words = ["--dataset-path", str(dataset), "--dataset-path", str(other), "--drafter", "none"]
    words += ["--drafter", f"draft:model={checkpoint}", "--batch-size", "1", "--batch-size", "2"]
    result = run(checkpoint, tmp_path / "out", *words, "--temperature", "0", "--temperature", "0.8", "--rounds", "2")
    assert result.exit_code == 0, result.output
    data = measured.read(tmp_path / "out")
    assert data["kind"] == "offline" and data["interrupted"] is False
    found = [(cell["batch_size"], cell["dataset"], cell["temperature"]) for cell in data["cells"]]
    assert found == [(size, name, heat) for size in (1, 2) for name in ("rows", "other") for heat in (0.0, 0.8)]
    ours, theirs = ["plain", "tiny"], ["transformers", "transformers, prompt lookup", "transformers, assisted"]
    for cell in data["cells"]:
        names = [variant["label"] for variant in cell["variants"]]
        assert names == (ours + theirs if (cell["batch_size"], cell["temperature"]) == (1, 0.0) else ours)
        for variant in cell["variants"]:
            assert len(variant["seconds"]) == 2 and variant["tokens"] == 12
            assert variant["identical"] == 2, variant["label"]
    drafted = data["cells"][0]["variants"][1]
    assert drafted["tokens_per_forward"] > 1 and drafted["acceptance_by_position"][0] == 1.0
    assert drafted["speed_up_interval"] is not None
    assert "llama.cpp" in data["absent"]
    assert "tokens/s, 1 at a time, temperature 0" in result.stdout
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "Drafts accepted, by position: rows" in page


def test_categories_are_datasets_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "spec_bench.jsonl"
    kinds = ("writing", "math", "qa", "writing", "qa", "qa")
    file.write_text("".join(json.dumps({"turns": [f"ask {n}"], "category": k}) + "\n" for n, k in enumerate(kinds)))
    whole = bench_offline.read_datasets([file], 2, by_category=False)
    assert {name: len(found) for name, found in whole.items()} == {"spec_bench": 2}
    split = bench_offline.read_datasets([file], 2, by_category=True)
    texts = {name: [question.text for question in found] for name, found in split.items()}
    assert texts == {"spec_bench: mt_bench": ["ask 0", "ask 1"], "spec_bench: qa": ["ask 2", "ask 4"]}


def test_an_interrupt_keeps_the_cells_that_were_measured(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.run_prompts

    def interrupted(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        if not plan.params.greedy:
            raise KeyboardInterrupt
        return real(llm, plan, numbers, on_done)

    monkeypatch.setattr(bench, "run_prompts", interrupted)
    words = ["--dataset-path", str(dataset), "--temperature", "0", "--temperature", "1", "--no-peers"]
    result = run(checkpoint, tmp_path / "out", *words, "--drafter", "ngram")
    assert result.exit_code == 130
    data = measured.read(tmp_path / "out")
    assert data["interrupted"] is True and [cell["temperature"] for cell in data["cells"]] == [0.0]
    assert "interrupted" in result.stdout


def test_llama_cpp_is_asked_for_the_likeliest_tokens_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Llama:
        def __init__(self, path: str, **given: Any) -> None:
            asked.append((path, given))

        def reset(self) -> None:
            asked.append("reset")

        def generate(self, ids: list[int], **given: Any) -> Iterator[int]:
            asked.append(given)
            return iter(range(ids[-1] + 1, 100))

    module, speculative = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_speculative")
    module.Llama, speculative.LlamaPromptLookupDecoding = Llama, lambda num_pred_tokens: num_pred_tokens  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", speculative)
    found = list(peers._llama_cpp(peers.Asked(tmp_path / "x.gguf", None, 64, "cpu", 2)))
    assert [peer.name for peer in found] == ["llama.cpp", "llama.cpp, prompt lookup"]
    assert [given["n_ctx"] for _, given in asked] == [64, 64] and asked[1][1]["draft_model"] == peers.LOOKUP
    assert found[0].answer([3, 4], 5, []) == [5, 6, 7, 8, 9]
    assert found[0].answer([3, 4], 5, [6]) == [5, 6]
    assert asked[-1]["temp"] == 0.0 and asked[-2] == "reset"


def test_peers_are_asked_only_for_what_they_can_do_alike() -> None:
    known = peers.Peers(True)
    assert known.can_do(SamplingParams(temperature=0.0), 1) and not known.absent
    for params, size in ((SamplingParams(temperature=0.0), 2), (SamplingParams(), 1)):
        assert not known.can_do(params, size)
    assert not known.can_do(SamplingParams(temperature=0.0, repetition_penalty=1.1), 1)
    assert "one prompt at a time" in known.absent["transformers and llama.cpp"]
    assert not peers.Peers(False).can_do(SamplingParams(temperature=0.0), 1)


def test_a_folder_that_llama_cpp_cannot_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))
    _, absent = peers.find_peers(peers.Asked(tmp_path, None, 64, "cpu", 1))
    assert "it reads .gguf files" in absent["llama.cpp"] and "could not load" in absent["transformers"]


# Side by side


def test_runs_of_different_kinds_stand_side_by_side(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path / "a", "--dataset-path", str(dataset), "--drafter", "ngram", "--no-peers")
    measured.run("compare", checkpoint, tmp_path / "b", "--dataset-path", str(dataset), "--drafter", "suffix")
    files = [str(tmp_path / name / "results.json") for name in ("a", "b")]
    page = tmp_path / "pages" / "both.html"
    result = report(*files, "--output", str(page))
    assert result.exit_code == 0, result.output
    assert "A: a\nB: b\n" in result.stdout and "rows, 1 at a time, temperature 0" in result.stdout
    assert {"A: plain", "A: ngram", "B: plain", "B: suffix"} <= {
        line[1:].partition("  ")[0] for line in result.stdout.splitlines()
    }
    text = page.read_text()
    assert "2 runs side by side" in text and "b: suffix" in text and "a: ngram" in text
    assert text.count("<dt>command</dt>") == 2
    named = report(*files, "--output", str(page), "--name", "old", "--name", "new")
    assert "A: old\nB: new\n" in named.stdout
    same = report(files[0], files[0], "--output", str(page))
    assert "A: a\nB: a (2)\n" in same.stdout


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for content, sentence in (("[1]", "holds no results of paceline"), ("{", "is not JSON"), (None, "cannot be read")):
        if content is not None:
            file.write_text(content)
        result = report(str(file if content is not None else tmp_path / "missing.json"))
        assert result.exit_code == 2 and sentence in " ".join(result.output.split())
    file.write_text("{}")
    assert "--name was given 2 times for 1 files" in " ".join(
        report(str(file), "--name", "a", "--name", "b").output.split()
    )


def test_names_that_other_systems_use_lead_here(checkpoint: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["bench", "throughput"]).output
    assert "is called paceline bench offline here" in " ".join(said.split())
    twice = run(checkpoint, tmp_path / "out", "--batch-size", "2", "--batch-size", "2")
    assert twice.exit_code == 2 and "--batch-size was given the same value twice" in " ".join(twice.output.split())
