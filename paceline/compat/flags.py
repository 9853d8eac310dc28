"""Spellings on the command line: flags of other systems, rewritten into those that a command declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.compat import drafter, spec, table
from paceline.compat.library import add_lengths
from paceline.compat.reading import FALSE, TRUE, Notices, Reading, switch, unknown_option
from paceline.drafters.table import MODEL
from paceline.errors import OptionError

# Every command settles these by itself, and they never change the text.
SETTLED = ("max_num_seqs", "prefix_caching")
DRAFT_LENGTHS = ("--num-draft-tokens", "--num-speculative-tokens", "--gamma")
DRAFT_MODELS = ("--draft-model", "--speculative-model")
# Options of a drafter for which a command may have a flag, whichever drafter it is.
OF_DRAFTERS = {
    "num_draft_tokens": DRAFT_LENGTHS,
    "quantization": ("--drafter-quantization",),
    "max_match": ("--ngram-prompt-lookup-max",),
    "min_match": ("--ngram-prompt-lookup-min",),
}


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
    foreign: Iterable[Flag], own: Sequence[Flag], declared: Mapping[str, Any], command: str
) -> list[Flag]:
    """All flags as the command declares them, its own among them; notices go to the log."""
    reading = Reading(table.COMMAND_LINE, ())
    for flag in foreign:
        _take(reading, flag)
    given = {flag.name for flag in own}
    add_lengths(reading)
    _settle_sampling(reading, given)
    result = _settle_drafter(reading, own, declared, command)
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


def _settle_drafter(reading: Reading, own: Sequence[Flag], declared: Mapping[str, Any], command: str) -> list[Flag]:
    """The command's own flags with what foreign ones say of a drafter."""
    named = [flag for flag in own if flag.name in ("--drafter", *DRAFT_MODELS)]
    chosen = drafter.choose(reading, [_kind(flag) for flag in named])
    if chosen is None:
        return _complete(reading, own, named, declared, command)
    written = " ".join(dict.fromkeys(reading.written(f"draft.{part}") for part in reading.parts()))
    if any(flag.name == "--drafter" for flag in named):
        raise OptionError(f"--drafter and {written} were both given; give one")
    kind, options = chosen
    names = {"model": DRAFT_MODELS, **OF_DRAFTERS}
    if kind == MODEL.word and any(name in declared for name in DRAFT_MODELS) and options.keys() <= names.keys():
        return [
            *own,
            *(
                Flag(_declared(names[part], written, declared, command), str(value), reading.written(f"draft.{part}"))
                for part, value in options.items()
            ),
        ]
    text = spec.join(kind, options)
    if "--drafter" not in declared:
        raise OptionError(f"{written} means --drafter {text}, and {command} takes no --drafter")
    return [*own, Flag("--drafter", text, written)]


def _kind(flag: Flag) -> str:
    """Of the drafter that a flag of ours names."""
    value = flag.value or ""
    if flag.name == "--drafter":
        return drafter.kind_of(spec.split(value)[0])
    return "ngram" if value in drafter.BY_NGRAM else MODEL.word


def _complete(
    reading: Reading, own: Sequence[Flag], named: Sequence[Flag], declared: Mapping[str, Any], command: str
) -> list[Flag]:
    """Foreign options of a drafter that our own flags name, or of any that the command may have."""
    added, parts = [], reading.parts()
    if not parts:
        return list(own)  # without a look at any drafter, which would take its time
    for part, value in reading.parts().items():
        written, names = reading.written(f"draft.{part}"), OF_DRAFTERS[part]
        if "--drafter" not in declared or any(name in declared for name in names):
            added.append(Flag(_declared(names, written, declared, command), str(value), written))
            del parts[part]
        elif not named:
            raise OptionError(written + drafter.NEEDS_DRAFTER)
    parts = drafter.applicable(reading, [_kind(flag) for flag in named], parts)
    return [*(_with(reading, flag, parts) if flag.name == "--drafter" else flag for flag in own), *added]


def _with(reading: Reading, flag: Flag, parts: Mapping[str, Any]) -> Flag:
    """--drafter with further options, as far as its drafter has them."""
    word, options = spec.split(flag.value or "")
    completed = drafter.complete(reading, drafter.kind_of(word), options, parts)
    return flag if completed == options else Flag(flag.name, spec.join(word, completed), flag.written)


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
    if ours in SETTLED and not any(name in declared for name in names):
        reading.notes.append(f"{written} has no effect on {command}")
        return []
    name = _declared((name for name in names if name), written, declared, command)
    if declared[name].is_flag:
        off = [flag for flag in declared[name].secondary_opts if flag.startswith("--")]
        said = [name] if switch(value, written) else off[:1]
        return [Flag(flag, None, written) for flag in said]
    return [Flag(name, str(item), written) for item in (value if isinstance(value, list) else [value])]
