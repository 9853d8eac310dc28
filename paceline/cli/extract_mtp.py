"""`paceline extract-mtp`: a checkpoint's MTP modules in a folder of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def extract_mtp(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder or hub id that holds MTP modules.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; new or empty.")],
) -> None:
    """Write a model's MTP modules apart from it.

    The folder keeps the names of the model's own checkpoint, without copies of its embedding and head, which are
    borrowed from the target again. It is a drafter's folder as any other: --drafter OUT.
    """
    from paceline.drafters.mtp_files import extract

    names = extract(model, out)
    size = (out / "model.safetensors").stat().st_size
    typer.echo(f"{out}: {len(names)} tensors, {size / 1e6:.1f} MB; use it with --drafter {out}")
