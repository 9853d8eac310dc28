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
# How options are called here, where that is not their name.
FLAGS = {"prompt_template": "--template", "chat_template": "--template", "stop_token_ids": "--stop-token-id"}
# Options of a drafter for which a command may have a flag, whichever drafter it is.
DRAFT_MODELS = ("--draft-model", "--speculative-model")
OF_DRAFTERS = {
    "num_draft_tokens": ("--num-draft-tokens", "--num-speculative-tokens", "--gamma"),
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
    option = Flag(name, None, name).option
    known = table.names(table.COMMAND_LINE)
    if option.removeprefix("no_") in table.SWITCHES:
        if option in table.VALUED:
            return lambda word: not word.startswith("-")
        return lambda word: option in table.SWITCHES and word.lower() in TRUE + FALSE
    if option in known:
        return lambda word: True
    flags = [*declared, *("--" + theirs.replace("_", "-") for theirs in known)]
    raise OptionError(unknown_option(name, flags, f"see {command} --help"))


def rewrite_flags(
    foreign: Iterable[Flag], own: Sequence[Flag], declared: Mapping[str, Any], command: str
) -> list[Flag]:
    """All flags as the command declares them, its own among them; notices go to the log."""
    rewriting = _Rewriting(own, declared, command)
    reading = rewriting.reading
    for flag in foreign:
        positive = flag.option.removeprefix("no_")  # enable_x for no_enable_x
        alone = flag.value is None and positive in table.SWITCHES
        if flag.value is None and not alone:
            raise OptionError(f"{flag.written} needs a value")
        told = ("true" if positive == flag.option else "false") if alone else flag.value
        reading.take(positive if alone else flag.option, told, flag.written)
    add_lengths(reading)
    rewriting.settle()
    result = rewriting.with_drafter()
    for ours, value in reading.found().items():
        result += rewriting.flags(ours, value)
    Notices().say(reading.notes)
    return result


class _Rewriting:
    """What was typed, and what the command takes."""

    def __init__(self, own: Sequence[Flag], declared: Mapping[str, Any], command: str) -> None:
        self.own, self.declared, self.command = own, declared, command
        self.reading = Reading(table.COMMAND_LINE, ())
        self.named = [flag for flag in own if flag.name in ("--drafter", *DRAFT_MODELS)]  # that name a drafter

    def settle(self) -> None:
        """Words that mean something only beside others."""
        reading, given = self.reading, {flag.name for flag in self.own}
        sampled, written = reading.pop("do_sample")
        if sampled is False or (sampled and "--temperature" not in given):
            reading.put("temperature", "1" if sampled else "0", written)
        length, written = reading.pop("default_max_tokens")
        if length is not None and reading.get("max_tokens") is None and "--max-tokens" not in given:
            reading.put("max_tokens", length, written)

    def with_drafter(self) -> list[Flag]:
        """The command's own flags with what foreign ones say of a drafter."""
        reading = self.reading
        chosen = drafter.choose(reading, [_kind(flag) for flag in self.named])
        if chosen is None:
            return self._completed() if reading.parts() else list(self.own)
        written = " ".join(dict.fromkeys(reading.written(f"draft.{part}") for part in reading.parts()))
        if any(flag.name == "--drafter" for flag in self.named):
            raise OptionError(f"--drafter and {written} were both given; give one")
        kind, options = chosen
        names = {"model": DRAFT_MODELS, **OF_DRAFTERS}
        simple = kind == MODEL.word and options.keys() <= names.keys()
        if simple and any(name in self.declared for name in DRAFT_MODELS):
            return [*self.own, *(self._part(part, names[part], value) for part, value in options.items())]
        text = spec.join(kind, options)
        if "--drafter" not in self.declared:
            raise OptionError(f"{written} means --drafter {text}, and {self.command} takes no --drafter")
        return [*self.own, Flag("--drafter", text, written)]

    def _completed(self) -> list[Flag]:
        """Foreign options of a drafter that our own flags name, or of any that the command may have."""
        added, parts = [], self.reading.parts()
        for part, value in self.reading.parts().items():
            if "--drafter" not in self.declared or any(name in self.declared for name in OF_DRAFTERS[part]):
                added.append(self._part(part, OF_DRAFTERS[part], value))
                del parts[part]
            elif not self.named:
                raise OptionError(self.reading.written(f"draft.{part}") + drafter.NEEDS_DRAFTER)
        parts = drafter.applicable(self.reading, [_kind(flag) for flag in self.named], parts)
        result = []
        for flag in self.own:
            word, options = spec.split(flag.value or "") if flag.name == "--drafter" else ("", {})
            completed = drafter.complete(self.reading, drafter.kind_of(word), options, parts) if word else options
            result.append(flag if completed == options else Flag(flag.name, spec.join(word, completed), flag.written))
        return [*result, *added]

    def flags(self, ours: str, value: Any) -> list[Flag]:
        """One option of ours as the command spells it."""
        written = self.reading.written(ours)
        names = [*filter(None, [FLAGS.get(ours)]), "--" + ours.replace("_", "-")]
        refusal = "--no-" + ours.replace("_", "-")
        if refusal in self.declared and "--" + ours.replace("_", "-") not in self.declared:  # it is on
            return [] if switch(value, written) else [Flag(refusal, None, written)]
        if ours in SETTLED and not any(name in self.declared for name in names):
            self.reading.notes.append(f"{written} has no effect on {self.command}")
            return []
        if (without := f"--no-{names[-1][2:]}") in self.declared and names[-1] not in self.declared:  # on otherwise
            return [] if switch(value, written) else [Flag(without, None, written)]
        name = self._declared(names, written)
        if self.declared[name].is_flag:
            off = [flag for flag in self.declared[name].secondary_opts if flag.startswith("--")]
            return [Flag(flag, None, written) for flag in ([name] if switch(value, written) else off[:1])]
        return [Flag(name, str(item), written) for item in (value if isinstance(value, list) else [value])]

    def _part(self, part: str, names: Sequence[str], value: Any) -> Flag:
        written = self.reading.written(f"draft.{part}")
        return Flag(self._declared(names, written), str(value), written)

    def _declared(self, names: Sequence[str], written: str) -> str:
        """The first of our flags that the command takes."""
        for name in names:
            if name in self.declared:
                return name
        raise OptionError(f"{written} means {names[0]}, and {self.command} takes no {names[0]}")


def _kind(flag: Flag) -> str:
    """Of the drafter that a flag of ours names."""
    if flag.name == "--drafter":
        return drafter.kind_of(spec.split(flag.value or "")[0])
    return "ngram" if flag.value in drafter.BY_NGRAM else MODEL.word
