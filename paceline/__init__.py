"""paceline: speculative decoding that never changes the text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.drafters.dflash import DFlash
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.eagle import Eagle
    from paceline.drafters.early_exit import EarlyExit
    from paceline.drafters.first_of import FirstOf
    from paceline.drafters.glide import Glide
    from paceline.drafters.hydra import Hydra
    from paceline.drafters.lookahead import Lookahead
    from paceline.drafters.medusa import Medusa
    from paceline.drafters.mlp_speculator import MLPSpeculator
    from paceline.drafters.mtp import MTP
    from paceline.drafters.ngram import NGram
    from paceline.drafters.pard import Pard
    from paceline.drafters.suffix import Suffix
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput
    from paceline.params import SamplingParams

__version__ = "0.1.0"

# Nothing heavy is imported before it is used: `import paceline` must not cost what torch costs.
_HOMES = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.async_llm",
    "SamplingParams": "paceline.params",
    "RequestOutput": "paceline.outputs",
    "CompletionOutput": "paceline.outputs",
    "NGram": "paceline.drafters.ngram",
    "Suffix": "paceline.drafters.suffix",
    "DraftModel": "paceline.drafters.draft_model",
    "Lookahead": "paceline.drafters.lookahead",
    "EarlyExit": "paceline.drafters.early_exit",
    "Eagle": "paceline.drafters.eagle",
    "FirstOf": "paceline.drafters.first_of",
    "Hydra": "paceline.drafters.hydra",
    "Medusa": "paceline.drafters.medusa",
    "MLPSpeculator": "paceline.drafters.mlp_speculator",
    "MTP": "paceline.drafters.mtp",
    "DFlash": "paceline.drafters.dflash",
    "Glide": "paceline.drafters.glide",
    "Pard": "paceline.drafters.pard",
    "PacelineError": "paceline.errors",
}

__all__ = [
    "LLM",
    "MTP",
    "AsyncLLM",
    "CompletionOutput",
    "DFlash",
    "DraftModel",
    "Eagle",
    "EarlyExit",
    "FirstOf",
    "Glide",
    "Hydra",
    "Lookahead",
    "MLPSpeculator",
    "Medusa",
    "NGram",
    "PacelineError",
    "Pard",
    "RequestOutput",
    "SamplingParams",
    "Suffix",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
