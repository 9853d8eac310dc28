"""From what users pass as prompts to token ids, and the checks that need both prompt and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError
from paceline.params import SamplingParams
from paceline.sampling.state import Words
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


def check_params(params: SamplingParams, prompt: Prompt, vocab_size: int, max_model_len: int) -> None:
    """What can only be judged with the prompt and the model at hand."""
    if not prompt.ids:
        raise OptionError("the prompt is empty; it needs at least one token")
    if len(prompt.ids) >= max_model_len:
        raise OptionError(
            f"the prompt has {len(prompt.ids)} tokens; max_model_len={max_model_len} leaves room "
            f"for {max_model_len - 1}"
        )
    named = {
        "the prompt": prompt.ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "bad_words": [i for word in params.bad_words or () if not isinstance(word, str) for i in word],
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < vocab_size:
                raise OptionError(f"{name} has token id {token}; the model's ids are 0 to {vocab_size - 1}")


def find_words(params: SamplingParams, tokenizer: Any, end_ids: list[int]) -> Words:
    """Bad words as token sequences (with and without a leading space), and the ids that min_tokens holds back."""
    bad: list[list[int]] = []
    for word in params.bad_words or ():
        if not isinstance(word, str):
            bad.append(list(word))
            continue
        if tokenizer is None:
            raise OptionError(f"bad_words has {word!r}, but this model has no tokenizer; give token ids")
        for spelling in dict.fromkeys((word, " " + word.lstrip())):
            ids = list(tokenizer.encode(spelling, add_special_tokens=False))
            if ids and ids not in bad:
                bad.append(ids)
    stops = [] if params.ignore_eos else list(end_ids)
    return Words(bad, [*stops, *(params.stop_token_ids or ())])
