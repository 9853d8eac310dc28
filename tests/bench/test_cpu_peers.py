"""The measurements against other programs, run small: their shape, what a missing peer looks like, their arithmetic.

No time is judged here. For one figure the sides are processes of their own, as always, and so is the script, as anybody
would start it. Elsewhere sides answer in this process: starting one takes seconds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from tests.fakes import tiny_model

BENCH = Path(__file__).parents[2] / "bench"


with pytest.MonkeyPatch.context() as place:
    place.syspath_prepend(str(BENCH))  # where a script finds its neighbours
    cpu_peers: Any = importlib.import_module("cpu_peers")
    cpu_sides: Any = importlib.import_module("cpu_sides")
    same_tokens: Any = importlib.import_module("same_tokens")
    perplexity: Any = importlib.import_module("perplexity")
    peer_processes: Any = importlib.import_module("peer_processes")
    DRAFTERS = importlib.import_module("cpu_speculation").DRAFTERS
has_llama = any(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "xllamacpp"))


class Here(peer_processes.Peer):  # type: ignore[misc]
    """A side in this process; what is asked and told still has to go through JSON."""

    ended = False

    def __init__(self, kind: str, python: str) -> None:
        self.kind = kind
        try:
            self.side = cpu_sides.SIDES[kind]()
        except ImportError:
            raise peer_processes.PeerError("not installed") from None
        self.versions = self.side.versions

    def __call__(self, do: str, **given: Any) -> Any:
        try:
            return json.loads(json.dumps(getattr(self.side, do)(**json.loads(json.dumps(given)))))
        except Exception as error:
            raise peer_processes.PeerError(f"{self.kind}: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        del self.side


@contextmanager
def sides_here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (peer_processes, same_tokens, perplexity):
            patch.setattr(module, "Peer", Here)
        for silenced in ("set_verbosity_error", "disable_progress_bar"):  # not for all tests to come
            patch.setattr(transformers.logging, silenced, lambda: None)
        yield


@pytest.fixture
def here() -> Iterator[None]:
    with sides_here():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def record(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("datasets")
    (folder / "asked.jsonl").write_text(
        json.dumps({"category": "rag", "turns": ["one two three one two"]})
        + "\n"
        + json.dumps({"category": "poetry", "turns": ["never asked, because rag is there"]})
        + "\n"
        + json.dumps({"task_id": "T/0", "prompt": "def one():"})
    )
    output = folder / "out.json"
    words = ["--quick", "--repeat", "2", "--threads", "1", "--small", str(checkpoint), "--large", str(checkpoint)]
    with sides_here(), pytest.raises(SystemExit) as ended:
        cpu_peers.main([*words, "--dataset-path", str(folder / "asked.jsonl"), "--output", str(output)])
    assert ended.value.code == 0
    told: dict[str, Any] = json.loads(output.read_text())
    return told


def test_without_a_dataset_prompts_of_our_own_are_asked() -> None:
    asked = importlib.import_module("cpu_speculation").built_in()
    assert list(asked) == ["built-in"] and all(asked["built-in"])


def test_the_script_asks_sides_in_processes_of_their_own(checkpoint: Path, tmp_path: Path) -> None:
    words = ["--quick", "--repeat", "1", "--threads", "1", "--small", str(checkpoint), "--only", "decode-small"]
    command = [sys.executable, str(BENCH / "cpu_peers.py"), *words, "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    (run,) = figures["decode-small"]["raw"]["paceline"]
    assert len(run["tokens"]) == cpu_peers.QUICK.new
    assert "tokens/s" in done.stdout


def test_every_figure_is_there_with_the_record_of_the_machine(record: dict[str, Any]) -> None:
    assert list(record["figures"]) == list(cpu_peers.FIGURES)
    assert {"machine", "threads", "figures"} == set(record)
    told = {"command", "date", "versions", "revision", "repeat", "sizes", "settings"}
    assert all(told <= set(figure) for figure in record["figures"].values())
    assert {"cpu", "cores"} <= set(record["machine"])
    assert str(BENCH) not in json.dumps(record), "no path of this machine is written down"
    for name, figure in record["figures"].items():
        assert figure["rows"] and figure["raw"] and figure["seconds"] > 0, name


def test_figures_measured_before_stay_in_the_file(tmp_path: Path) -> None:
    former = {"figures": {"rows": {"rows": ["kept"]}}}
    (tmp_path / "out.json").write_text(json.dumps(former))
    assert cpu_peers.read_former(tmp_path / "out.json") == former["figures"]
    (tmp_path / "other.json").write_text("[]")
    assert cpu_peers.read_former(tmp_path / "other.json") == cpu_peers.read_former(tmp_path / "none.json") == {}


def test_what_is_to_be_reached_is_said_of_figures_there_are(record: dict[str, Any]) -> None:
    """Categories and counts differ in a small run; the rest must carry the very names."""
    shown = {f"{row['figure']} / {row['against']}" for figure in record["figures"].values() for row in figure["rows"]}
    fixed = {name for name in cpu_peers.REACH if not name.startswith(("8 rows", "16 rows", "small,", "large,"))}
    assert fixed <= shown


def test_every_row_is_whole_and_its_ratio_is_ours_over_the_other(record: dict[str, Any]) -> None:
    for row in (row for figure in record["figures"].values() for row in figure["rows"]):
        assert set(row) == {"figure", "unit", "ours", "against", "peer", "note", "ratio"}
        if row["peer"] is None:
            assert row["ratio"] is None and row["note"]
        else:
            assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])


@pytest.mark.skipif(has_llama, reason="llama_cpp is installed here")
def test_a_peer_that_cannot_be_imported_is_said_to_be_not_installed(record: dict[str, Any]) -> None:
    rows = [row for figure in record["figures"].values() for row in figure["rows"] if "llama.cpp" in row["against"]]
    # Decode twice, prefill, rows, speculative twice with and without prompts, memory twice.
    assert len(rows) == 10
    assert {(row["peer"], row["note"]) for row in rows} == {(None, "not installed")}


def test_raw_times_are_kept_for_every_repetition(record: dict[str, Any]) -> None:
    figures, sizes = record["figures"], cpu_peers.QUICK
    decoded = figures["decode-small"]["raw"]["paceline"]
    assert [len(run["tokens"]) for run in decoded] == [sizes.new] * 2
    speeds = sorted((sizes.new - 1) / run["rest"] for run in decoded)
    assert figures["decode-small"]["rows"][0]["ours"] == pytest.approx(sum(speeds) / 2)
    for turn in figures["rows"]["raw"]["paceline"]:
        assert {count: len(times) for count, times in turn.items()} == {str(count): 3 for count in sizes.counts}


def test_drafters_say_what_plain_decoding_says_and_the_named_category_alone_is_asked(record: dict[str, Any]) -> None:
    raw = record["figures"]["speculative-small"]["raw"]
    assert list(raw) == ["rag"]
    runs = raw["rag"]["runs"]
    assert set(DRAFTERS) | {"transformers"} <= set(runs)
    said = {json.dumps([answer["tokens"] for answer in turn]) for name in DRAFTERS for turn in runs[name]}
    assert len(said) == 1
    proposed = sum(answer["proposed"] for name in DRAFTERS for turn in runs[name] for answer in turn)
    assert proposed > 0, "a drafter that never drafts measures nothing"


def test_memory_is_compared_with_the_file_and_the_cache(record: dict[str, Any], checkpoint: Path) -> None:
    config = tiny_model().config
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    each = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // 4)
    row = record["figures"]["memory-small"]["rows"][0]
    assert row["against"] == "file + cache"
    assert row["peer"] == pytest.approx((size + cpu_peers.QUICK.total * each) / 1e6)


def test_a_figure_whose_model_does_not_load_is_reported_and_the_others_still_run(
    tmp_path: Path, checkpoint: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--repeat", "1", "--threads", "1", "--small", str(checkpoint), "--large", "no/such/model/here"]
    with pytest.raises(SystemExit) as ended:
        cpu_peers.main([*words, "--only", "decode-large", "decode-small", "--output", str(tmp_path / "out.json")])
    assert ended.value.code == 1
    assert "decode-large failed: paceline: CheckpointError" in capsys.readouterr().err
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["decode-large"]["rows"] == [] and figures["decode-small"]["rows"]


def test_perplexity_is_that_of_the_transformers_model(tmp_path: Path, checkpoint: Path, here: None) -> None:
    words = ["--model", str(checkpoint), "--chunk", "48", "--max-tokens", "121", "--threads", "1"]
    perplexity.main([*words, "--output", str(tmp_path / "out.json")])
    told = json.loads((tmp_path / "out.json").read_text())
    assert {"command", "date", "versions", "machine", "model", "sides", "chunk_sizes"} <= set(told)
    assert told["chunk_sizes"] == [48, 48, 25]
    ids = [3 + byte % 94 for byte in peer_processes.PROSE.read_text().encode()][:121]
    losses = []
    with torch.no_grad():
        for chunk in perplexity.cut(ids, 48):
            given = torch.tensor([chunk])
            losses.append(float(tiny_model()(given, labels=given).loss) * (len(chunk) - 1))
    exact = told["sides"][perplexity.EXACT]
    assert exact["losses"] == pytest.approx(losses, rel=1e-4)
    assert exact["perplexity"] == pytest.approx(math.exp(sum(losses) / (47 + 47 + 24)), rel=1e-4)


def test_chunks_hold_every_token_but_a_last_one_that_predicts_nothing() -> None:
    assert perplexity.cut(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    assert perplexity.cut(list(range(8)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_turns_alternate_and_the_first_is_not_counted() -> None:
    asked: list[str] = []
    taken = peer_processes.in_turn(2, {name: lambda name=name: asked.append(name) or len(asked) for name in ("a", "b")})
    assert asked == ["a", "b"] * 3
    assert taken == {"a": [3, 5], "b": [4, 6]}


class FakeServer:
    """xllamacpp's, as far as it is asked."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, given: Any) -> None:
        assert given.model.path == "some.gguf" and given.n_ctx == 99 and given.cpuparams.n_threads == 3
        assert given.swa_full is True

    def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        content = [{"id": number} for number in range(asked["n_predict"])]
        timings = {"prompt_ms": 250.0, "predicted_ms": 1500.0}
        return {"choices": [{"logprobs": {"content": content}}], "timings": timings}


