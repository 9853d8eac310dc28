"""The one table of drafters: a row for each kind, those that are only known included.

Commands, foreign spellings, `drafter=`, published folders and documentation are read with these rows. So a new drafter
is its own file, its test, its page, and `home` in one row. Knows words; a config is imported when it is asked for.
Other packages bring rows of their own, as entry points of the group `paceline.drafters`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from paceline.errors import OptionError

NONE = "none"  # the word for no drafter
LENGTH = "num_draft_tokens"  # the option of every drafter that bounds its drafts
GROUP = "paceline.drafters"  # of entry points: a word, and module:class of what it means


@dataclass(frozen=True)
class Marks:
    """How a published folder shows its kind; one of these is enough.

    types: its config's model_type. architecture: stands in the name of one. keys: of its config. tensors: a pattern
    that a tensor's name begins with. algorithms: its speculators_model_type, which decides where it is given. whole: a
    tensor that a model of its own has, in whose folder such tensors may lie besides.
    """

    types: tuple[str, ...] = ()
    architecture: str = ""
    keys: tuple[str, ...] = ()
    tensors: str = ""
    algorithms: tuple[str, ...] = ()
    whole: str = ""


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    word: what users call it. called: the same inside a sentence. does: what it does, for help.
    home: module:class of its config; without one it is known, but cannot be loaded yet.
    methods: what vLLM calls it, and PaddleNLP where it has it. files: weight files only this kind has.
    parallel: the word of what vLLM means by it told to draft in one pass; its own where its files say that anyway.
    """

    word: str
    called: str
    does: str = ""
    home: str = ""
    methods: tuple[str, ...] = ()
    marks: Marks = Marks()
    files: tuple[str, ...] = ()
    parallel: str = ""

    @property
    def loads(self) -> bool:
        return bool(self.home)

    @property
    def config(self) -> Any:
        """The class; OptionError where there is none yet."""
        if not self.loads:
            raise OptionError(f"drafter {self.word!r}, {self.called}, {not_yet()}")
        module, _, name = self.home.partition(":")
        try:
            return functools.reduce(getattr, name.split("."), import_module(module))
        except (ImportError, AttributeError) as error:
            raise OptionError(f"drafter {self.word!r} cannot be loaded from {self.home}: {error}") from error

    @property
    def page(self) -> str:
        """Its page in docs/drafters, called as its module is."""
        return self.home.partition(":")[0].rpartition(".")[2].replace("_", "-")

    def written(self, option: str) -> str:
        """How a user gives it an option, in a sentence."""
        return f"{self.word}:{option} on the command line, {self.home.rpartition(':')[2]}({option}) in Python"

    @property
    def options(self) -> tuple[str, ...]:
        return options_of(self.config)

    @property
    def has_model(self) -> bool:
        return "model" in self.options

    @property
    def needs_model(self) -> bool:
        """Whether it is nothing without one; MTP modules may be the target's own."""
        return self.has_model and not hasattr(self.config, "model")  # a default is there

    def make(self, options: Mapping[str, Any]) -> Any:
        """Its config with these options."""
        if self.needs_model and options.get("model") is None:
            raise OptionError(f"drafter {self.word!r} needs a model; write {self.written('model=…')}")
        return self.config(**options)


