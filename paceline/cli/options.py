"""Options that several commands share, each with its one help text."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="A name, a folder, a .gguf file or a hub id.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")]
Kernels = Annotated[str, typer.Option(help="auto, native (CPU), torch or reference.")]
Quantization = Annotated[str | None, typer.Option(help="int8 or int4: pack float weights at load (native kernels).")]
DrafterQuantization = Annotated[str | None, typer.Option(help="The same for a draft model, whatever the target's.")]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw", help="Use the chat template or not; by default where the model has one.", show_default=False
    ),
]
