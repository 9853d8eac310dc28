"""What clients get wrong: the right status, OpenAI's shape, one sentence, and the client's own exception for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import paceline
from paceline.server.metrics import Metrics
from tests.server.serving import NAME, Served, serving, until

BODY: dict[str, Any] = {"prompt": "the rider", "max_tokens": 2}
MESSAGES: Any = [{"role": "user", "content": "the rider"}]


def refused(answer: httpx.Response, status: int, *named: str) -> dict[str, Any]:
    """OpenAI's shape, in one sentence that names what matters."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert answer.json().keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    said = error["message"]
    assert len(said) > 10 and "\n" not in said and "Traceback" not in said and "object at 0x" not in said
    assert all(part in said for part in named), said
    return error


def test_a_model_that_is_not_there_is_a_404(served: Served) -> None:
    with served.openai() as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="hello")
    assert caught.value.code == "model_not_found" and "gpt-4" in str(caught.value) and NAME in str(caught.value)
    refused(served.post("/tokenize", {"model": "gpt-4", "prompt": "a"}), 404, "gpt-4")
    refused(served.post("/detokenize", {"model": "gpt-4", "tokens": [5]}), 404, "gpt-4")


def test_a_value_that_is_not_allowed_is_a_400_with_the_librarys_sentence(served: Served) -> None:
    with served.openai() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, top_p=2.0)
    assert "top_p=2.0 is not allowed" in str(caught.value)
    assert caught.value.type == "invalid_request_error"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"n": 0}, "n=0"),
    ({"n": -1}, "n=-1"),
    ({"n": 10**6}, "n=1000000"),
    ({"n": 10**30}, "n=1"),
    ({"top_k": -7}, "top_k"),
    ({"top_k": 2**63}, "top_k"),
    ({"seed": 2**70}, "seed"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"stop": "\ud800"}, "surrogate"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "99999"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 3}, "min_tokens=3"),
    ({"prompt": []}, "0 prompts"),
    ({"prompt": ""}, "empty"),
    ({"prompt": [[5], []]}, "empty"),
    ({"prompt": ["a", ""]}, "empty"),
    ({"prompt": ["a"] * 257}, "257"),
    ({"prompt": ["a"] * 128, "n": 128}, "16384"),
    ({"prompt": [-3]}, "-3"),
    ({"prompt": [10**12]}, "1000000000000"),
    ({"prompt": "a \udfff b"}, "surrogate"),
    ({"prompt": [5] * 600}, "600 tokens"),
    ({"prompt": "the rider " * 600}, "max_model_len=512"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"temperature": "warm"}, "temperature"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"speculation": {"max_draft_tokens": -1}}, "max_draft_tokens"),
    ({"speculation": {"enabled": False}, "max_draft_tokens": 2}, "speculation"),
    ({"speculation": {"drafter": "ngram"}}, "speculation.drafter"),
    ({"stop": ["x"] * 65}, "65"),
    ({"bad_words": ["x"] * 257}, "257"),
    ({"stop_token_ids": [5] * 1025}, "1025"),
    ({"temprature": 1}, "temprature"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_completion_is_a_400_that_names_it(served: Served, change: dict[str, Any], named: str) -> None:
    body = json.dumps({**BODY, **change}).encode()
    refused(served.post("/v1/completions", content=body, headers=JSON), 400, named)


JSON = {"content-type": "application/json"}
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"self": 1}}, "self"),
    ({"messages": [{"role": "\ud800", "content": "x"}]}, ""),
    ({"messages": []}, "message"),
    ({"messages": None}, "messages"),
    ({"text": "both"}, "messages"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": ["hello"]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}, "chat_template is the server's alone"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"functions": []}, "functions"),
]


@pytest.mark.parametrize(("change", "named"), WRONG_CHATS, ids=lambda value: str(value)[:40])
def test_a_wrong_chat_is_a_400_that_names_it(served: Served, change: dict[str, Any], named: str) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2, **change}).encode()
    refused(served.post("/v1/chat/completions", content=body, headers=JSON), 400, named)