def test_without_llama_cpp_python_the_other_package_is_asked_and_its_own_clock_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def params() -> Any:
        parts = {name: types.SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")}
        return types.SimpleNamespace(**parts)

    fake: Any = types.ModuleType("xllamacpp")
    fake.__version__, fake.CommonParams, fake.Server, fake.get_system_info = "9", params, FakeServer, lambda: "it"
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    side = cpu_sides.llama()
    assert side.versions == {"llama.cpp": "xllamacpp 9"}
    side.load("some.gguf", 99, 3, swa_full=True)
    for _ in range(2):
        assert side.answers([[5, 6]], 3, []) == [{"first": 0.25, "rest": 1.5, "tokens": [0, 1, 2]}]
    assert ["logprobs" in asked for asked in FakeServer.asked] == [True, False, False], "what costs time is asked once"
    assert all(asked["ignore_eos"] and not asked["cache_prompt"] for asked in FakeServer.asked)
    with pytest.raises(ValueError, match="install llama-cpp-python for rows"):
        side.rows(ids=[1], context=0, counts=[1], runs=1)


def test_tokens_are_counted_against_those_of_transformers_free_and_forced(
    tmp_path: Path, checkpoint: Path, here: None
) -> None:
    words = ["--model", str(checkpoint), "--num-prompts", "3", "--prompt", "9", "--max-tokens", "5", "--threads", "1"]
    same_tokens.main([*words, "--output", str(tmp_path / "out.json")])
    told = json.loads((tmp_path / "out.json").read_text())
    assert {"command", "date", "versions", "machine", "model", "counts"} <= set(told)
    for side in told["counts"].values():
        assert len(side["free"]) == len(side["forced"]) == 3
        assert side["total"] == {"prompts": 3, "tokens": 15, "same_texts": 3, "same_tokens": 15, "agreed": 15}


def test_free_tokens_count_up_to_the_first_that_differs() -> None:
    assert same_tokens.common([1, 2, 3], [1, 2, 3]) == 3
    assert same_tokens.common([1, 2, 3], [1, 5, 3]) == 1
    assert same_tokens.common([1], []) == 0


def test_a_side_that_dies_is_an_error_with_its_name() -> None:
    peer = peer_processes.Peer("paceline", sys.executable)
    try:
        with pytest.raises(peer_processes.PeerError, match="paceline: AttributeError"):
            peer("answers", prompts=[[1]], new=1, stop=[])  # nothing is loaded
        peer._process.kill()
        with pytest.raises(peer_processes.PeerError, match="paceline"):
            for _ in range(2):
                peer("memory")
    finally:
        peer.close()
