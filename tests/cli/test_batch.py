"""`paceline batch`: rows in, answers out, in order; against the library's own answers, cut short, and run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import app, batch
from paceline.llm import LLM as Target

RUNNER = CliRunner()
TEXT = "the rider in front"
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint))


def request(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "gpt-9", **body}}


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    return request(custom_id, "/v1/chat/completions", messages=MESSAGES, **body)


def completion(custom_id: str, **body: Any) -> dict[str, Any]:
    return request(custom_id, "/v1/completions", **{"prompt": TEXT, **body})


class Files:
    """An input, an output, and the command between them."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.source, self.target, self._model = folder / "in.jsonl", folder / "out.jsonl", str(checkpoint)

    def write(self, *rows: Any) -> None:
        self.source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

    def run(self, *words: str) -> Result:
        fixed = ["batch", str(self.source), str(self.target), "--model", self._model, "--max-tokens", "8"]
        return RUNNER.invoke(app, [*fixed, *words])

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path, checkpoint: Path) -> Files:
    return Files(tmp_path, checkpoint)


def texts(answer: dict[str, Any]) -> list[str]:
    choices = answer["response"]["body"]["choices"]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def greedy(most: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most)


def test_every_kind_of_row_gets_the_librarys_own_answer_in_the_order_of_the_rows(llm: LLM, files: Files) -> None:
    sampled = {"temperature": 0.9, "seed": 5, "n": 2}
    files.write(
        chat("a", max_completion_tokens=20),
        completion("b", max_tokens=3),
        {"prompt": TEXT},
        "",
        {"custom_id": "own", "messages": MESSAGES, "max_new_tokens": 4},
        completion("many", prompt=[TEXT, "then the next"], **sampled),
        completion("ids", prompt=llm.tokenizer.encode(TEXT)),
    )
    result = files.run("--drafter", "suffix", "--max-num-seqs", "2")
    assert result.exit_code == 0, result.output
    found = files.answers()
    assert [answer["custom_id"] for answer in found] == ["a", "b", "line-3", "own", "many", "ids"]
    asked, raw = llm.chat(MESSAGES, greedy(20))[0].outputs[0].text, llm.generate(TEXT, greedy())[0].outputs[0].text
    assert texts(found[0]) == [asked]
    assert texts(found[1]) == [llm.generate(TEXT, greedy(3))[0].outputs[0].text]
    assert texts(found[2]) == [llm.chat(MESSAGES, greedy())[0].outputs[0].text]  # as generate asks it
    assert texts(found[3]) == [llm.chat(MESSAGES, greedy(4))[0].outputs[0].text]
    outputs = llm.generate([TEXT, "then the next"], SamplingParams(max_tokens=8, **sampled))
    assert texts(found[4]) == [one.text for output in outputs for one in output.outputs]
    assert texts(found[5]) == [raw]
    body = found[0]["response"]["body"]
    assert (found[0]["response"]["status_code"], found[0]["error"]) == (200, None)
    assert (body["object"], body["choices"][0]["finish_reason"]) == ("chat.completion", "length")
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["total_tokens"] == 20 + len(llm.read_chat(MESSAGES).ids)
    assert len({answer["id"] for answer in found}) == 6


def test_log_probabilities_are_told_as_each_kind_of_row_tells_them(llm: LLM, files: Files) -> None:
    files.write(chat("a", logprobs=True, top_logprobs=2), chat("b", logprobs=False), completion("c", logprobs=1))
    assert files.run("--raw").exit_code == 0
    told, none, listed = [answer["response"]["body"]["choices"][0]["logprobs"] for answer in files.answers()]
    assert none is None
    output = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=8, logprobs=2))[0].outputs[0]
    own = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or ())]
    assert [entry["logprob"] for entry in told["content"]] == pytest.approx(own)
    assert all(len(entry["top_logprobs"]) >= 2 for entry in told["content"])
    assert len(listed["tokens"]) == len(listed["token_logprobs"]) == len(listed["text_offset"]) == 8
    assert listed["text_offset"][:2] == [0, len(listed["tokens"][0])]


BAD = {
    "{": "the row is not JSON",
    "[1]": "the row=[1] is not allowed; allowed: a JSON object",
    '{"text": "x"}': "a row needs 'prompt' or 'messages', but has 'text'",
    '{"prompt": ""}': "the prompt is empty",
    '{"prompt": "x\\ud800"}': "U+D800",
    '{"prompt": "x", "temperature": -1}': "temperature=-1 is not allowed",
    '{"prompt": "x", "temperatur": 1}': "did you mean 'temperature'?",
    json.dumps({"prompt": TEXT * 200}): "max_model_len=512",
    '{"prompt": "x", "stream": true}': "an answer is one row",
    '{"prompt": "x", "prompt_logprobs": 1}': "have no place",
    '{"messages": "x"}': "allowed: a list that is not empty",
    '{"prompt": []}': "prompt=[] is not allowed",
    json.dumps(request("a", "/v1/embeddings")): "url='/v1/embeddings' is not allowed",
    json.dumps({**completion("a"), "method": "GET"}): "method='GET' is not allowed",
    json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}): "custom_id is missing",
    json.dumps({**completion("a"), "body": 3}): "body=3 is not allowed",
    json.dumps(completion("a", prompt=["x", 5])): "token ids",
    json.dumps(completion("a", prompt=[TEXT, TEXT * 200])): "max_model_len=512",
}


