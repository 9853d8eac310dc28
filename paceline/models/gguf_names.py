"""How GGUF files spell a family: its architecture, its tensors, the order of its rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GGUFNames:
    architecture: str  # what general.architecture says
    tensors: Mapping[str, str]  # of the whole model: theirs → Hugging Face's
    layer: Mapping[str, str]  # of one layer, without its number and without .weight or .bias
    layers: str = "model.layers"  # what Hugging Face's begin with
    interleaved: bool = False  # q and k rows alternate between the halves of a head
    activation: str = "silu"  # files do not say
    more: Callable[[Callable[[str, float], float], int], dict[str, Any]] | None = None  # fields from other metadata

    def hugging_face(self, name: str) -> str:
        """A tensor's name in Hugging Face spelling; unknown ones stay as they are and will be reported as unused."""
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if match and match[2] in self.layer:
            return f"{self.layers}.{match[1]}.{self.layer[match[2]]}.{match[3]}"
        return self.tensors.get(name, name)
