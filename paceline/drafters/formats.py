"""Which published kind of drafter a folder holds, told from its config and tensors, never from its name.

Today only whole draft models load; the others are recognised so that none is taken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import OptionError

SUPPORTED = "ngram, suffix, draft models"


def check_loads(path: str) -> None:
    """Refuse a folder whose drafter is of a kind that does not load yet, in a sentence that names the kind."""
    folder = Path(path).expanduser()
    kind = find_kind(_config(folder), ()) if folder.is_dir() else None
    if kind is not None:
        raise _not_yet(path, kind)


def check_tensors(path: str, names: Collection[str]) -> None:
    """The same by the names of its tensors, once they are known."""
    kind = find_kind({}, names)
    if kind is not None:
        raise _not_yet(path, kind)


def find_kind(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """The first kind whose mark is there; None for a model of its own."""
    kind, architectures = config.get("model_type"), " ".join(map(str, config.get("architectures") or ()))
    if "speculators_config" in config or "speculators_model_type" in config:
        return "a drafter in the speculators format"
    if kind == "mlp_speculator" or "MLPSpeculator" in architectures:
        return "an MLP speculator"
    if kind == "medusa" or "medusa_num_heads" in config or _any(r"\d+\.\d+\.(linear\.)?weight$|medusa_head\.", tensors):
        return "Medusa heads"
    if "hydra_num_heads" in config:
        return "Hydra heads"
    if "dflash_config" in config or "DFlash" in architectures:
        return "a DFlash drafter"
    if "Eagle3" in architectures or _any(r"(model\.)?midlayer\.|d2t$|t2d$", tensors):
        return "an EAGLE-3 drafter"
    if "large_hidden_size" in config or _any(r".*\.cross_attn\.q_proj\.", tensors):
        return "a GLIDE drafter"
    if kind == "eagle" or _any(r"(model\.)?fc\.weight$", tensors):
        return "an EAGLE drafter"
    if _any(r"(model\.)?mtp[._]|.*\.eh_proj\.", tensors):
        return "an MTP module"
    return "a PARD drafter" if "pard_token" in config else None


def _any(pattern: str, tensors: Collection[str]) -> bool:
    return any(re.match(pattern, name) for name in tensors)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # whoever loads it says what is wrong
    return found if isinstance(found, dict) else {}


def _not_yet(path: str, kind: str) -> OptionError:
    return OptionError(f"{path} holds {kind}, which cannot be loaded yet; supported drafters: {SUPPORTED}")