RAW: list[tuple[bytes, str]] = [
    (b"", "body"),
    (b'{"prompt"', "the body is not JSON: Expecting ':' delimiter, at character 9"),
    (b"null", "body"),
    (b"[1, 2]", "body"),
    (b'"text"', "body"),
    (b'{"prompt": "\xff\xfe"}', "body"),
    (b"\x80\x81\x82", "body"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (b'{"prompt": "a", "temperature": Infinity}', "temperature"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "a", "top_p": -Infinity}', "top_p"),
    (b'{"prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias"),
    (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "body"),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
    (b'{"prompt": "a", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", "body"),
]


@pytest.mark.parametrize(("body", "named"), RAW, ids=lambda value: str(value)[:40])
def test_a_body_that_is_no_request_is_a_400(served: Served, body: bytes, named: str) -> None:
    refused(served.post("/v1/completions", content=body, headers=JSON), 400, named)


def test_a_body_that_is_sent_as_a_form_is_told_how_to_be_sent(served: Served) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl says by itself
    wanted = "the body came as 'application/x-www-form-urlencoded'; send it as application/json"
    refused(served.post("/v1/completions", content=json.dumps(BODY).encode(), headers=form), 400, wanted)


def test_a_list_of_many_wrong_things_is_refused_at_once(served: Served) -> None:
    """A union's every member complains of every item: a small body must not become a large error."""
    for prompt in ([1.5] * 500_000, [["a"]] * 300_000, [1] * 500_000 + ["a"]):
        refused(served.post("/v1/completions", {"prompt": prompt}), 400, "prompt")


def test_a_field_is_refused_by_its_name(served: Served) -> None:
    error = refused(served.post("/v1/completions", {**BODY, "frobnicate": 1}), 400, "frobnicate")
    assert error["param"] == "frobnicate"


def test_a_body_that_is_too_large_is_a_413(served: Served) -> None:
    large = json.dumps({"prompt": "a" * 10 * 2**20}).encode()
    refused(served.post("/v1/completions", content=large, headers=JSON), 413, "bytes")

    def parts() -> Iterator[bytes]:
        """Its length is not said beforehand."""
        for start in range(0, len(large), 2**18):
            yield large[start : start + 2**18]

    with contextlib.suppress(httpx.WriteError):  # the connection may be closed while it is still sending
        refused(served.post("/v1/completions", content=parts(), headers=JSON), 413, "bytes")
    with served.openai() as client_, pytest.raises(openai.APIStatusError) as caught:
        client_.completions.create(model=NAME, prompt="a" * 10 * 2**20)
    assert caught.value.status_code == 413


def test_a_large_body_that_is_allowed_is_judged_by_its_tokens(served: Served) -> None:
    refused(served.post("/v1/completions", {"prompt": "the rider in front " * 350_000}), 400, "max_model_len=512")


def test_what_is_not_there_is_a_404_and_the_wrong_method_a_405(served: Served) -> None:
    refused(served.get("/v1/embeddings"), 404, "/v1/embeddings")
    refused(served.get("/v1/completions"), 405, "GET")
    refused(served.post("/health"), 405, "POST")
    refused(served.get("/v1/models/nobody"), 404, "nobody")


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_is_answered_like_get_without_a_body(served: Served, path: str) -> None:
    asked, told = httpx.head(served.address + path), served.get(path)
    assert asked.status_code == told.status_code == 200 and asked.content == b""
    assert asked.headers["content-length"] == told.headers["content-length"] == str(len(told.content))


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Served]:
    """A key, and room for two answers beside the one computed."""
    settings = {"api_key": "secret", "max_waiting": 2}
    with serving(checkpoint, settings=settings, max_num_seqs=1) as server:
        yield server


def test_without_the_key_there_is_a_401(guarded: Served) -> None:
    with guarded.openai(api_key="secret") as client:
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices
    for key in ("wrong", "sécret", "secre"):
        answer = guarded.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
        assert refused(answer, 401, "Bearer")["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    with guarded.openai(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=NAME, prompt="a")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        refused(guarded.post(path, {}), 401, "Bearer")
    for path in ("/health", "/version", "/metrics"):
        assert guarded.get(path).status_code == 200


def test_who_comes_when_all_is_full_is_told_to_come_again(guarded: Served) -> None:
    long: dict[str, Any] = {"model": NAME, "prompt": "a", "max_tokens": 500, "extra_body": {"ignore_eos": True}}
    with guarded.openai(api_key="secret") as client:
        streams = [client.completions.create(**long, stream=True) for _ in range(3)]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**long)
        assert caught.value.response.headers["retry-after"] == "1" and "at most 3" in str(caught.value)
        for stream in streams:
            stream.close()
        until(lambda: guarded.server.engine.num_samples == 0, "room again")
        assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices


def test_more_answers_than_there_is_room_for_are_never_promised(guarded: Served) -> None:
    answer = guarded.post("/v1/completions", {**BODY, "n": 4}, headers={"authorization": "Bearer secret"})
    refused(answer, 400, "4 answers", "3 at once")


def test_while_the_server_stops_there_is_a_503(guarded: Served) -> None:
    guarded.server.draining = True
    try:
        refused(guarded.get("/health"), 503, "stopping")
        with guarded.openai(api_key="secret") as client, pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=NAME, prompt="a")
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
    finally:
        guarded.server.draining = False


def test_a_mistake_of_the_servers_own_is_a_500_in_the_same_shape(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Metrics) -> bytes:
        raise RuntimeError("planted")

    monkeypatch.setattr(Metrics, "render", fail)
    assert refused(served.get("/metrics"), 500)["type"] == "engine_error"


def test_health_and_version_are_told(served: Served) -> None:
    assert served.get("/health").json()["status"] == "ok"
    assert served.get("/version").json() == {"version": paceline.__version__}


def test_text_goes_to_tokens_and_back(served: Served) -> None:
    text = "the rider in front <|im_end|> ü 🚲"
    told = served.post("/tokenize", {"prompt": text}).json()
    assert told["count"] == len(told["tokens"]) > 5 and told["max_model_len"] == 512
    assert served.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": text}
    shorter = served.post("/detokenize", {"tokens": told["tokens"], "skip_special_tokens": True}).json()
    assert shorter["prompt"] == text.replace("<|im_end|>", "")
    chat = served.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": chat}).json()["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "both"),
        ("/tokenize", {"prompt": "\udfff"}, "surrogate"),
        ("/tokenize", {"messages": []}, "message"),
        ("/detokenize", {"tokens": [10**9]}, "1000000000"),
        ("/detokenize", {"tokens": [-1]}, "-1"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_wrong_question_about_tokens_is_a_400(served: Served, path: str, body: Any, named: str) -> None:
    refused(served.post(path, content=json.dumps(body).encode(), headers=JSON), 400, named)


def test_the_document_names_every_route_and_every_error(served: Served) -> None:
    document = served.get("/openapi.json").json()
    routes = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"}
    assert routes | {"/health", "/version", "/metrics"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        for told in methods.values():
            assert "422" not in told["responses"], path
            if path.startswith("/v1"):
                assert {"200", "401"} <= told["responses"].keys(), path
    assert {"400", "404", "413", "429", "503"} <= document["paths"]["/v1/completions"]["post"]["responses"].keys()
    assert served.get("/docs").status_code == 200


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 100_000, "{"], ids=["digits", "brackets", "half"])
def test_arguments_of_a_call_that_nobody_can_read_are_no_mistake_of_the_servers(served: Served, arguments: str) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "a", "arguments": arguments}}]}
    answer = served.post("/v1/chat/completions", {"messages": [*MESSAGES, call, *MESSAGES], "max_tokens": 1})
    assert answer.status_code in (200, 400), answer.text
