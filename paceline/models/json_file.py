"""JSON files of a checkpoint: an object, or one sentence that says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """FileNotFoundError is the caller's: a file may be optional."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read as JSON: it nests too deep") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__} where a JSON object is needed")
    return found
