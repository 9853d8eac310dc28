"""What clients send: OpenAI's fields, our own beside them, and what becomes of each.

A field that is not here is refused by name. Fields of OpenAI's that cannot change the text are accepted and do nothing;
they are listed as such. Values are judged by `SamplingParams`, so that a sentence is the same everywhere.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, WithJsonSchema

from paceline.errors import OptionError
from paceline.params import SamplingParams

MOST_CHOICES = 128  # of a prompt
MOST_DIGITS = 18  # of a token id
MOST_PROMPTS = 256  # of a request
MOST_LISTED = {"stop": 64, "bad_words": 256, "stop_token_ids": 1024}  # each is looked for in every token
PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "max_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "n", "seed", "prompt_logprobs"),
    "max_draft_tokens",
)


class First(FailFast):
    """One wrong item is enough: a long list must not become a longer error."""

    __hash__ = object.__hash__  # unions want it


Item = TypeVar("Item")
Listed = Annotated[list[Item], First()]
PROMPTS = "a text, token ids, or a list of either"


def _read_prompt(given: Any) -> Any:
    """A union of lists would complain of every item once for each of its members."""
    listed = given if isinstance(given, list) else [given]
    if all(isinstance(item, str) for item in listed) or (listed is given and _are_ids(given)):
        return given
    if all(isinstance(item, list) and _are_ids(item) for item in listed):
        return given
    raise ValueError(f"allowed: {PROMPTS}")


def _are_ids(listed: list[Any]) -> bool:
    return all(type(item) is int for item in listed)


_TEXT, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_LISTS = [{"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]
GivenPrompt = Annotated[
    Any,
    PlainValidator(_read_prompt),
    WithJsonSchema({"anyOf": [_TEXT, _IDS, *_LISTS], "title": "Prompt", "description": PROMPTS}),
]


class ErrorDetail(BaseModel):
    """What went wrong, in a sentence."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Speculation(Strict):
    """Of one request. enabled: false decodes plainly; max_draft_tokens: the most drafted in a round."""

    enabled: bool = True
    max_draft_tokens: int | None = Field(None, ge=0)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # without effect


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str = "text"


class Sampling(Strict):
    """What completions and chats share. A null is a field that was not given."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    bad_words: Listed[str] | None = None
    allowed_token_ids: Listed[int] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    return_provenance: bool | None = None
    # Without effect: none of them changes a text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def params(self, **more: Any) -> SamplingParams:
        """As the engine takes them; more: what the kinds of requests say differently."""
        given = {name: getattr(self, name) for name in PASSED_ON}
        if self.logit_bias is not None:
            given["logit_bias"] = _read_bias(self.logit_bias)
        if self.speculation is not None:
            if self.max_draft_tokens is not None:
                raise OptionError("speculation and max_draft_tokens were both given; give one")
            given["max_draft_tokens"] = self.speculation.max_draft_tokens if self.speculation.enabled else 0
        for name, most in MOST_LISTED.items():
            if isinstance(given[name], list) and len(given[name]) > most:
                raise OptionError(f"{name} has {len(given[name])} items; allowed: up to {most}")
        if self.n is not None and self.n > MOST_CHOICES:
            raise OptionError(f"n={self.n} is not allowed; allowed: 1 to {MOST_CHOICES}")
        if self.stream_options is not None and not self.stream:
            raise OptionError("stream_options belongs to stream=true, which was not given")
        if self.stream and self.prompt_logprobs is not None:
            raise OptionError("prompt_logprobs and stream=true were both given; a stream tells none, give one")
        given = {name: value for name, value in (given | more).items() if value is not None or name in more}
        return SamplingParams(**given)


class CompletionRequest(Sampling):
    prompt: GivenPrompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def params(self, **more: Any) -> SamplingParams:
        if self.suffix:
            raise OptionError("suffix is not supported: the model writes on from the prompt alone")
        if self.best_of not in (None, self.n or 1):
            raise OptionError(f"best_of={self.best_of} is not allowed; allowed: as many as n={self.n or 1}")
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        if self.silent:
            more["max_tokens"] = 1  # the engine's least, which is not told
        return super().params(logprobs=self.logprobs, **more)

    @property
    def silent(self) -> bool:
        """Whether the prompt is asked for and nothing after it."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or token ids."""
        given: Any = self.prompt
        several = isinstance(given, list) and (not given or not isinstance(given[0], int))
        listed = list(given) if several else [given]
        if not 1 <= len(listed) <= MOST_PROMPTS:
            raise OptionError(f"{len(listed)} prompts were given; allowed: 1 to {MOST_PROMPTS}")
        return listed


class ChatRequest(Sampling):
    messages: Listed[dict[str, Any]] | None = None
    text: str | None = None  # PaddleNLP's clients send one user message so
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # refused: a client's program would run in the server's process
    parallel_tool_calls: bool | None = None  # without effect
    verbosity: str | None = None  # without effect

    def params(self, **more: Any) -> SamplingParams:
        if self.chat_template is not None:
            raise OptionError(
                "chat_template is the server's alone (--chat-template FILE); allowed here: chat_template_kwargs, or a "
                "prompt that is written out, at /v1/completions"
            )
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise OptionError("max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs and not self.logprobs:
            raise OptionError("top_logprobs belongs to logprobs=true, which was not given")
        if self.response_format is not None and self.response_format.type != "text":
            raise OptionError(f"response_format {self.response_format.type!r} is not supported; supported: 'text'")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        told = (self.top_logprobs or 0) if self.logprobs else None
        return super().params(max_tokens=most, logprobs=told, **more)

    def conversation(self) -> list[dict[str, Any]]:
        if (self.messages is None) == (self.text is None):
            raise OptionError("messages are needed (or one text in their place)")
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]

    def how(self) -> dict[str, Any]:
        """What the chat template is told."""
        given = {name: getattr(self, name) for name in ("add_generation_prompt", "continue_final_message")}
        kept = {name: value for name, value in given.items() if value is not None}
        return {**(self.chat_template_kwargs or {}), **kept}


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Listed[int]
    skip_special_tokens: bool = False


def _read_bias(given: dict[str, Any]) -> dict[int, Any]:
    """JSON has no whole numbers as keys."""
    wrong = next((key for key in given if not key.isascii() or not key.isdigit() or len(key) > MOST_DIGITS), None)
    if wrong is not None:
        raise OptionError(f"logit_bias has the key {wrong!r:.60}; allowed: token ids")
    return {int(key): value for key, value in given.items()}
