"""Spellings in the library: what `LLM(...)` and `generate`, `chat` and `stream` take under other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from paceline.compat import drafter, table
from paceline.compat.reading import Notices, Reading, show, whole
from paceline.drafters import make
from paceline.errors import OptionError
from paceline.params import SamplingParams

REQUEST = tuple(item.name for item in fields(SamplingParams) if item.init)
OF_REQUEST = (*REQUEST, "max_length", "do_sample", "sampling_params")
LENGTHS_FOR_LATER = ("max_n_spec_tokens", "n_spec_tokens")  # Colossal-Inference's drafters come after the engine


def translate(options: Mapping[str, Any], known: Iterable[str], notices: Notices | None = None) -> dict[str, Any]:
    """The options of `LLM(...)` in our words; an unknown one is refused, naming the nearest."""
    reading = Reading(table.LIBRARY, list(known))
    for name, value in options.items():
        if name in REQUEST and name not in reading.own:
            raise OptionError(f"{name} belongs to a request: give it to generate, chat or stream")
        reading.take(name, value, show(name, value))
    for ours in reading.found():
        if ours in OF_REQUEST and ours not in reading.own:
            raise OptionError(f"{reading.written(ours)} belongs to a request: give it to generate, chat or stream")
    add_lengths(reading)
    result = _with_drafter(reading)
    (notices or Notices()).say(reading.notes)
    return result


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
        return {**result, "drafter": drafter.build(chosen)}
    if given is None:
        _refuse_no_drafter(reading, parts)
    elif parts.keys() - {"num_draft_tokens"} or (parts and hasattr(given, "create")):
        result["drafter"] = _complete(reading, given, parts)
    length = parts.get("num_draft_tokens")
    return result if length is None else {**result, "num_draft_tokens": length}


def _refuse_no_drafter(reading: Reading, parts: Mapping[str, Any]) -> None:
    """Options of a drafter without one. A draft length may be for a drafter that comes later."""
    spelled = {row.name for row in table.SPELLINGS if row.to == "draft.num_draft_tokens"} & reading.names
    for part in parts:
        if part != "num_draft_tokens" or spelled - set(LENGTHS_FOR_LATER):
            raise OptionError(reading.written(f"draft.{part}") + drafter.NEEDS_DRAFTER)


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


def read_request(given: Mapping[str, Any], prompt_length: int, notices: Notices) -> dict[str, Any]:
    """The options of one request in our words, fit for SamplingParams."""
    reading = Reading(table.LIBRARY, REQUEST)
    for name, value in given.items():
        reading.take(name, value, show(name, value))
    if reading.parts() or reading.found().keys() - set(OF_REQUEST):
        theirs = [name for name in given if name not in REQUEST]
        raise OptionError(f"{', '.join(theirs)}: not of a request but of the engine; give it to LLM(…)")
    _settle_length(reading, prompt_length)
    _settle_sampling(reading)
    notices.say(reading.notes)
    told = {name: value for name, value in reading.found().items() if value is not None}
    if "max_tokens" in given and given["max_tokens"] is None:  # the one None that says something: up to the length
        told["max_tokens"] = None
    return told


def _settle_sampling(reading: Reading) -> None:
    """do_sample decides whether a temperature counts; a generation_config that leaves it out means False."""
    sampled = reading.pop("do_sample")
    if sampled is None and "generation_config" in reading.names:
        sampled = False
    if sampled is False:
        if reading.pop("temperature"):
            reading.notes.append("temperature has no effect without do_sample=True: the likeliest token is taken")
        reading.put("temperature", 0.0, "do_sample=False")


def _settle_length(reading: Reading, prompt_length: int) -> None:
    """max_length counts the prompt, max_tokens does not."""
    if reading.get("max_length") is None:
        return
    written = reading.written("max_length")
    most = whole(reading.pop("max_length"), written) - prompt_length
    if most < 1:
        raise OptionError(
            f"{written} counts the prompt, which has {prompt_length} tokens; give more, or max_new_tokens"
        )
    reading.put("max_tokens", most, written)
