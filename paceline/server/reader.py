"""Prompts read and requests checked in the server's own process, with a tokenizer of its own and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError
from paceline.models import loader
from paceline.params import SamplingParams, check_text
from paceline.prompts import Prompt, encode
from paceline.requests import Limits, check
from paceline.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paceline.templates import PromptTemplate


@dataclass
class Reader:
    tokenizer: Any
    template: PromptTemplate
    limits: Limits
    longest: int  # characters of any token

    @classmethod
    def of(cls, model: Any, template: str | None, limits: Limits, trust: bool, load_format: str = "auto") -> Reader:
        """trust: whether code that comes with the tokenizer may run. load_format: of the weights: dummy needs none."""
        found = loader.find(model, trust=trust, load_format=load_format).tokenizer
        longest = max(map(len, found.get_vocab()), default=1) if found is not None else 1
        return cls(found, PromptTemplate(template, found), limits, longest)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be answered."""
        return self.template.given is not None or getattr(self.tokenizer, "chat_template", None) is not None

    def completion(self, body: CompletionRequest) -> tuple[list[Prompt], SamplingParams]:
        params = body.params()
        prompts = [self._read(prompt) for prompt in body.prompts()]
        return self._checked(prompts, params)

    def chat(self, body: ChatRequest) -> tuple[list[Prompt], SamplingParams]:
        params = body.params()
        prompt = self._converse(body.conversation(), body.tools, body.how())
        return self._checked([prompt], params)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise OptionError("a prompt or messages are needed, and not both")
        if body.messages is not None:
            return self._converse(body.messages, None, {}).ids
        self._need_tokenizer()
        return encode(body.prompt or "", self.tokenizer, body.add_special_tokens).ids

    def detokenize(self, body: DetokenizeRequest) -> str:
        self._need_tokenizer()
        wrong = next((token for token in body.tokens if not 0 <= token < self.limits.vocab_size), None)
        if wrong is not None:
            raise OptionError(f"tokens has {wrong}; the model's ids are 0 to {self.limits.vocab_size - 1}")
        return str(self.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens))

    def _read(self, prompt: str | list[int]) -> Prompt:
        if not isinstance(prompt, str):
            return Prompt(None, prompt)
        self._check_length(prompt)
        return encode(prompt, self.tokenizer, special=True)

    def _check_length(self, text: str) -> None:
        """A text that cannot be short enough is refused before it is read, which would take seconds."""
        most = self.limits.max_model_len
        if len(text) > most * self.longest:
            raise OptionError(
                f"the prompt has {len(text)} characters, more than tokens can hold; max_model_len={most} leaves room "
                f"for {most - 1} of them"
            )

    def _converse(self, messages: Any, tools: Any, how: dict[str, Any]) -> Prompt:
        self._need_tokenizer()
        reserved = how.keys() & {"self", "chat_template", "tokenize", "conversation", "messages", "tools"}
        if reserved:
            raise OptionError(f"chat_template_kwargs has {min(reserved)!r}, which is not for the template")
        text = self.template.render(messages, tools, **how)
        self._check_length(text)
        check_text("the conversation", text)  # a role, a name or a tool may hold what a content may not
        return Prompt(text, list(self.tokenizer.encode(text, add_special_tokens=not self.template.own)))

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise OptionError("this model has no tokenizer; send token ids to /v1/completions")

    def _checked(self, prompts: list[Prompt], params: SamplingParams) -> tuple[list[Prompt], SamplingParams]:
        for prompt in prompts:
            check(prompt, params, self.tokenizer, self.limits)
        return prompts, params
