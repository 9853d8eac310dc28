"""Other programs that decode the same model: what each is asked, and which of them are here.

A peer is asked for the likeliest tokens, one prompt at a time. Knows how each is loaded and called. Must not know how
anything is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import first_line
from paceline.params import SamplingParams
from paceline.sampling.processors import kind_of

LOOKUP = 10  # tokens of a prompt lookup, as the libraries' own examples have it


@dataclass(frozen=True)
class Peer:
    """answer(ids, most, ends): the tokens it says, at most so many, an end among them if it came."""

    name: str
    answer: Callable[[list[int], int, list[int]], list[int]]


@dataclass(frozen=True)
class Asked:
    """What peers load: the target's file or folder, a draft model's, and how long a text may be."""

    target: Path
    draft: Path | None
    max_model_len: int
    device: Any
    threads: int


class Peers:
    """Those of a measurement, loaded once; `absent` says which were not measured, and why."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._found: list[Peer] | None = None
        self.absent: dict[str, str] = {}

    def can_do(self, params: SamplingParams, batch_size: int) -> bool:
        """Whether they can be asked for the same as our own engine."""
        if not self._wanted:
            return False
        same = params.greedy and kind_of(params).tempered and not (params.stop_strings or params.stop_token_ids)
        if batch_size == 1 and same:
            return True
        why = "they are asked for the likeliest tokens, one prompt at a time; other settings were measured without them"
        self.absent["transformers and llama.cpp"] = why
        return False

    def find(self, asked: Asked) -> list[Peer]:
        if self._found is None:
            self._found, absent = find_peers(asked)
            self.absent |= absent
        return self._found


def find_peers(asked: Asked) -> tuple[list[Peer], dict[str, str]]:
    """Those that are installed and can read the model; of the others, why not."""
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for name, load in (("transformers", _transformers), ("llama.cpp", _llama_cpp)):
        try:
            found += load(asked)
        except ImportError as error:
            absent[name] = f"{error.name or name} is not installed"
        except Exception as error:  # whatever another library objects to
            absent[name] = f"it could not load the model: {first_line(error)}"
    return found, absent


def _transformers(asked: Asked) -> Iterator[Peer]:
    """generate: plain, with prompt lookup, and assisted by the draft model where there is one."""
    import torch
    import transformers

    target = _load_transformers(asked.target, asked.device)
    ways: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers, prompt lookup": {"prompt_lookup_num_tokens": LOOKUP},
    }
    if asked.draft is not None:
        ways["transformers, assisted"] = {"assistant_model": _load_transformers(asked.draft, asked.device)}

    def answer(extra: dict[str, Any]) -> Callable[[list[int], int, list[int]], list[int]]:
        def asking(ids: list[int], most: int, ends: list[int]) -> list[int]:
            for model in (target, *([extra["assistant_model"]] if "assistant_model" in extra else [])):
                model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends or None, 0
            given = torch.tensor([ids], device=asked.device)
            with torch.inference_mode(), _quiet(transformers):
                out = target.generate(
                    given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=most, **extra
                )
            return [int(token) for token in out[0, len(ids) :]]

        return asking

    for name, extra in ways.items():
        yield Peer(name, answer(extra))


def _load_transformers(path: Path, device: Any) -> Any:
    import torch
    import transformers

    with _quiet(transformers):
        where = {"gguf_file": path.name} if path.is_file() else {}
        dtype = torch.float32 if torch.device(device).type == "cpu" else "auto"
        kind: Any = transformers.AutoModelForCausalLM
        folder = path.parent if path.is_file() else path
        model = kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, **where)
    model = model.eval().to(device)
    config = model.generation_config
    config.temperature = config.top_p = config.top_k = None
    return model


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Its bars and remarks would stand among ours."""
    log = transformers.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)


def _llama_cpp(asked: Asked) -> Iterator[Peer]:
    """llama-cpp-python: plain, and with its prompt lookup."""
    import llama_cpp

    if asked.target.suffix != ".gguf":
        raise ValueError(f"it reads .gguf files, not {asked.target.name}")
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    given = {"n_ctx": asked.max_model_len, "n_threads": asked.threads, "n_threads_batch": asked.threads}
    ways = {
        "llama.cpp": {},
        "llama.cpp, prompt lookup": {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP)},
    }
    for name, extra in ways.items():
        model = llama_cpp.Llama(str(asked.target), verbose=False, **given, **extra)
        yield Peer(name, _asking_llama(model))


def _asking_llama(model: Any) -> Callable[[list[int], int, list[int]], list[int]]:
    def asking(ids: list[int], most: int, ends: list[int]) -> list[int]:
        model.reset()  # nothing of an earlier answer is taken over
        said: list[int] = []
        for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0, reset=True):
            said.append(int(token))
            if len(said) >= most or said[-1] in ends:
                break
        return said

    return asking
