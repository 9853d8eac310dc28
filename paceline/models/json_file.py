"""A checkpoint's folder and its JSON files: what is there, or one sentence that says why not."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def is_folder(path: Path) -> bool:
    """Whether there is a folder; CheckpointError where it may not be read."""
    try:
        found = stat.S_ISDIR(os.stat(path).st_mode)
        if found:
            os.stat(os.path.join(path, "."))  # whoever may do this may open files in it
        return found
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):
        return False


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
