"""The hub: bringing a repository here, and what one holds, told before anything large is brought.

Knows: hub ids, which files are asked for, what the hub refuses. Must not know: what files mean.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from paceline.errors import CheckpointError

ID = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
SMALL = ("config.json", "*.index.json")
TOKENIZER = ("*.json", "*.model", "*.txt", "*.jinja")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
EVERYTHING = (*TOKENIZER, *WEIGHTS)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = "model.safetensors"


class Look(NamedTuple):
    """folder: what is here of a repository. tensors: their names; None: the folder holds the weights itself."""

    folder: Path
    tensors: Collection[str] | None
    files: Collection[str]


def download(name: str, patterns: tuple[str, ...] = EVERYTHING) -> Path:
    """The folder of a repository's files, fetched where they are not here yet."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:
        raise _refusal(name, error) from None


def find_here(name: str) -> Path | None:
    """The folder of what was fetched of a repository before; nothing is asked of the hub."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json") if ID.fullmatch(name) else None
    return Path(found).parent if isinstance(found, str) else None


@functools.lru_cache(maxsize=32)  # a name is read several times on its way to a drafter
def look(name: str, telling: frozenset[str] = frozenset()) -> Look:
    """What a repository holds, from its small files, its list of files and the header of its weights.

    telling: names of files that say enough. Where nothing does but weights that have no header, all of it is fetched.
    """
    with contextlib.redirect_stderr(io.StringIO()):  # a bar for a few kilobytes
        folder = download(name, SMALL)
    for index in INDEXES:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Look(folder, list(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]), ())
    if any(path for pattern in WEIGHTS for path in folder.glob(pattern)):  # it was fetched before
        return Look(folder, None, ())
    try:
        from huggingface_hub import model_info, parse_safetensors_file_metadata

        files = {file.rfilename for file in model_info(name, timeout=10.0).siblings or ()}
        if files & telling:
            return Look(folder, (), files)
        if SINGLE in files:
            return Look(folder, list(parse_safetensors_file_metadata(name, SINGLE).tensors), files)
    except Exception as error:
        raise _refusal(name, error) from None
    return Look(download(name), None, ())


# What to do when the hub refuses, by the name of what it raised: its classes differ from version to version.
TROUBLE = {
    "GatedRepoError": "it is gated; ask for access on its page there, then set HF_TOKEN",
    "RepositoryNotFoundError": "there is no such model, or it is private; check the name, or set HF_TOKEN",
    "HFValidationError": "that is no hub id; a hub id is OWNER/NAME",
}


def _refusal(name: str, error: BaseException) -> CheckpointError:
    """Why the hub did not deliver a model, and what to do."""
    from paceline.models.package_index import reason

    told = next((TROUBLE[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in TROUBLE), None)
    told = told or f"{reason(error)}; check the network, or give the path of a folder that holds the model"
    return CheckpointError(f"the hub did not deliver {name!r}: {told}")
