"""`paceline bench serve`, against servers of several habits."""

from __future__ import annotations

import asyncio
import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.bench import kinds
from paceline.bench import serving as bench
from paceline.bench.client import Ask, Reply, Server, parse_counters
from paceline.cli import app, bench_serve
from paceline.errors import OptionError
from tests.bench.openai_server import Behaviour, serving

SMALL = ["--num-prompts", "5", "--random-input-len", "9", "--random-output-len", "6"]
SPECULATION = {
    "drafted_by_position": [4, 2],
    "accepted_by_position": [3, 0],
    "target_forwards": 3,
}


def run(address: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", "--base-url", address, *SMALL, *words])


def saved(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    data: dict[str, Any] = json.loads(file.read_text())
    return data


def test_a_servers_answers_are_counted_timed_shown_and_saved(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 6, "speculation": SPECULATION}
    with serving(Behaviour(usage=usage)) as address:
        result = run(address, "--save-result", "--result-dir", str(tmp_path), "--max-concurrency", "2")
    assert result.exit_code == 0, result.output
    assert "requests answered      5" in result.stdout and "first token (TTFT)" in result.stdout
    assert "drafts accepted        50.0% of 30, 2.00 tokens per target forward" in result.stdout
    data = saved(tmp_path)
    assert data["kind"] == "serve" and {"command", "versions", "machine", "revision", "options"} <= data.keys()
    figures = data["figures"]
    assert (figures["completed"], figures["failed"]) == (5, 0)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (35, 30)
    assert 1 <= figures["max_concurrent_requests"] <= 2
    assert figures["output_throughput"] == pytest.approx(30 / figures["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= figures[f"median_{metric}_ms"] <= figures[f"p99_{metric}_ms"]
    assert data["acceptance"]["accepted_by_position"] == [15, 0]
    assert [len(request["gaps"]) for request in data["requests"]] == [3] * 5
    page = next(tmp_path.glob("*.html")).read_text()
    assert page.startswith("<!doctype html>") and "To the first token" in page and "<script" not in page


def test_a_second_result_of_the_same_name_leaves_the_first_alone(tmp_path: Path) -> None:
    words = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "run.json")
    with serving(Behaviour()) as address:
        assert run(address, *words).exit_code == run(address, *words).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "run.html", "run-2.json", "run-2.html"}


def test_what_a_server_refuses_is_left_out_and_its_pieces_are_counted(tmp_path: Path) -> None:
    behaviour = Behaviour(refused=("stream_options", "ignore_eos"))
    with serving(behaviour) as address:
        result = run(address, "--ignore-eos", "--save-result", "--result-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    data = saved(tmp_path)
    assert data["server"]["left_out"] == ["stream_options", "ignore_eos"]
    assert data["figures"]["total_output_tokens"] == 5 * 4
    assert not {"stream_options", "ignore_eos"} & behaviour.bodies[-1].keys()


def test_a_server_that_counts_nothing_is_measured_all_the_same(tmp_path: Path) -> None:
    with serving(Behaviour(usage=None)) as address:
        result = run(address, "--save-result", "--result-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "drafts accepted" not in result.stdout
    data = saved(tmp_path)
    assert data["acceptance"] is None and data["server"]["left_out"] == []
    assert data["figures"]["total_output_tokens"] == 5 * 4  # pieces
    assert data["figures"]["total_input_tokens"] is data["figures"]["total_token_throughput"] is None
    assert "prompt tokens          not told; --tokenizer would count them" in result.stdout
    assert data["figures"]["median_tpot_ms"] >= 0


def test_requests_that_fail_are_counted_apart_and_said(tmp_path: Path) -> None:
    with serving(Behaviour(fails=frozenset({2}), breaks=frozenset({3}))) as address:
        result = run(address, "--save-result", "--result-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "requests answered      3, 2 failed" in result.stdout
    assert "failed: HTTP 500: no room" in result.stdout and "the engine failed" in result.stdout
    assert saved(tmp_path)["figures"]["total_output_tokens"] == 3 * 6


def test_a_chat_route_a_key_and_further_fields_are_sent(tmp_path: Path) -> None:
    behaviour = Behaviour()
    rows = tmp_path / "rows.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"turns": ["first", "second"]}) + "\n")
    words = ["--backend", "openai-chat", "--dataset-name", "jsonl", "--dataset-path", str(rows), "--api-key", "secret"]
    extra = ["--extra-body", '{"top_p": 0.5}', "--output-len", "11", "--model", "mine"]
    with serving(behaviour) as address:
        result = run(f"{address}/v1/", *words, *extra, "--save-result", "--result-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert set(behaviour.paths) == {"/v1/chat/completions"}
    asked = [body["messages"] for body in behaviour.bodies]
    assert talk in asked and [{"role": "user", "content": "first"}] in asked
    assert all(body["top_p"] == 0.5 and body["model"] == "mine" for body in behaviour.bodies)
    assert behaviour.bodies[-1]["max_tokens"] == 11
    assert {headers["Authorization"] for headers in behaviour.headers} == {"Bearer secret"}
    assert "secret" not in json.dumps(saved(tmp_path)["options"])
    recorded = kinds.record_serving(
        bench.Run(), Server("http://x", api_key="secret"), "paceline --api-key secret", {}, ()
    )
    assert recorded["command"] == "paceline --api-key KEY"


def test_random_prompts_have_the_length_asked_for_and_the_same_seed_gives_the_same(checkpoint: Path) -> None:
    def prompts(tokenizes: bool, *words: str) -> list[str]:
        behaviour = Behaviour(tokenizes=tokenizes)
        with serving(behaviour) as address:
            assert run(address, *words).exit_code == 0
        return sorted(body["prompt"] for body in behaviour.bodies[1:])

    assert {len(text) for text in prompts(True)} == {9}  # a letter is a token there
    assert {len(text.split()) for text in prompts(False)} == {9}
    assert prompts(True) == prompts(True) != prompts(True, "--seed", "1")
    ratio = prompts(True, "--random-range-ratio", "0.5", "--num-prompts", "30")
    assert 4 <= min(map(len, ratio)) < 9 < max(map(len, ratio)) <= 14
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    for text in prompts(False, "--tokenizer", str(checkpoint)):
        assert abs(len(tokenizer.encode(text)) - 9) <= 2


def test_sharegpt_questions_take_the_length_of_their_answers(tmp_path: Path) -> None:
    file, behaviour = tmp_path / "shared.json", Behaviour(tokenizes=True)
    said = [("short", "no"), ("how far is it to the top?", "x" * 40), ("y" * 1100, "z" * 40)]
    file.write_text(json.dumps([{"conversations": [{"value": a}, {"value": b}]} for a, b in said]))
    with serving(behaviour) as address:
        result = run(address, "--dataset-name", "sharegpt", "--dataset-path", str(file))
    assert result.exit_code == 0, result.output
    assert [(body["prompt"], body["max_tokens"]) for body in behaviour.bodies[1:]] == [(said[1][0], 40)]


def test_acceptance_comes_from_the_servers_counters_where_answers_do_not_tell_it(tmp_path: Path) -> None:
    text = "vllm:spec_decode_num_draft_tokens_total {drafted}\nvllm:spec_decode_num_accepted_tokens_total {accepted}\n"
    behaviour = Behaviour(metrics=(text.format(drafted=10, accepted=1), text.format(drafted=30, accepted=11)))
    with serving(behaviour) as address:
        result = run(address, "--save-result", "--result-dir", str(tmp_path))
    assert "drafts accepted        50.0% of 20" in result.stdout
    assert saved(tmp_path)["acceptance"]["source"] == "/metrics"


def test_counters_are_read_by_position_from_1_whoever_counts() -> None:
    ours = 'paceline_drafted_tokens_total{drafter="ngram",position="1"} 4\n# HELP x\npaceline_up 1\n'
    theirs = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 3.0\n'
    assert parse_counters(ours) == {"drafted": 4.0, "drafted.1": 4.0}
    assert parse_counters(theirs) == {"accepted.1": 3.0}


def test_an_interrupt_keeps_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold, real = threading.Event(), bench.drive

    async def cut(client: Any, server: Any, load: Any, tell: Any) -> Any:
        """As Ctrl-C does: the task is cancelled, here after its second answer."""
        task = asyncio.current_task()
        assert task is not None
        hold.set()

        def told(ended: int, running: int) -> None:
            if ended == 2:
                task.cancel()

        return await real(client, server, load, told)

    monkeypatch.setattr(bench, "drive", cut)
    words = ("--save-result", "--result-dir", str(tmp_path), "--max-concurrency", "1")
    with serving(Behaviour(hold=hold)) as address:
        result = run(address, *words)
    assert result.exit_code == 130
    assert "interrupted: what had been answered by then is counted" in result.stdout
    data = saved(tmp_path)
    assert data["interrupted"] is True and 2 <= data["figures"]["completed"] < 5


def test_arrivals_are_poissons_at_the_rate_and_at_once_without_one() -> None:
    asks = [Ask("x", 1)] * 2000
    assert bench.Load(asks).arrivals() == [0.0] * 2000
    arrivals = bench.Load(asks, rate=4.0, seed=1).arrivals()
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.1)
    assert sum(gap < 0.25 for gap in gaps) / len(gaps) == pytest.approx(1 - 2.718281828**-1, abs=0.04)
    even = bench.Load(asks, rate=4.0, burstiness=100.0).arrivals()
    assert max(after - before for before, after in pairwise(even)) < 0.5


def test_figures_are_what_the_times_say() -> None:
    replies = [
        Reply(Ask("x", 4), 0.0, 1.0, 0.4, [0.2, 0.4], "abc", {"prompt_tokens": 5, "completion_tokens": 4}),
        Reply(Ask("x", 4, prompt_tokens=6), 0.5, 0.5, 0.2, [0.3], "ab", None),
        Reply(Ask("x", 4), 0.6, 0.1, error="HTTP 500: no"),
    ]
    told = bench.figures(bench.Run(replies, 2.0, 2), (50.0,))
    assert (told["completed"], told["failed"], told["total_input_tokens"], told["total_output_tokens"]) == (2, 1, 11, 6)
    assert told["mean_ttft_ms"] == pytest.approx(300) and told["mean_tpot_ms"] == pytest.approx((200 + 300) / 2)
    assert told["p50_itl_ms"] == pytest.approx(300) and told["mean_e2el_ms"] == pytest.approx(750)
    assert told["total_token_throughput"] == pytest.approx(8.5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--backend", "grpc"], "--backend grpc is not known; allowed: openai, openai-chat, vllm, paceline"),
        (["--dataset-name", "alpaca"], "--dataset-name 'alpaca' is not known"),
        (["--dataset-name", "jsonl"], "needs a file; give --dataset-path"),
        (["--request-rate", "0"], "--request-rate 0.0 is not allowed; allowed: above 0, or inf"),
        (["--num-prompts", "0"], "--num-prompts 0 is not allowed; allowed: 1 or more"),
        (["--metric-percentiles", "101"], "allowed: numbers from 0 to 100"),
        (["--extra-body", "[1]"], "--extra-body '[1]' is not a JSON object"),
        (["--percentile-metrics", "tbt"], "allowed: ttft, tpot, itl, e2el"),
        (["--result-filename", "x.txt"], "its name must end in .json"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(words: list[str], sentence: str) -> None:
    with serving(Behaviour()) as address:
        result = run(address, *words)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_a_server_that_is_not_there_is_named() -> None:
    result = run("http://127.0.0.1:9")
    assert result.exit_code == 2 and "http://127.0.0.1:9 does not answer" in " ".join(result.output.split())
    with pytest.raises(OptionError, match="an address as in http://host:8000"):
        bench_serve.read_server({"backend": "vllm", "endpoint": None, "base_url": "host:8000"})
