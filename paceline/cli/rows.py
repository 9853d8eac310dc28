"""One row of a batch: a line of JSON to a request, and its outputs to the line that answers it.

A row is a request in the OpenAI batch format, or a prompt (or messages) with sampling parameters beside it. Knows both
formats and how an answer is written. Must not know files, nor when a row is run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline import compat
from paceline.cli import prompting
from paceline.errors import OptionError, PacelineError
from paceline.params import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.sequence import Logprob
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput
    from paceline.prompts import Prompt

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {CHAT: ("messages", "prompt", "tools"), COMPLETIONS: ("prompt", "messages")}  # what is no parameter
NO_EFFECT = ("model", "user", "metadata", "store", "service_tier", "stream_options", "custom_id")


@dataclass
class Row:
    """A row on its way. `error`: why it has no answer."""

    id: str
    custom_id: str
    url: str = ""
    prompts: list[Prompt] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)  # one for each prompt
    outputs: dict[int, CompletionOutput] = field(default_factory=dict)  # by place among all the samples
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.outputs) == sum(params.n for params in self.params)


class Reader:
    """Rows read for one model. `defaults`: sampling parameters that hold where a row says nothing."""

    def __init__(self, llm: LLM, defaults: Mapping[str, Any], chat: bool | None) -> None:
        self._llm, self._defaults, self._chat, self._notices = llm, defaults, chat, compat.Notices()

    def read(self, line: bytes, number: int, id: str) -> Row:
        """Whatever is wrong with it is its error."""
        row = Row(id, f"line-{number}")
        try:
            data = _parse(line)
            row.custom_id = str(data.get("custom_id", row.custom_id))
            row.url, body = _request(data)
            row.prompts = self._prompts(row.url, body, plain=body is data)
            given = _translated(body, row.url)
            row.params = [self._params(given, len(prompt.ids)) for prompt in row.prompts]
        except PacelineError as error:
            row.error = str(error)
        return row

    def _prompts(self, url: str, body: Mapping[str, Any], plain: bool) -> list[Prompt]:
        from paceline.prompts import read_prompts

        given = body.get("messages" if url == CHAT else "prompt")
        if url == CHAT and isinstance(given, list):
            return [self._llm.read_chat(given, body.get("tools"))]
        if plain and isinstance(given, str) and url == COMPLETIONS:
            return [prompting.to_prompt(self._llm, given, self._chat)]
        if url == CHAT or given == []:
            raise _refusal("messages" if url == CHAT else "prompt", given, "a list that is not empty")
        return read_prompts(given, self._llm.tokenizer, None)

    def _params(self, given: Mapping[str, Any], length: int) -> SamplingParams:
        params = SamplingParams(**{**self._defaults, **compat.read_request(given, length, self._notices)})
        if params.prompt_logprobs is not None:
            raise OptionError("prompt_logprobs have no place in a batch's answers; leave them out")
        return params


def _refusal(name: str, given: Any, allowed: str) -> OptionError:
    return OptionError(f"{name}={given!r:.60} is not allowed; allowed: {allowed}")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the row is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise _refusal("the row", data, "a JSON object")
    return data


def _request(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where a row would be sent, and what with; a plain row is its own body."""
    if not {"method", "url", "body"} & data.keys():
        if ("prompt" in data) == ("messages" in data):
            raise OptionError(f"a row needs 'prompt' or 'messages', but has {', '.join(map(repr, data)) or 'nothing'}")
        return CHAT if "messages" in data else COMPLETIONS, data
    if "custom_id" not in data:
        raise OptionError("custom_id is missing; every request has one")
    for name, fine, allowed in (
        ("method", data.get("method", "POST") == "POST", "POST"),
        ("url", data.get("url") in (CHAT, COMPLETIONS), f"{COMPLETIONS}, {CHAT}"),
        ("body", isinstance(data.get("body"), dict), "a JSON object"),
    ):
        if not fine:
            raise _refusal(name, data.get(name), allowed)
    return data["url"], data["body"]


def _translated(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The sampling parameters of a body, where OpenAI's words are not ours."""
    given = {name: value for name, value in body.items() if name not in (*NO_EFFECT, *ASKED[url])}
    if given.pop("stream", None):
        raise _refusal("stream", True, "false: an answer is one row")
    if (most := given.pop("max_completion_tokens", None)) is not None:
        given["max_tokens"] = most
    if isinstance(given.get("logit_bias"), dict):  # JSON has no other keys than text
        given["logit_bias"] = {int(id) if id.isdecimal() else id: bias for id, bias in given["logit_bias"].items()}
    if url == CHAT and isinstance(given.get("logprobs"), bool):
        count = given.pop("top_logprobs", None) or 0
        given["logprobs"] = count if given["logprobs"] else None
    return given


# The answer


def answer(row: Row, model: str) -> dict[str, Any]:
    """A line of the results, in the OpenAI batch format."""
    failed = row.error or next((output.error for output in row.outputs.values() if output.error is not None), None)
    told: dict[str, Any] = {"id": row.id, "custom_id": row.custom_id, "response": None, "error": None}
    if failed is not None:
        code = "invalid_request" if row.error else "failed"
        return {**told, "error": {"code": code, "message": failed}}
    return {**told, "response": {"status_code": 200, "request_id": row.id, "body": _body(row, model)}}


def _body(row: Row, model: str) -> dict[str, Any]:
    chat = row.url == CHAT
    outputs = [row.outputs[place] for place in sorted(row.outputs)]
    read, said = sum(len(prompt.ids) for prompt in row.prompts), sum(len(output.token_ids) for output in outputs)
    choices = []
    for place, output in enumerate(outputs):
        text = {"message": {"role": "assistant", "content": output.text}} if chat else {"text": output.text}
        told = {**text, "logprobs": _logprobs(output, chat), "finish_reason": output.finish_reason}
        choices.append({"index": place, **told})
    return {
        "id": ("chatcmpl-" if chat else "cmpl-") + row.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said},
    }


def _logprobs(output: CompletionOutput, chat: bool) -> dict[str, Any] | None:
    """Each token's own entry, and the likeliest with it, as each of the two urls tells them."""
    if output.logprobs is None:
        return None
    own = [entry[token] for token, entry in zip(output.token_ids, output.logprobs)]
    best = [sorted(entry.values(), key=lambda one: one.rank) for entry in output.logprobs]
    if chat:
        return {"content": [{**_told(one), "top_logprobs": list(map(_told, top))} for one, top in zip(own, best)]}
    texts = [one.decoded_token for one in own]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in own],
        "top_logprobs": [{one.decoded_token: one.logprob for one in top} for top in best],
        "text_offset": [len("".join(texts[:place])) for place in range(len(texts))],
    }


def _told(entry: Logprob) -> dict[str, Any]:
    text = entry.decoded_token
    return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode(errors="replace"))}
