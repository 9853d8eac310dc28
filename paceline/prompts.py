"""From what users pass as prompts to token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import EMPTY, OptionError
from paceline.params import check_text, is_int
from paceline.templates import PromptTemplate


@dataclass(frozen=True)
class Prompt:
    text: str | None
    ids: list[int]


def read_prompts(prompts: Any, tokenizer: Any, template: PromptTemplate | None) -> list[Prompt]:
    """One prompt or a list of them; each a string, a list of token ids, or {"prompt": …} / {"prompt_token_ids": …}."""
    prompts = _as_list(prompts)
    single = isinstance(prompts, str | dict) or (
        isinstance(prompts, list | tuple) and bool(prompts) and is_int(prompts[0])
    )
    listed = [prompts] if single else prompts
    if not isinstance(listed, list | tuple):
        raise OptionError(f"prompts must be a string or a list, not {type(prompts).__name__}")
    return [_read(prompt, tokenizer, template) for prompt in listed]


def encode(text: str, tokenizer: Any, special: bool) -> Prompt:
    """A text as its token ids. special: whether the tokenizer adds those that a prompt begins with."""
    if tokenizer is None:
        raise OptionError("this model has no tokenizer, so a prompt must be a list of token ids")
    if not text:
        raise OptionError(EMPTY)
    if not text.isascii():
        check_text("the prompt", text)
    return Prompt(text, list(tokenizer.encode(text, add_special_tokens=special)))


def _read(prompt: Any, tokenizer: Any, template: PromptTemplate | None) -> Prompt:
    if isinstance(prompt, dict):
        return _read_dictionary(prompt, tokenizer, template)
    if not isinstance(prompt, str):
        return Prompt(None, _ids(prompt))
    text = prompt if template is None else template.render([{"role": "user", "content": prompt}])
    return encode(text, tokenizer, template is None or not template.own)


def _read_dictionary(given: dict[str, Any], tokenizer: Any, template: PromptTemplate | None) -> Prompt:
    if "prompt_token_ids" in given:
        return Prompt(given.get("prompt"), _ids(given["prompt_token_ids"]))
    if "prompt" not in given or isinstance(given["prompt"], dict):
        raise OptionError(f"a prompt dictionary needs 'prompt' or 'prompt_token_ids', but has {sorted(given)}")
    return _read(given["prompt"], tokenizer, template)


def _as_list(given: Any) -> Any:
    """An array or tensor as the lists it holds."""
    return given.tolist() if hasattr(given, "tolist") else given


def _ids(given: Any) -> list[int]:
    given = _as_list(given)
    if not isinstance(given, list | tuple) or not all(is_int(token) for token in given):
        raise OptionError(f"a prompt must be a string or a list of token ids, not {given!r:.60}")
    return [int(token) for token in given]
