"""MTP modules written apart from their target, under the names they have in its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from paceline.drafters.mtp_form import find_form
from paceline.errors import CheckpointError, OptionError
from paceline.models import loader
from paceline.models.json_file import read_object
from paceline.models.sources import FolderSource

COUNT = "num_nextn_predict_layers"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # the target's


def extract(model: str, out: Path) -> list[str]:
    """Write a checkpoint's modules to a new folder; the names of their tensors.

    Copies of the target's embedding and head are left out: whoever reads the folder borrows the target's.
    """
    folder = loader.locate(model)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; modules are taken from a checkpoint's folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} is there already; allowed: a new or empty folder")
    source = FolderSource(folder)
    form, prefixes = find_form(source.names(), source.label)
    kept: dict[str, Tensor] = {}
    for prefix in prefixes:
        copies = {f"{prefix}{form.embedding}.weight": EMBEDDING, f"{prefix}{form.head}.weight": HEAD}
        for name, tensor in source.stored(prefix).items():
            if name not in copies or not _is_copy(tensor, source, copies[name]):
                kept[name] = tensor.contiguous()
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps({**config, COUNT: len(prefixes)}, indent=2) + "\n", encoding="utf-8")
    from safetensors.torch import save_file

    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
    return list(kept)


def _is_copy(tensor: Tensor, source: FolderSource, other: str) -> bool:
    return other in source.names() and torch.equal(tensor, source.read(other))
