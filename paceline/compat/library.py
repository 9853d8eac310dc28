"""Spellings in the library: what `LLM(...)` and `generate`, `chat` and `stream` take under other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from paceline.compat import drafter, table
from paceline.compat.reading import Notices, Reading, show, whole
from paceline.drafters import make
from paceline.drafters.table import find
from paceline.errors import OptionError
from paceline.params import SamplingParams

REQUEST = tuple(item.name for item in fields(SamplingParams) if item.init)
OF_CALL = ("progress", "chat_template", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
OF_REQUEST = (*REQUEST, *OF_CALL, "max_length", "do_sample", "sampling_params")
# Draft lengths without a drafter: ours and Colossal-Inference's, whose drafters come after the engine.
LENGTHS_FOR_LATER = ("num_draft_tokens", "max_n_spec_tokens", "n_spec_tokens")


def translate(options: Mapping[str, Any], known: Iterable[str], notices: Notices | None = None) -> dict[str, Any]:
    """The options of `LLM(...)` in our words; an unknown one is refused, naming the nearest."""
    own = tuple(known)
    asked = {name: value for name, value in options.items() if name in REQUEST and name not in own}
    reading = _read({name: value for name, value in options.items() if name not in asked}, own)
    for name in [
        *asked,
        *(reading.written(ours) for ours in reading.found() if ours in OF_REQUEST and ours not in own),
    ]:
        raise OptionError(f"{name} belongs to a request: give it to generate, chat or stream")
    add_lengths(reading)
    result = _with_drafter(reading)
    (notices or Notices()).say(reading.notes)
    return result


def _read(given: Mapping[str, Any], own: tuple[str, ...]) -> Reading:
    reading = Reading(table.LIBRARY, own)
    for name, value in given.items():
        reading.take(name, value, show(name, value))
    return reading


def add_lengths(reading: Reading) -> None:
    """The longest prompt and the longest answer together are the longest sequence."""
    if {"max_input_len", "max_output_len"} <= reading.names:
        both = [whole(reading.get(name), reading.written(name)) for name in ("max_prompt_len", "default_max_tokens")]
        reading.put("max_model_len", sum(both), f"max_input_len + max_output_len = {sum(both)}")


def _with_drafter(reading: Reading) -> dict[str, Any]:
    result = reading.found()
    given = result.get("drafter")
    chosen, parts = drafter.choose(reading, drafter.kinds_of(given)), reading.parts()
    if chosen is not None:
        if given is not None:
            raise OptionError("both drafter= and a foreign spelling of it were given; give one")
        kind = find(chosen[0])
        return {**result, "drafter": None if kind is None else kind.make(chosen[1])}
    if given is not None and (parts.keys() - {"num_draft_tokens"} or (parts and hasattr(given, "create"))):
        result["drafter"] = _complete(reading, given, parts)
    elif given is None:
        for written in (reading.written(f"draft.{part}") for part in parts):
            if written.partition("=")[0] not in LENGTHS_FOR_LATER:
                raise OptionError(written + drafter.NEEDS_DRAFTER)
    length = parts.get("num_draft_tokens")
    return result if length is None else {**result, "num_draft_tokens": length}


def _complete(reading: Reading, given: Any, parts: Mapping[str, Any]) -> Any:
    """The drafter that `drafter=` names, with the options that stand beside it in other words."""
    kinds = drafter.kinds_of(given)
    if kinds or not hasattr(given, "create"):
        parts = drafter.applicable(reading, kinds, parts)
    if hasattr(given, "create"):
        for part in parts:
            where = f"{show('drafter', given)}(…), which has its own; give it there"
            raise OptionError(f"{reading.written(f'draft.{part}')} stands beside {where}")
        return given
    config: Any = make(given)
    return given if config is None else replace(config, **drafter.complete(reading, kinds[0], {}, parts))


def read_call(given: dict[str, Any], progress: bool = False, chat: bool = False) -> tuple[bool, dict[str, Any]]:
    """Takes out of `given` what belongs to a call, not to its requests: whether progress is shown, and how messages
    become a prompt, which is refused where there are none."""
    names = [row.name for row in table.SPELLINGS if row.to in OF_CALL and row.name in given]
    how = _read({name: given.pop(name) for name in names}, ()).found()
    shown = bool(how.pop("progress", progress))  # a function that makes a bar is as good as yes
    if how and not chat:
        raise OptionError(f"{', '.join(how)}: a prompt is taken as it is; give it to chat")
    return shown, {**how.pop("chat_template_kwargs", {}), **how}


def read_request(given: Mapping[str, Any], prompt_length: int, notices: Notices) -> dict[str, Any]:
    """The options of one request in our words, fit for SamplingParams."""
    reading = _read(given, REQUEST)
    if reading.parts() or reading.found().keys() - set(OF_REQUEST):
        theirs = [name for name in given if name not in REQUEST]
        raise OptionError(f"{', '.join(theirs)}: not of a request but of the engine; give it to LLM(…)")
    _settle(reading, prompt_length)
    notices.say(reading.notes)
    told = {name: value for name, value in reading.found().items() if value is not None}
    if "max_tokens" in given and given["max_tokens"] is None:  # the one None that says something: up to the length
        told["max_tokens"] = None
    return told


def _settle(reading: Reading, prompt_length: int) -> None:
    """max_length counts the prompt, max_tokens does not. do_sample decides whether a temperature counts; a
    generation_config that leaves it out means False."""
    length, written = reading.pop("max_length")
    if length is not None:
        most = whole(length, written) - prompt_length
        if most < 1:
            told = f"counts the prompt, which has {prompt_length} tokens; give more, or max_new_tokens"
            raise OptionError(f"{written} {told}")
        reading.put("max_tokens", most, written)
    sampled, _ = reading.pop("do_sample")
    if sampled is False or (sampled is None and "generation_config" in reading.names):
        if reading.pop("temperature")[0]:
            reading.notes.append("temperature has no effect without do_sample=True: the likeliest token is taken")
        reading.put("temperature", 0.0, "do_sample=False")
