"""How GGUF files spell a family: its architecture, its tensors, the order of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# A number of a file's metadata, with a default (None: it must be there); fields of a config by such and the layers.
NumberOf = Callable[[str, float | None], float]
More = Callable[[NumberOf, int], dict[str, Any]]


@dataclass(frozen=True)
class GGUFNames:
    architecture: str  # what general.architecture says
    tensors: Mapping[str, str]  # of the whole model: theirs → Hugging Face's
    layer: Mapping[str, str]  # of one layer, without its number and without .weight or .bias
    layers: str = "model.layers"  # what Hugging Face's begin with
    interleaved: bool = False  # q and k rows alternate between the halves of a head
    experts: bool = False  # files that say so many experts are of this family, others of the architecture are not
    activation: str = "silu"  # files do not say
    more: More | None = None  # fields from other metadata

    def hugging_face(self, name: str) -> str:
        """A tensor's name in Hugging Face spelling; unknown ones stay as they are and will be reported as unused.

        The first files of models with experts have them one by one: ffn_gate.3 is one of what ffn_gate_exps stacks.
        """
        match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)", name)
        ours = match and self.layer.get(match[2] if match[3] is None else f"{match[2]}_exps")
        if not match or not ours:
            return self.tensors.get(name, name)
        if match[3] is not None:
            stem, last = ours.rsplit(".", 1)
            ours = f"{stem}.{match[3]}.{last}"
        return f"{self.layers}.{match[1]}.{ours}.{match[4]}"
