"""From what users pass as prompts to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError
from paceline.templates import PromptTemplate


@dataclass(frozen=True)
class Prompt:
    text: str | None
    ids: list[int]


def read_prompts(prompts: Any, tokenizer: Any, template: PromptTemplate | None) -> list[Prompt]:
    """One prompt or a list of them; each a string, a list of token ids, or {"prompt": …} / {"prompt_token_ids": …}."""
    single = isinstance(prompts, str | dict) or (
        isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)
    )
    listed = [prompts] if single else prompts
    if not isinstance(listed, list | tuple):
        raise OptionError(f"prompts must be a string or a list, not {type(prompts).__name__}")
    return [_read(prompt, tokenizer, template) for prompt in listed]


def _read(prompt: Any, tokenizer: Any, template: PromptTemplate | None) -> Prompt:
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            return Prompt(prompt.get("prompt"), _ids(prompt["prompt_token_ids"]))
        if "prompt" not in prompt:
            raise OptionError(f"a prompt dictionary needs 'prompt' or 'prompt_token_ids', but has {sorted(prompt)}")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise OptionError("this model has no tokenizer, so a prompt must be a list of token ids")
        text = prompt if template is None else template.render([{"role": "user", "content": prompt}])
        special = template is None or not template.own
        return Prompt(text, list(tokenizer.encode(text, add_special_tokens=special)))
    return Prompt(None, _ids(prompt))


def _ids(given: Any) -> list[int]:
    if not isinstance(given, list | tuple) or any(not isinstance(i, int) or isinstance(i, bool) for i in given):
        raise OptionError(f"a prompt must be a string or a list of token ids, not {given!r:.60}")
    return list(given)
