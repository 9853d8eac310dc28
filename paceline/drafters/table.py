"""The one table of drafters: a row for each kind, those that are only known included.

Commands, foreign spellings, `drafter=`, published folders and documentation are read with these rows. So a new drafter
is its own file, its test, its page, and `home` in one row. Knows words; a config is imported when it is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paceline.errors import OptionError

NONE = "none"  # the word for no drafter
LENGTH = "num_draft_tokens"  # the option of every drafter that bounds its drafts


@dataclass(frozen=True)
class Marks:
    """How a published folder shows its kind; one of these is enough.

    types: its config's model_type. architecture: stands in the name of one. keys: of its config. tensors: a pattern
    that a tensor's name begins with.
    """

    types: tuple[str, ...] = ()
    architecture: str = ""
    keys: tuple[str, ...] = ()
    tensors: str = ""


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    word: what users call it. called: the same inside a sentence. does: what it does, for help.
    home: module:class of its config; without one it is known, but cannot be loaded yet.
    methods: what vLLM calls it, and PaddleNLP where it has it.
    """

    word: str
    called: str
    does: str = ""
    home: str = ""
    methods: tuple[str, ...] = ()
    marks: Marks = Marks()

    @property
    def loads(self) -> bool:
        return bool(self.home)

    @property
    def config(self) -> Any:
        """The class; OptionError where there is none yet."""
        if not self.loads:
            raise OptionError(f"drafter {self.word!r}, {self.called}, {not_yet()}")
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)

    @property
    def page(self) -> str:
        """Its page in docs/drafters, called as its module is."""
        return self.home.partition(":")[0].rpartition(".")[2].replace("_", "-")

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(item.name for item in dataclasses.fields(self.config))

    @property
    def has_model(self) -> bool:
        return "model" in self.options

    def make(self, options: Mapping[str, Any]) -> Any:
        """Its config with these options."""
        if self.has_model and options.get("model") is None:
            raise OptionError(f"drafter {self.word!r} needs a model; write {self.word}:model=NAME")
        return self.config(**options)


# Folders are held against the rows from above: the first whose marks are there is what a folder holds.
KINDS = (
    Kind(
        "ngram",
        "n-gram drafting",
        "copies what followed the same tokens earlier in the text",
        "paceline.drafters.ngram:NGram",
        ("ngram",),
    ),
    Kind(
        "suffix",
        "suffix drafting",
        "what most often followed, in this text and in earlier answers",
        "paceline.drafters.suffix:Suffix",
        ("suffix",),
    ),
    Kind(
        "draft",
        "a draft model",
        "a smaller model; its name or path alone will do",
        "paceline.drafters.draft_model:DraftModel",
        ("draft_model",),
    ),
    Kind(
        "speculators",
        "a drafter in the speculators format",
        marks=Marks(keys=("speculators_config", "speculators_model_type")),
    ),
    Kind(
        "mlp_speculator",
        "an MLP speculator",
        methods=("mlp_speculator",),
        marks=Marks(("mlp_speculator",), "MLPSpeculator"),
    ),
    Kind(
        "medusa",
        "Medusa heads",
        methods=("medusa",),
        marks=Marks(("medusa",), "", ("medusa_num_heads",), r"\d+\.\d+\.(linear\.)?weight$|medusa_head\."),
    ),
    Kind("hydra", "Hydra heads", marks=Marks(keys=("hydra_num_heads",))),
    Kind("dflash", "a DFlash drafter", marks=Marks((), "DFlash", ("dflash_config",))),
    Kind(
        "eagle3",
        "an EAGLE-3 drafter",
        methods=("eagle3",),
        marks=Marks((), "Eagle3", (), r"(model\.)?midlayer\.|d2t$|t2d$"),
    ),
    Kind(
        "glide",
        "a GLIDE drafter",
        marks=Marks(keys=("large_hidden_size",), tensors=r".*\.cross_attn\.q_proj\."),
    ),
    Kind("eagle", "an EAGLE drafter", methods=("eagle",), marks=Marks(("eagle",), tensors=r"(model\.)?fc\.weight$")),
    Kind(
        "mtp",
        "an MTP module",
        methods=("mtp", "deepseek_mtp"),
        marks=Marks(tensors=r"(model\.)?mtp[._]|.*\.eh_proj\."),
    ),
    Kind("pard", "a PARD drafter", marks=Marks(keys=("pard_token",))),
    Kind("lookahead", "lookahead decoding"),
    Kind("early_exit", "early exit"),
)


MODEL = KINDS[2]  # what a word that names none of them is


def find(word: str) -> Kind | None:
    return next((kind for kind in KINDS if kind.word == word), None)


def find_method(method: str) -> Kind:
    """The kind that another system calls so."""
    return next(kind for kind in KINDS if method in kind.methods)


def find_config(config: Any) -> Kind | None:
    """The kind of a config; None for one that is nobody's here. Imports nothing: an object's class was imported."""
    name = f"{type(config).__module__}:{type(config).__qualname__}"
    return next((kind for kind in KINDS if kind.home == name), None)


def loadable() -> list[Kind]:
    return [kind for kind in KINDS if kind.loads]


def listed() -> str:
    return ", ".join(kind.word for kind in loadable())


def words() -> str:
    """What may stand where a drafter is named."""
    return f"{NONE}, {listed()}, or a model's name or path"


def not_yet() -> str:
    """What is said of a kind that is only known."""
    return f"is known but cannot be loaded yet; drafters that load: {listed()}"
