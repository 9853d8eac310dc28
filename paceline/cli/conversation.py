"""What was said so far, and how it becomes a prompt that fits.

Knows messages, templates and the model's length. Must not know terminals or commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prompts import Prompt
    from paceline.templates import Message, PromptTemplate

OWN, NONE = "own", "none"
# Where a model that was not trained on a template goes on with the other side's words.
STOPS = {"vicuna": ("USER:",), "llama": ("[INST]",)}


class Conversation:
    """`template` is own (the model's), none (the text as it is), or whatever `PromptTemplate` takes."""

    def __init__(self, llm: LLM, template: str | None = None, system: str | None = None) -> None:
        self._llm, self.system = llm, system
        self.messages: list[Message] = []  # the system message is not among them
        self._template: PromptTemplate | None = None
        has_own = bool(getattr(llm.tokenizer, "chat_template", None))
        self.set_template(template or (OWN if has_own else NONE))

    def set_template(self, name: str) -> None:
        """From the next prompt on; what was said is put into the new one as well."""
        from paceline.templates import NAMED, PLACE, PromptTemplate, is_file

        if name == OWN and not getattr(self._llm.tokenizer, "chat_template", None):
            raise OptionError(f"this model has no chat template of its own; type {NONE}, {', '.join(NAMED)} or a file")
        try:
            chosen = None if name == NONE else PromptTemplate(None if name == OWN else name, self._llm.tokenizer)
        except OptionError:
            if is_file(name):  # which cannot be read, and that was said
                raise
            raise OptionError(
                f"template {name!r} is not known; type {OWN}, {NONE}, {', '.join(NAMED)}, the path of a Jinja file, or "
                f"a text with {PLACE}"
            ) from None
        self._try(chosen, self.system)
        self._template, self.template = chosen, name

    def set_system(self, text: str | None) -> None:
        """The first message of every prompt from now on; None: no such message."""
        self._try(self._template, text)
        self.system = text

    def _try(self, template: PromptTemplate | None, system: str | None) -> None:
        """Refuse now what the template would refuse later: some take no system message, or no such conversation."""
        before = self._template, self.system
        self._template, self.system = template, system
        try:
            self._render(self.messages or [{"role": "user", "content": "x"}])
        finally:
            self._template, self.system = before

    @property
    def stops(self) -> tuple[str, ...]:
        return STOPS.get(self.template, ())

    def add(self, role: str, text: str) -> None:
        self.messages.append({"role": role, "content": text})

    def fit(self, max_tokens: int) -> tuple[Prompt, int]:
        """The prompt, and how many of the oldest messages had to go; OptionError when the last alone is too long.

        Once something has to go, as much goes as brings the prompt to half the model's length: so the next turns keep
        their beginning, and with it the pages that the cache holds of it.
        """
        most, kept = self._llm.max_model_len, list(self.messages)
        limit = most - min(max_tokens, most // 4)
        while True:
            prompt = self._prompt(kept)
            count = len(prompt.ids)
            if count <= limit or (len(kept) == 1 and count < most):
                dropped = len(self.messages) - len(kept)
                self.messages = kept
                return prompt, dropped
            if len(kept) == 1:
                raise OptionError(
                    f"this message makes a prompt of {count} tokens, and the model takes {most} with the answer; say "
                    "it shorter"
                )
            limit = most // 2
            del kept[: self._second_turn(kept)]

    @staticmethod
    def _second_turn(messages: list[Message]) -> int:
        return next(place for place in range(1, len(messages)) if messages[place]["role"] == "user")

    def _prompt(self, messages: list[Message]) -> Prompt:
        from paceline.prompts import encode

        special = self._template is None or not self._template.own
        return encode(self._render(messages), self._llm.tokenizer, special)

    def _render(self, messages: list[Message]) -> str:
        from paceline.templates import PLACE

        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        if self._template is not None and PLACE not in (self._template.given or ""):
            return self._template.render([*first, *messages])
        # One message at a time: answers stand right behind what they answer, and a turn begins on a new line.
        text = "" if self.system is None else self.system + "\n"
        for place, message in enumerate(messages):
            said = str(message["content"])
            if message["role"] == "user":
                text += ("\n" if place else "") + (self._template.render([message]) if self._template else said)
            else:
                text += said
        return text
