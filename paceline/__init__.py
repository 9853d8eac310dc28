"""paceline: speculative decoding that never changes the text."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.drafters.draft_model import DraftModel
    from paceline.drafters.first_of import FirstOf
    from paceline.drafters.ngram import NGram
    from paceline.drafters.suffix import Suffix
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput
    from paceline.params import SamplingParams

__version__ = "0.1.0"

# Nothing heavy is imported before it is used: `import paceline` must not cost what torch costs.
_HOMES = {
    "LLM": "paceline.llm",
    "SamplingParams": "paceline.params",
    "RequestOutput": "paceline.outputs",
    "CompletionOutput": "paceline.outputs",
    "NGram": "paceline.drafters.ngram",
    "Suffix": "paceline.drafters.suffix",
    "DraftModel": "paceline.drafters.draft_model",
    "FirstOf": "paceline.drafters.first_of",
    "PacelineError": "paceline.errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "DraftModel",
    "FirstOf",
    "NGram",
    "PacelineError",
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
