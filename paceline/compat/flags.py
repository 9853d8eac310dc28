"""Spellings on the command line: flags of other systems, rewritten into those that a command declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.compat import drafter, table
from paceline.compat.library import add_lengths
from paceline.compat.reading import FALSE, TRUE, Notices, Reading, switch, unknown_option
from paceline.errors import OptionError

# They bound memory and lengths and never change the text, so a command may do without them.
BOUNDS = (
    "max_model_len",
    "max_prompt_len",
    "max_num_seqs",
    "block_size",
    "num_pages",
    "prefix_caching",
    "max_batched_tokens",
    "gpu_memory_utilization",
    "tensor_parallel_size",
)
DRAFT_LENGTHS = ("--num-draft-tokens", "--num-speculative-tokens", "--gamma")
DRAFT_MODELS = ("--draft-model", "--speculative-model")


@dataclass(frozen=True)
class Flag:
    """A flag by its name with hyphens, its value, and how the user wrote it."""

    name: str
    value: str | None
    written: str

    @property
    def option(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    def words(self) -> list[str]:
        return [self.name] if self.value is None else [self.name, self.value]


def takes_value(name: str, declared: Iterable[str], command: str) -> Callable[[str], bool]:
    """Whether a word that follows a foreign flag is its value; an unknown flag is refused, naming the nearest."""
    option = name.removeprefix("--").replace("-", "_")
    known = table.names(table.COMMAND_LINE)
    if _denied(option) is not None:
        return lambda word: False
    if option in table.SWITCHES:
        return lambda word: word.lower() in TRUE + FALSE
    if option in known:
        return lambda word: True
    flags = [*declared, *("--" + theirs.replace("_", "-") for theirs in known)]
    raise OptionError(unknown_option(name, flags, f"see {command} --help"))


def rewrite_flags(
    foreign: Iterable[Flag], own: Iterable[Flag], declared: Mapping[str, Any], command: str
) -> list[Flag]:
    """Flags that the command does not declare as flags that it does; notices go to the log."""
    reading = Reading(table.COMMAND_LINE, ())
    for flag in foreign:
        _take(reading, flag)
    given = {flag.name for flag in own}
    add_lengths(reading)
    _settle_sampling(reading, given)
    result = _drafter_flags(reading, given, declared, command)
    for ours, value in reading.found().items():
        result += _flags(reading, (ours, value), declared, command)
    Notices().say(reading.notes)
    return result


def _denied(option: str) -> str | None:
    """`enable_x` for `no_enable_x`."""
    positive = option.removeprefix("no_")
    return positive if positive != option and positive in table.SWITCHES else None


def _take(reading: Reading, flag: Flag) -> None:
    denied = _denied(flag.option)
    if denied is not None:
        reading.take(denied, "false", flag.written)
    elif flag.value is None and flag.option not in table.SWITCHES:
        raise OptionError(f"{flag.written} needs a value")
    else:
        reading.take(flag.option, "true" if flag.value is None else flag.value, flag.written)


def _settle_sampling(reading: Reading, given: set[str]) -> None:
    """Words that mean something only beside others."""
    if reading.get("do_sample") is not None:
        written, sampled = reading.written("do_sample"), reading.pop("do_sample")
        if not sampled or "--temperature" not in given:
            reading.put("temperature", "1" if sampled else "0", written)
    if reading.get("default_max_tokens") is not None:
        written, length = reading.written("default_max_tokens"), reading.pop("default_max_tokens")
        if reading.get("max_tokens") is None and "--max-tokens" not in given:
            reading.put("max_tokens", length, written)


def _drafter_flags(reading: Reading, given: set[str], declared: Mapping[str, Any], command: str) -> list[Flag]:
    chosen, parts = drafter.choose(reading), reading.parts()
    if chosen is None:
        length = parts.get("num_draft_tokens")
        if length is None:
            return []
        written = reading.written("draft.num_draft_tokens")
        return [Flag(_declared(DRAFT_LENGTHS, written, declared, command), str(length), written)]
    written = " ".join(dict.fromkeys(reading.written(f"draft.{part}") for part in parts))
    if "--drafter" in given:
        raise OptionError(f"--drafter and {written} were both given; give one")
    kind, options = chosen
    names = {"model": DRAFT_MODELS, "num_draft_tokens": DRAFT_LENGTHS, "quantization": ("--drafter-quantization",)}
    if kind == "draft" and options.keys() <= names.keys() and any(name in declared for name in DRAFT_MODELS):
        return [
            Flag(_declared(names[part], written, declared, command), str(value), reading.written(f"draft.{part}"))
            for part, value in options.items()
        ]
    spec = drafter.write(chosen)
    if "--drafter" not in declared:
        raise OptionError(f"{written} means --drafter {spec}, and {command} takes no --drafter")
    return [Flag("--drafter", spec, written)]


def _declared(names: Iterable[str], written: str, declared: Mapping[str, Any], command: str) -> str:
    """The first of our flags that the command takes."""
    tried = list(names)
    for name in tried:
        if name in declared:
            return name
    raise OptionError(f"{written} means {tried[0]}, and {command} takes no {tried[0]}")


def _flags(reading: Reading, option: tuple[str, Any], declared: Mapping[str, Any], command: str) -> list[Flag]:
    """One option of ours as the command spells it."""
    ours, value = option
    written = reading.written(ours)
    names = dict.fromkeys([table.FLAGS.get(ours, ""), "--" + ours.replace("_", "-")])
    if ours in BOUNDS and not any(name in declared for name in names):
        if ours == "tensor_parallel_size" and str(value) != "1":
            raise OptionError(f"{written} is not supported yet; allowed: 1 (one device)")
        if ours != "tensor_parallel_size":
            reading.notes.append(f"{written} has no effect on {command}")
        return []
    name = _declared((name for name in names if name), written, declared, command)
    if declared[name].is_flag:
        off = [flag for flag in declared[name].secondary_opts if flag.startswith("--")]
        said = [name] if switch(value, written) else off[:1]
        return [Flag(flag, None, written) for flag in said]
    return [Flag(name, str(item), written) for item in (value if isinstance(value, list) else [value])]
