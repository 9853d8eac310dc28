"""How families lay their MTP modules out: one row for each way of naming them.

A module is a decoder layer of its target's kind behind a linear over a token's embedding and a state, both normed. What
families do differently is which half of that linear is which, whether the target's state is read behind its last norm,
and what they call it all. No file says the first two: they stand here. Knows names; computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from paceline.drafters.base import FINAL, Target
from paceline.errors import CheckpointError
from paceline.kernels.ops import Packed
from paceline.models.weights import Source


@dataclass(frozen=True)
class Form:
    """Names of a module's tensors, behind its prefix and without `.weight`."""

    families: tuple[str, ...]  # who writes it
    prefix: str  # a pattern; its group is the module's number, empty where there is one
    fusion: str
    embedding_norm: str
    state_norm: str
    last_norm: str
    state_first: bool = False  # the linear reads the state, then the embedding
    normed: bool = True  # the target's state is read behind its last norm
    embedding: str = "embed_tokens"  # copies of the target's own, where a file has them
    head: str = "shared_head.head"
    layer: str = ""  # in front of the decoder layer's names
    transposed: bool = False  # matrices are stored [in, out], but for the embedding
    missing: str = ""  # why it cannot be used yet

    def state_of(self, target: Target) -> int:
        """The target's boundary that is read."""
        return FINAL if self.normed else target.model.config.num_layers

    def modules(self, names: Collection[str]) -> list[str]:
        """The prefixes of the modules that are there, in their order; one name that only modules have is enough."""
        own = "|".join(map(re.escape, (self.fusion, self.embedding_norm, self.state_norm, self.last_norm)))
        pattern = re.compile(rf"({self.prefix})(?:{own})\.weight")
        found = {match[1]: int(match[2] or 0) for match in map(pattern.fullmatch, names) if match}
        return sorted(found, key=found.__getitem__)


FORMS = (
    Form(
        ("mimo",),
        r"model\.mtp_layers\.(\d+)\.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
        state_first=True,
        normed=False,
    ),
    Form(("deepseek_v3", "glm4_moe"), r"model\.layers\.(\d+)\.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    Form(
        ("deepseek_v3",),  # as PaddleNLP writes it
        r"deepseek_v3_mtp\.()",
        "eh_proj",
        "enorm",
        "hnorm",
        "norm",
        layer="layers.0.",
        transposed=True,
    ),
    Form(
        ("speculators",),
        r"mtp_layers\.(\d+)\.",
        "input_proj",
        "token_layernorm",
        "hidden_layernorm",
        "final_layernorm",
    ),
    Form(
        ("qwen3_next",),
        r"mtp\.()",
        "fc",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "norm",
        layer="layers.0.",
        missing="its target has layers of linear attention, which cannot be run yet",
    ),
)


class Transposed:
    """A source whose matrices are stored [in, out], but for those whose names end in `but`."""

    def __init__(self, source: Source, but: str) -> None:
        self.label, self.files, self._source, self._but = source.label, source.files, source, but

    def names(self) -> Collection[str]:
        return self._source.names()

    def read(self, name: str) -> Tensor | Packed:
        found = self._source.read(name)
        return found.t() if isinstance(found, Tensor) and found.dim() == 2 and not name.endswith(self._but) else found

    def kind(self, name: str) -> str:
        return self._source.kind(name)

    def release(self) -> None:
        self._source.release()


def find_form(names: Collection[str], label: str) -> tuple[Form, list[str]]:
    """The form of the modules that these tensors make, and their prefixes in order."""
    for form in FORMS:
        prefixes = form.modules(names)
        if prefixes and form.missing:
            raise CheckpointError(f"{label} holds an MTP module of {', '.join(form.families)}: {form.missing}")
        if prefixes:
            return form, prefixes
    named = ", ".join(dict.fromkeys(family for form in FORMS for family in form.families if not form.missing))
    raise CheckpointError(f"{label} holds no MTP module; known are those of {named}")