MEDUSA = r"\d+\.\d+\.(linear\.)?weight$|(model\.)?medusa_heads?\.|blocks\.\d+\.layers\."

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
        parallel="pard",
    ),
    Kind(
        "speculators",
        "a drafter in the speculators format",
        marks=Marks(keys=("speculators_config", "speculators_model_type")),
    ),
    Kind(
        "mlp_speculator",
        "an MLP speculator",
        "small steps from the target's state, each fed the token before",
        "paceline.drafters.mlp_speculator:MLPSpeculator",
        ("mlp_speculator",),
        Marks(("mlp_speculator",), "MLPSpeculator", algorithms=("mlp",)),
    ),
    Kind(
        "medusa",
        "Medusa heads",
        "a head for each token ahead, all on the target's state",
        "paceline.drafters.medusa:Medusa",
        ("medusa",),
        Marks(("medusa",), "", ("medusa_num_heads",), MEDUSA),
        ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    ),
    Kind(
        "hydra",
        "Hydra heads",
        "a head for each token ahead, each fed the tokens before",
        "paceline.drafters.hydra:Hydra",
        marks=Marks(keys=("hydra_num_heads",), tensors=r"(hydra_head\.)?hydra_mlp\."),
        files=("hydra_lm_head.pt",),
    ),
    Kind(
        "dflash",
        "a DFlash drafter",
        "a block of drafts that see one another, over the target's states",
        "paceline.drafters.dflash:DFlash",
        ("dflash",),
        marks=Marks((), "DFlash", ("dflash_config",), algorithms=("dflash",)),
        parallel="dflash",
    ),
    Kind(
        "eagle",
        "an EAGLE drafter",
        "a small layer over the target's own states: EAGLE-1, 2, 3 and P-EAGLE",
        "paceline.drafters.eagle:Eagle",
        ("eagle", "eagle3", "peagle"),
        Marks(("eagle",), "Eagle3", (), r"(model\.)*(midlayer\.|fc\.weight$|d2t$|t2d$)", ("eagle", "eagle3", "peagle")),
        parallel="eagle",
    ),
    Kind(
        "glide",
        "a GLIDE drafter",
        "a small model that looks at the target's keys and values",
        "paceline.drafters.glide:Glide",
        marks=Marks(keys=("large_hidden_size",), tensors=r".*\.cross_attn\.q_proj\."),
    ),
    Kind(
        "mtp",
        "an MTP module",
        "layers trained with their target to say the tokens behind the next",
        "paceline.drafters.mtp:MTP",
        ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp"),
        Marks(tensors=r"(model\.)?mtp[._]|.*\.eh_proj\.", algorithms=("mtp",), whole="model.norm.weight"),
    ),
    Kind(
        "pard",
        "a PARD drafter",
        "a draft model that drafts all tokens in one pass",
        "paceline.drafters.pard:Pard",
        marks=Marks(keys=("pard_token",)),
        parallel="pard",
    ),
    Kind(
        "lookahead",
        "lookahead decoding",
        "the target's own guesses, gathered in rows beside its forwards",
        "paceline.drafters.lookahead:Lookahead",
    ),
    Kind(
        "early_exit",
        "early exit",
        "the target's own first layers",
        "paceline.drafters.early_exit:EarlyExit",
    ),
)


MODEL = KINDS[2]  # what a word that names none of them is


@functools.cache
def installed() -> tuple[Kind, ...]:
    """Those that other packages bring; a word that is taken stays what it is. Looked for only when a word is none of
    ours: it takes time."""
    from importlib import metadata

    taken = {NONE, *(kind.word for kind in KINDS)}
    found = {point.name: point for point in metadata.entry_points(group=GROUP) if point.name not in taken}
    return tuple(Kind(word, f"the drafter {word}", f"from {point.value}", point.value) for word, point in found.items())


def kinds() -> tuple[Kind, ...]:
    """Every row there is."""
    return (*KINDS, *installed())


def options_of(config: Any) -> tuple[str, ...]:
    """The options of a config, or of its class; none where it is no dataclass."""
    return tuple(item.name for item in dataclasses.fields(config)) if dataclasses.is_dataclass(config) else ()


def find(word: str) -> Kind | None:
    own = next((kind for kind in KINDS if kind.word == word), None)
    return own or next((kind for kind in installed() if kind.word == word), None)


def find_method(method: str) -> Kind:
    """The kind that another system calls so."""
    return next(kind for kind in KINDS if method in kind.methods)


def find_config(config: Any) -> Kind | None:
    """The kind of a config; None for one that is nobody's here. Imports nothing: an object's class was imported."""
    name = f"{type(config).__module__}:{type(config).__qualname__}"
    own = next((kind for kind in KINDS if kind.home == name), None)
    return own or next((kind for kind in installed() if kind.home == name), None)


def loadable() -> list[Kind]:
    return [kind for kind in KINDS if kind.loads]


def listed() -> str:
    return ", ".join(kind.word for kind in loadable())


def words() -> str:
    """What may stand where a drafter is named."""
    others = "".join(f", {kind.word}" for kind in installed())
    return f"{NONE}, {listed()}{others}, or a model's name or path"


def not_yet() -> str:
    """What is said of a kind that is only known."""
    return f"is known but cannot be loaded yet; drafters that load: {listed()}"
