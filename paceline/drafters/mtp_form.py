"""How families lay their MTP modules out: one row for each way of naming them.

A module is a decoder layer of its target's kind behind a linear over a token's embedding and a state, both normed. What
families do differently is which half of that linear is which, whether the target's state is read behind its last norm,
and what they call it all. No file says the first two: they stand here. Knows names; computes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from paceline.drafters.base import FINAL, Target
from paceline.errors import CheckpointError


@dataclass(frozen=True)
class Form:
    """Names of a module's tensors, behind its prefix and without `.weight`."""

    families: tuple[str, ...]  # who writes it
    prefix: str  # a pattern; its group is the module's number
    fusion: str
    embedding_norm: str
    state_norm: str
    last_norm: str
    state_first: bool = False  # the linear reads the state, then the embedding
    normed: bool = True  # the target's state is read behind its last norm
    embedding: str = "embed_tokens"  # copies of the target's own, where a file has them
    head: str = "shared_head.head"

    def state_of(self, target: Target) -> int:
        """The target's boundary that is read."""
        return FINAL if self.normed else target.model.config.num_layers

    def modules(self, names: Collection[str]) -> list[str]:
        """The prefixes of the modules that are there, in their order; one name that only modules have is enough."""
        own = "|".join(map(re.escape, (self.fusion, self.embedding_norm, self.state_norm, self.last_norm)))
        pattern = re.compile(rf"({self.prefix})(?:{own})\.weight")
        found = {match[1]: int(match[2]) for match in map(pattern.fullmatch, names) if match}
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
)


def find_form(names: Collection[str], label: str) -> tuple[Form, list[str]]:
    """The form of the modules that these tensors make, and their prefixes in order."""
    for form in FORMS:
        prefixes = form.modules(names)
        if prefixes:
            return form, prefixes
    named = ", ".join(family for form in FORMS for family in form.families)
    raise CheckpointError(f"{label} holds no MTP module; known are those of {named}")
