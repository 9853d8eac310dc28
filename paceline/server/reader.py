"""Prompts read and requests checked in the server's own process, with a tokenizer of its own and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError
from paceline.models import loader
from paceline.params import SamplingParams
from paceline.prompts import Prompt, read_prompts
from paceline.requests import Limits, check
from paceline.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paceline.templates import PromptTemplate


@dataclass
class Reader:
    tokenizer: Any
    template: PromptTemplate
    limits: Limits

    @classmethod
    def of(cls, model: Any, tokenizer: Any, template: str | None, limits: Limits) -> Reader:
        found = loader.find(model, tokenizer).tokenizer
        return cls(found, PromptTemplate(template, found), limits)

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
        template = self.template
        if body.chat_template is not None:
            if "{" not in body.chat_template:
                raise OptionError("chat_template must be Jinja; the names and files of templates are the server's own")
            template = PromptTemplate(body.chat_template, self.tokenizer, "chat_template")
        prompt = self._converse(template, body.conversation(), body.tools, body.how())
        return self._checked([prompt], params)

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            raise OptionError("a prompt or messages are needed, and not both")
        if body.messages is not None:
            return self._converse(self.template, body.messages, None, {}).ids
        self._need_tokenizer()
        read = self._read(body.prompt or "")
        if body.add_special_tokens:
            return read.ids
        return list(self.tokenizer.encode(body.prompt, add_special_tokens=False))

    def detokenize(self, body: DetokenizeRequest) -> str:
        self._need_tokenizer()
        wrong = next((token for token in body.tokens if not 0 <= token < self.limits.vocab_size), None)
        if wrong is not None:
            raise OptionError(f"tokens has {wrong}; the model's ids are 0 to {self.limits.vocab_size - 1}")
        return str(self.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens))

    def _read(self, prompt: str | list[int]) -> Prompt:
        return read_prompts(prompt, self.tokenizer, None)[0]

    def _converse(self, template: PromptTemplate, messages: Any, tools: Any, how: dict[str, Any]) -> Prompt:
        self._need_tokenizer()
        reserved = how.keys() & {"chat_template", "tokenize", "conversation", "messages", "tools"}
        if reserved:
            raise OptionError(f"chat_template_kwargs has {min(reserved)!r}, which is not for the template")
        text = template.render(messages, tools, **how)
        return Prompt(text, list(self.tokenizer.encode(text, add_special_tokens=not template.own)))

    def _need_tokenizer(self) -> None:
        if self.tokenizer is None:
            raise OptionError("this model has no tokenizer; send token ids to /v1/completions")

    def _checked(self, prompts: list[Prompt], params: SamplingParams) -> tuple[list[Prompt], SamplingParams]:
        for prompt in prompts:
            check(prompt, params, self.tokenizer, self.limits)
        return prompts, params
