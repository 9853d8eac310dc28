"""`paceline compare`, from options to files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from paceline import NGram, SamplingParams, Suffix
from paceline.bench import compare as bench
from paceline.bench import differences
from paceline.bench.measured import Pass, Plan
from paceline.bench.prompts import read_questions
from paceline.cli import compare as command
from paceline.llm import LLM
from paceline.pieces import readable
from tests.cli import measured
from tests.cli.measured import read

NGRAM = "ngram:max_match=3,min_match=1,num_draft_tokens=4"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return measured.write_rows(tmp_path / "rows.jsonl")


def run(checkpoint: Path, folder: Path, *words: str) -> Result:
    return measured.run("compare", checkpoint, folder, *words)


def test_a_comparison_writes_its_table_its_report_its_json_and_its_picture(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--drafter", NGRAM, "--drafter", "suffix", "--dataset-path", str(dataset), "--rounds", "2"]
    result = run(checkpoint, tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.endswith("/3 ")]
    assert [row[0] for row in rows] == ["plain", "ngram", "suffix"]
    assert [row[-1] for row in rows] == ["3/3"] * 3
    assert "differs" not in result.stdout
    assert "All 6 answers with drafts are plain's, token for token." in " ".join(result.stdout.split())
    assert f"report: {tmp_path / 'out' / 'report.html'}" in result.stdout
    assert "drafts accepted" in result.stdout and "at position" in result.stdout
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "out" / "compare.svg").read_text().startswith("<svg ")
    data = read(tmp_path / "out")
    assert data["kind"] == "compare"
    assert data["interrupted"] is False
    assert data["options"]["rounds"] == 2
    assert data["options"]["dataset_path"] == str(dataset)
    assert data["command"].split()[0] == "paceline"
    plain, ngram, suffix = data["variants"]
    assert (ngram["drafter"], suffix["drafter"]) == (repr(NGram(4, 1, 3)), repr(Suffix()))
    for variant in data["variants"]:
        assert len(variant["seconds"]) == 2
        assert variant["identical"] == 3
        assert [answer["token_ids"] for answer in variant["answers"]] == [a["token_ids"] for a in plain["answers"]]
        assert all(answer["identical"] for answer in variant["answers"])


def test_the_answers_are_what_the_model_says_in_its_chat_template(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    run(checkpoint, tmp_path / "chat", "--dataset-path", str(dataset), "--num-prompts", "1", "--drafter", "ngram")
    run(
        checkpoint,
        tmp_path / "raw",
        "--dataset-path",
        str(dataset),
        "--num-prompts",
        "1",
        "--drafter",
        "ngram",
        "--raw",
    )
    llm, params = LLM(str(checkpoint)), SamplingParams(temperature=0.0, max_tokens=20)
    text = "the rider in front"
    chat = llm.chat([{"role": "user", "content": text}], params)[0].outputs[0].token_ids
    raw = llm.generate(text, params)[0].outputs[0].token_ids
    assert read(tmp_path / "chat")["variants"][0]["answers"][0]["token_ids"] == chat
    assert read(tmp_path / "raw")["variants"][0]["answers"][0]["token_ids"] == raw


def test_without_options_our_own_prompts_and_two_drafters_are_compared(checkpoint: Path, tmp_path: Path) -> None:
    result = run(checkpoint, tmp_path, "--num-prompts", "1", "--max-tokens", "4")
    assert result.exit_code == 0, result.output
    data = read(tmp_path)
    assert [variant["name"] for variant in data["variants"]] == ["plain", "ngram", "suffix"]
    assert [variant["label"] for variant in data["variants"]] == ["plain", "ngram", "suffix"]
    assert [variant["drafter"] for variant in data["variants"][1:]] == [repr(NGram()), repr(Suffix())]
    assert [prompt["name"] for prompt in data["prompts"]] == [read_questions(None)[0].name]


def test_prompts_answered_together_and_sampled_say_the_same(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    words = ["--dataset-path", str(dataset), "--batch-size", "3", "--temperature", "0.8", "--seed", "5"]
    assert run(checkpoint, tmp_path, *words).exit_code == 0
    assert [variant["identical"] for variant in read(tmp_path)["variants"]] == [3, 3, 3]


def test_no_prefix_is_cached_and_no_more_run_together_than_asked(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LLM] = []
    real = bench.compare
    monkeypatch.setattr(bench, "compare", lambda llm, *rest: (seen.append(llm), real(llm, *rest))[1])
    run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--batch-size", "2")
    (llm,) = seen
    assert llm.options.prefix_caching is False
    assert llm.options.max_num_seqs == 2


def plant(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """Let the suffix drafter change a token of the second answer, as a faulty acceptance would."""
    real = bench.run_prompts

    def faulty(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        done = real(llm, plan, numbers, on_done)
        drafter = llm.engine.drafter
        for answer in done.answers:
            if drafter is not None and drafter.name == "suffix" and answer.prompt == 1 and plan.params.max_tokens > 8:
                answer.output = copy.deepcopy(answer.output)
                answer.output.token_ids[position] += 1
        return done

    monkeypatch.setattr(bench, "run_prompts", faulty)


def test_a_planted_difference_is_reported_with_its_margin(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, position=6)
    result = run(checkpoint, tmp_path, "--dataset-path", str(dataset))
    assert result.exit_code == 0, result.output
    data = read(tmp_path)
    assert [variant["identical"] for variant in data["variants"]] == [3, 3, 2]
    difference = data["variants"][2]["answers"][1]["difference"]
    assert difference["position"] == 6
    llm = LLM(str(checkpoint))
    prefix = llm.read_chat([{"role": "user", "content": "the rider behind rests and the rider"}]).ids
    prefix = prefix + data["variants"][0]["answers"][1]["token_ids"][:6]
    output = llm.generate([prefix], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))[0].outputs[0]
    assert output.logprobs is not None
    first, second = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)[:2]
    assert difference["margin"] == pytest.approx(first - second, abs=1e-4)
    assert f"suffix, line 2: differs from token 7 on, margin {difference['margin']:.5f}" in result.stdout
    assert "2/3" in result.stdout


def test_an_answer_is_shown_when_asked_for(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    words = ["--dataset-path", str(dataset), "--drafter", str(checkpoint)]  # drafts itself, so all are accepted
    assert "drafted and accepted" not in run(checkpoint, tmp_path / "quiet", *words).stdout
    shown = run(checkpoint, tmp_path, *words, "--show").stdout
    assert "drafted and accepted" in shown
    answers = [readable(answer["text"]).split() for answer in read(tmp_path)["variants"][1]["answers"]]
    assert any(" ".join(words) in " ".join(shown.split()) for words in answers if words)


def test_a_shown_answer_ends_where_its_text_ends(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    words = ["--dataset-path", str(dataset), "--drafter", str(checkpoint)]  # drafts itself, so all are accepted
    run(checkpoint, tmp_path / "first", *words)
    ids = read(tmp_path / "first")["default"]["token_ids"]
    stops = [word for token in {answer[8] for answer in ids} for word in ("--stop-token-id", str(token))]
    run(checkpoint, tmp_path, *words, *stops)
    data = read(tmp_path)
    texts = {answer["prompt"]: answer["text"] for answer in data["variants"][1]["answers"]}
    assert {answer["finish_reason"] for answer in data["variants"][1]["answers"]} == {"stop"}
    assert data["shown"]
    for item in data["shown"]:
        assert "".join(piece for piece, _, _ in item["pieces"]) == texts[item["prompt"]]


def test_an_interrupt_keeps_what_was_measured_and_exits_130(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.run_prompts

    def interrupted(llm: LLM, plan: Plan, numbers: Any, on_done: Any) -> Pass:
        drafter = llm.engine.drafter
        if drafter is not None and drafter.name == "suffix" and plan.params.max_tokens > 8:  # not in the warm-up
            raise KeyboardInterrupt
        return real(llm, plan, numbers, on_done)

    monkeypatch.setattr(bench, "run_prompts", interrupted)
    result = run(checkpoint, tmp_path, "--dataset-path", str(dataset))
    assert result.exit_code == 130
    data = read(tmp_path)
    assert [variant["label"] for variant in data["variants"]] == ["plain", "ngram"]
    assert data["interrupted"] is True
    assert data["ngram"] is not None
    assert "suffix" not in data
    assert (tmp_path / "compare.svg").exists()
    assert "Interrupted" in (tmp_path / "report.html").read_text()
    assert "interrupted" in result.stdout


def test_an_interrupt_before_anything_was_measured_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_prompts", interrupted)
    result = run(checkpoint, tmp_path / "out", "--num-prompts", "1")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert list((tmp_path / "out").iterdir()) == []


def test_a_second_run_leaves_the_first_ones_files_alone_and_says_where_its_own_are(
    checkpoint: Path, dataset: Path, tmp_path: Path
) -> None:
    words = ["--dataset-path", str(dataset), "--drafter", "ngram", "--num-prompts", "1", "--max-tokens", "4"]
    folders = [tmp_path / name for name in ("out", "out-2", "out-3")]
    kept: dict[Path, bytes] = {}
    for folder in folders:
        result = run(checkpoint, tmp_path / "out", *words)
        assert result.exit_code == 0, result.output
        assert f"report: {folder / 'report.html'}\n" in result.stdout
        stay = f"{tmp_path / 'out'} holds earlier results, which stay; these are in {folder}\n"
        assert result.stderr == (stay if kept else "")
        assert {path: path.read_bytes() for path in kept} == kept
        kept |= {path: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) == 3 * len(folders)


def test_a_folder_with_other_files_in_it_is_used_as_it_is(checkpoint: Path, dataset: Path, tmp_path: Path) -> None:
    run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--num-prompts", "1", "--max-tokens", "4")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "report.html", "results.json", "compare.svg"}


@pytest.mark.parametrize(("folder", "free"), [("out", "out-2"), ("a/out", "a/out-2"), (".", "results-2")])
def test_the_next_free_folder_stands_beside_or_within_the_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, free: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.measuring.free_folder(Path(folder)) == Path(folder)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "report.html").touch()
    assert command.measuring.free_folder(Path(folder)) == Path(free)


def test_no_file_is_overwritten_that_came_into_being_while_it_ran(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, real = tmp_path / "saved.json", bench.compare
    monkeypatch.setattr(bench, "compare", lambda *given: (saved.write_text("mine"), real(*given))[1])
    words = ["--dataset-path", str(dataset), "--num-prompts", "1", "--max-tokens", "4", "--save-output", str(saved)]
    result = run(checkpoint, tmp_path / "out", *words)
    assert (result.exit_code, saved.read_text()) == (2, "mine")
    assert result.stderr == f"{saved} cannot be written: File exists\n"
    monkeypatch.undo()
    again = run(checkpoint, tmp_path / "out", *words)
    assert again.exit_code == 2
    assert again.stderr == (
        f"--save-output '{saved}' is there already, and is not overwritten; give the name of a new file\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--drafter", "none"], "'none' is plain decoding"),
        (["--drafter", "ngram", "--drafter", "ngram"], "'ngram' was given twice"),
        (["--drafter", "ngram:tree=true"], "option 'tree' is not known"),
        (["--rounds", "0"], "--rounds 0 is not allowed"),
        (["--batch-size", "0"], "max_num_seqs=0 is not allowed"),
        (["--num-prompts", "0"], "--num-prompts 0 is not allowed"),
        (["--max-tokens", "0"], "--max-tokens 0 is not allowed"),
        (["--temperature", "-1"], "--temperature -1.0 is not allowed"),
        (["--dataset-path", "no-such-file"], "the dataset no-such-file cannot be read"),
        (["--output", "/dev/null/x"], "the output folder /dev/null/x cannot be made"),
        (["--save-output", "results.txt"], "--save-output 'results.txt' is not allowed; its name must end in .json"),
        (["--save-output", "/dev/null/x.json"], "the output folder /dev/null cannot be made"),
        (["--demo", "de"], "the demo 'de' is not known; allowed: te (English), tc (Chinese), chat (conversations)"),
        (["--demo", "chat", "--raw"], "'recipe, then a list' is a conversation, which --raw cannot write"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 is not supported yet"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization 2.0 is not allowed"),
        (["--num-speculative-tokens", "0"], "a draft length of 0 is not allowed; allowed: 1 or more"),
        (["--ngram-prompt-lookup-max", "3", "--ngram-prompt-lookup-min", "4"], "min_match=4 is above max_match=3"),
        (["--template", "unknown"], "--template 'unknown' is not known"),
        (["--template", "vicuna", "--raw"], "--raw and --template contradict each other; give one"),
        (["--drafter", "sufix"], "did you mean 'suffix'?"),
        (["--drafter-quantization", "banana"], "quantization='banana' is not known"),
        (
            ["--drafter", "ngram:num_draft_tokens=8", "--num-draft-tokens", "3"],
            "--drafter ngram:num_draft_tokens=8 and a draft length of 3 contradict each other; give one",
        ),
        (
            ["--drafter", "ngram:max_match=8", "--ngram-prompt-lookup-max", "3"],
            "--drafter ngram:max_match=8 and a match of at most 3 tokens contradict each other; give one",
        ),
        (
            ["--speculative-model", "m", "--drafter", "ngram"],
            "--speculative-model and --drafter were both given; write the model as --drafter draft:model=m",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    checkpoint: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    result = run(checkpoint, tmp_path, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody may write")
@pytest.mark.parametrize("words", [["--output", "/proc"], ["--save-output", "/proc/x.json"]])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(command.measuring, "run", lambda *ignored: pytest.fail("it ran"))
    result = run(checkpoint, tmp_path, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("the output folder /proc cannot be written to: ")
    assert len(result.stderr.splitlines()) == 1


def test_what_cannot_be_written_is_said_after_what_was_measured(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.measuring, "RESULTS", "none/results.json")
    monkeypatch.setattr(Path, "mkdir", lambda *ignored, **options: None)
    result = run(checkpoint, tmp_path, "--dataset-path", str(dataset), "--max-tokens", "4")
    assert result.exit_code == 2
    assert "All 6 answers with drafts are plain's, token for token." in " ".join(result.stdout.split())
    assert "report:" not in result.stdout
    assert result.stderr == f"{tmp_path / 'none' / 'results.json'} cannot be written: No such file or directory\n"


def test_an_interrupt_while_differences_are_looked_at_keeps_what_was_measured(
    checkpoint: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*ignored: object) -> None:
        raise KeyboardInterrupt

    plant(monkeypatch, position=6)
    monkeypatch.setattr(differences, "find_margin", interrupted)
    result = run(checkpoint, tmp_path, "--dataset-path", str(dataset))
    assert result.exit_code == 130
    data = read(tmp_path)
    assert data["interrupted"] is True
    assert [variant["identical"] for variant in data["variants"]] == [3, 3, 2]
    assert data["variants"][2]["answers"][1]["difference"]["margin"] is None
    assert "suffix, line 2: differs from token 7 on" in result.stdout


def test_a_prompt_that_is_too_long_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x"}) + "\n" + json.dumps({"text": "rider " * 2000}) + "\n")
    result = run(checkpoint, tmp_path, "--dataset-path", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("prompt 'line 2': the prompt has ")
