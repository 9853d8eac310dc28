"""Options that several commands share, each with its one help text and its place in `--help`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

# The panels of `--help`; they stand in the order in which a command first names an option of each.
DRAFTING, SAMPLING, PROMPT, SHOWING, MACHINE = "Drafting", "Sampling", "Prompt", "Showing", "Model and machine"


def _in(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


# The model and the machine
Model = Annotated[str, _in(MACHINE, "A name from `paceline models`, a folder, a .gguf file or a hub id.")]
Dtype = Annotated[str, _in(MACHINE, "float32, bfloat16, float16 or auto.")]
Device = Annotated[str, _in(MACHINE, "cpu, cuda, cuda:N or auto.")]
Kernels = Annotated[str, _in(MACHINE, "auto, native (CPU), torch or reference.")]
Quantization = Annotated[str | None, _in(MACHINE, "int8 or int4: pack float weights at load (native kernels).")]
MaxModelLen = Annotated[
    int | None, _in(MACHINE, "The most tokens of prompt and answer together; by default the model's own.")
]
MaxPromptLen = Annotated[int | None, _in(MACHINE, "The most tokens of a prompt; a longer one is refused.")]
GpuMemoryUtilization = Annotated[
    float | None, _in(MACHINE, "The share of the device's memory to use, above 0 up to 1; on a CPU, of what is free.")
]

# Drafting
Drafter = Annotated[
    list[str] | None,
    _in(
        DRAFTING,
        "none, ngram, suffix or a draft model's name or path, with options as in ngram:max_match=3,min_match=1. "
        "Several are asked in that order. The text is the same with every drafter.",
        metavar="SPEC",
    ),
]
NumDraftTokens = Annotated[
    int | None, _in(DRAFTING, "The most tokens drafted in a round, where --drafter does not say it; else its default.")
]
DrafterQuantization = Annotated[
    str | None, _in(DRAFTING, "int8 or int4: the same as --quantization for a draft model, whatever the target's.")
]
Acceptance = Annotated[
    str,
    _in(
        DRAFTING,
        "exact keeps every token; rejection and block keep the distribution; typical keeps neither.",
    ),
]

# Sampling
MaxTokens = Annotated[int, _in(SAMPLING, "The most tokens of an answer.")]
MinTokens = Annotated[int, _in(SAMPLING, "No end and no stop before so many tokens.")]
Temperature = Annotated[float, _in(SAMPLING, "0 takes the likeliest token; 1 samples as the model was trained.")]
TopP = Annotated[float, _in(SAMPLING, "Keep the likeliest tokens up to this share; 1 keeps all.")]
TopK = Annotated[int, _in(SAMPLING, "Keep so many of the likeliest tokens; 0 keeps all.")]
MinP = Annotated[float, _in(SAMPLING, "Keep tokens at least this likely, as a share of the likeliest; 0 keeps all.")]
PresencePenalty = Annotated[float, _in(SAMPLING, "-2 to 2: taken off tokens the answer has already.")]
FrequencyPenalty = Annotated[float, _in(SAMPLING, "-2 to 2: taken off once for each time the answer has the token.")]
RepetitionPenalty = Annotated[float, _in(SAMPLING, "Above 1: less of what prompt and answer have already.")]
Stop = Annotated[
    list[str] | None,
    _in(SAMPLING, r"End before this text; \n is a line break. May be given several times.", metavar="TEXT"),
]
StopTokenId = Annotated[
    list[int] | None, _in(SAMPLING, "End at this token id. May be given several times.", metavar="ID")
]
BadWord = Annotated[
    list[str] | None, _in(SAMPLING, "Never write this word. May be given several times.", metavar="TEXT")
]
IgnoreEos = Annotated[bool, _in(SAMPLING, "Go on after the model's own end, up to --max-tokens.", "--ignore-eos")]
Seed = Annotated[int | None, _in(SAMPLING, "The same seed gives the same text; without one, one is drawn.")]

# The prompt
Chat = Annotated[
    bool | None,
    _in(
        PROMPT,
        "Use the chat template or not; by default where the model has one.",
        "--chat/--raw",
        show_default=False,
    ),
]
Template = Annotated[
    str | None,
    _in(
        PROMPT,
        "llama, vicuna, a Jinja file, or a text with {input_text} in it, instead of the model's own chat template.",
        metavar="NAME",
    ),
]
System = Annotated[str | None, _in(PROMPT, "The system message, before the first question.", metavar="TEXT")]

# Showing
Color = Annotated[
    bool | None,
    _in(SHOWING, "Colours or none; by default on a terminal.", "--color/--no-color", show_default=False),
]
Stats = Annotated[bool, _in(SHOWING, "Say afterwards what it took, on standard error.", "--stats")]
