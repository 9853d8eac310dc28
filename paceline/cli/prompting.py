"""What several commands do with text: decide whether the chat template is used, and turn a text into a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.prompts import Prompt


def has_template(llm: LLM) -> bool:
    return llm.options.prompt_template is not None or bool(getattr(llm.tokenizer, "chat_template", None))


def to_prompt(llm: LLM, text: str, chat: bool | None) -> Prompt:
    """A text as one user message in the chat template, or as it is; None: the template if the model has one."""
    from paceline.prompts import read_prompts

    if has_template(llm) if chat is None else chat:
        return llm.read_chat([{"role": "user", "content": text}])
    (prompt,) = read_prompts(text, llm.tokenizer, None)
    return prompt