def test_a_bad_row_gets_a_sentence_and_the_others_their_answer(llm: LLM, files: Files) -> None:
    good = {"prompt": TEXT}
    files.write(*(row for bad in BAD for row in (bad, good)), "\x00\xff")
    result = files.run()
    assert result.exit_code == 1
    assert f"{len(BAD) + 1} of all {2 * len(BAD) + 1} have an error; " in result.stderr
    found = files.answers()
    for (bad, said), answer in zip(BAD.items(), found[::2]):
        assert answer["response"] is None, bad
        assert said in answer["error"]["message"], bad
    assert {text for answer in found[1::2] for text in texts(answer)} == {
        llm.chat(MESSAGES, greedy())[0].outputs[0].text
    }


def test_run_again_it_goes_on_where_it_was_cut_in_mid_line(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(*(completion(f"row {number}", max_tokens=2 + number) for number in range(6)), "no row")
    assert files.run().exit_code == 1
    whole = files.answers()
    lines = files.target.read_bytes().splitlines(keepends=True)
    queued: list[Any] = []
    real = Target.add
    monkeypatch.setattr(Target, "add", lambda self, *given: (queued.append(given), real(self, *given))[1])
    for kept, tail in ((0, 9), (2, 0), (4, 40), (6, 1)):
        files.target.write_bytes(b"".join(lines[:kept]) + lines[kept][:tail])
        queued.clear()
        assert files.run("--drafter", "ngram").exit_code == 1  # another drafter is no other question
        assert files.target.read_bytes().startswith(b"".join(lines[:kept]))
        assert len(queued) == 6 - kept
        again = files.answers()
        assert [answer["id"] for answer in again] == [answer["id"] for answer in whole]
        assert [answer["error"] or texts(answer) for answer in again] == [row["error"] or texts(row) for row in whole]


def test_nothing_is_loaded_when_all_is_there(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(completion("a"))
    assert files.run().exit_code == 0
    monkeypatch.setattr(batch.loading, "load", lambda *given, **more: pytest.fail("a model was loaded"))
    result = files.run()
    assert result.exit_code == 0
    assert "0 rows answered" in result.stderr and "out.jsonl has all 1" in result.stderr


def test_an_interrupt_keeps_what_was_written(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(*(completion(f"row {number}", max_tokens=4) for number in range(5)))
    real, steps = Target.step, 0

    def step(self: LLM) -> Any:
        nonlocal steps
        steps += 1
        if steps == 11:
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "step", step)
        result = files.run("--max-num-seqs", "1")
    assert result.exit_code == 130
    assert "2 of 5 rows are in" in result.stderr
    assert len(files.answers()) == 2
    assert files.run().exit_code == 0
    assert [answer["custom_id"] for answer in files.answers()] == [f"row {number}" for number in range(5)]


def test_somebody_elses_file_is_never_written_over(files: Files) -> None:
    files.write(completion("a"))
    for text in ("notes without an end", "notes\n", '{"id": "batch_req_0"}\n'):
        files.target.write_text(text)
        result = files.run()
        assert result.exit_code == 2
        assert "does not answer row 1" in result.stderr
        assert files.target.read_text() == text
    files.target.unlink()
    assert files.run().exit_code == 0
    kept = files.target.read_text()
    for words in (("--temperature", "1"), ("--raw",), ("--max-tokens", "9")):
        assert "does not answer row 1" in files.run(*words).stderr
    files.write(completion("b"))
    assert "does not answer row 1" in files.run().stderr
    assert files.target.read_text() == kept


def test_files_that_cannot_be_used_are_told_before_a_model_is_loaded(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch.loading, "load", lambda *given, **more: pytest.fail("a model was loaded"))
    assert "in.jsonl cannot be read: No such file" in files.run().stderr
    files.write(completion("a"))
    same = RUNNER.invoke(app, ["batch", str(files.source), str(files.source)])
    assert "is the input too" in same.stderr
    files.target = files.target / "below"
    assert "cannot be written: No such file" in files.run().stderr
    files.target = files.source.parent
    assert "cannot be written: Is a directory" in files.run().stderr


def test_two_at_once_do_not_write_one_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(completion("a"))
    with batch.opened(files.target, files.source):
        result = files.run()
    assert result.exit_code == 2
    assert "is being written by another process" in result.stderr


def test_a_full_disk_is_one_sentence(files: Files) -> None:
    files.write(completion("a"))
    files.target = Path("/dev/full")
    result = files.run()
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        "/dev/full could not be written: No space left on device; once it can, the same command goes on"
    )


def test_tools_of_a_row_reach_the_chat_template_or_are_refused_by_name(files: Files) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    files.write(
        chat("a", tools=[tool], max_tokens=2), completion("b", tools=[tool], max_tokens=2), chat("c", max_tokens=2)
    )
    assert files.run().exit_code == 1
    first, second, third = files.answers()
    assert "the chat template has no place for them" in first["error"]["message"]
    assert "tools" in second["error"]["message"] and third["response"]["status_code"] == 200
