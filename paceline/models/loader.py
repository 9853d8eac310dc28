"""From whatever the user names to a model, a tokenizer and a config.

A name is an alias, a `.gguf` file, a Hugging Face folder, a hub id, or a transformers model object.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, OptionError, first_line, nearest, not_an_object
from paceline.kernels import select
from paceline.kernels.cpu.library import SOURCES
from paceline.models import catalog, hub
from paceline.models.base import Model
from paceline.models.config import ModelConfig
from paceline.models.dummy import DummySource, DummyWeights
from paceline.models.families import FAMILIES
from paceline.models.folder_tokenizer import find_tokenizer
from paceline.models.gguf import GGUFFile
from paceline.models.gguf_config import config_from_gguf
from paceline.models.json_file import is_folder
from paceline.models.sources import FolderSource, GGUFSource, ModelSource
from paceline.models.tile_cache import find_tiles, keep_tiles
from paceline.models.transformers_config import from_transformers, generation_eos, read_config, read_raw
from paceline.models.weights import Source, Weights

log = logging.getLogger("paceline")

DUMMY = "dummy"
NEEDS_FOLDER = "load_format='dummy' takes a folder with a config.json"
DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
}


@dataclass
class Loaded:
    model: Model
    tokenizer: Any
    config: ModelConfig
    dtype: torch.dtype
    unused: list[str]  # tensors in the file that the model did not need
    kernels: str = "auto"  # those drafters are to take: as asked for, if the target can run on them


@dataclass
class Found:
    """A model that was located but not read yet."""

    config: ModelConfig
    source: Source
    tokenizer: Any
    fallback: Any = None  # fallback_files.FallbackSource: transformers runs it


def find_device(name: str | torch.device) -> torch.device:
    """auto, cpu, cuda (or gpu), cuda:N, or another device PyTorch has registered. Guards give theirs as an object: by
    name there is none without data."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "meta":
        raise OptionError(
            "device='meta' holds no data, so nothing can be computed there; allowed: auto, cpu, cuda, cuda:N"
        )
    if str(name).partition(":")[0] in ("cuda", "gpu") and not torch.cuda.is_available():
        reason = "PyTorch finds no GPU" if torch.version.cuda else "this PyTorch was built without CUDA"
        raise OptionError(f"device={str(name)!r} cannot be used: {reason}; allowed here: auto, cpu")
    try:
        device = torch.device("cuda" if name == "gpu" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ModuleNotFoundError) as error:
        reason = first_line(error)
        told = f" ({reason})" if len(reason) < 60 else ""  # PyTorch lists every device it could have been built for
        raise OptionError(
            f"device={str(name)!r} cannot be used{told}; allowed: auto, cpu, cuda, cuda:N or a device PyTorch has"
        ) from None
    return device


def find_dtype(name: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """auto: the checkpoint's own on an accelerator, float32 on a CPU, where weights of 16 bits stay such."""
    if isinstance(name, torch.dtype):
        name = str(name).removeprefix("torch.")
    if not isinstance(name, str) or name not in DTYPES:
        raise OptionError(f"dtype={name!r} is not known; allowed: {', '.join(DTYPES)}")
    chosen = DTYPES[name]
    if chosen is not None:
        return chosen
    if device.type == "cpu":
        return torch.float32
    return DTYPES.get(config.torch_dtype or "") or torch.bfloat16


def find(
    model: Any, tokenizer: Any = None, impl: str = "auto", trust: bool = False, load_format: str = "auto"
) -> Found:
    """Locate a model and read its config and tokenizer, not its weights.

    impl: whose code runs it: ours (paceline), transformers' (the fallback), or ours where there is some (auto).
    trust: run code that comes with a checkpoint, where no other is known for it.
    load_format: dummy makes random weights from the config, and reads none.
    """
    dummy = load_format == DUMMY
    if not isinstance(model, str | Path):
        if dummy:
            raise OptionError(f"{NEEDS_FOLDER}, {not_an_object(model)}")
        return _find_object(model, tokenizer, impl)
    path = locate(str(model), trust, weights=not dummy)
    if path.suffix == ".gguf":
        if dummy:
            raise OptionError(f"{NEEDS_FOLDER}, not the GGUF file {path}")
        if impl == "transformers":
            raise OptionError("model_impl='transformers' runs Hugging Face folders and objects, not a GGUF file")
        file = GGUFFile(path)
        config = config_from_gguf(file)
        if tokenizer is None:
            from paceline.models.gguf_tokenizer import tokenizer_from_gguf

            tokenizer = tokenizer_from_gguf(file)
            file.forget("tokenizer.")
        return Found(config, GGUFSource(file, config), read_tokenizer(tokenizer))
    raw = read_raw(path)
    tokenizer = path if tokenizer is None else tokenizer
    if _ours(raw.get("model_type"), impl):
        source = DummySource(str(path)) if dummy else FolderSource(path)
        return Found(read_config(path, raw), source, read_tokenizer(tokenizer, trust))
    if dummy:
        raise OptionError(f"load_format='dummy' is for models that paceline runs itself: {', '.join(FAMILIES)}")
    from paceline.models import fallback_files

    fallback = fallback_files.find_folder(path, raw, trust)
    config = fallback_files.read_config(fallback, generation_eos(path))
    return Found(config, FolderSource(path), read_tokenizer(tokenizer, trust), fallback)


def _ours(kind: Any, impl: str) -> bool:
    return impl == "paceline" or (impl == "auto" and isinstance(kind, str) and kind in FAMILIES)


def _find_object(model: Any, tokenizer: Any, impl: str) -> Found:
    if not hasattr(model, "state_dict") or not hasattr(model, "config"):
        raise OptionError(f"model must be a name, a path or a transformers model, {not_an_object(model)}")
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if _ours(getattr(model.config, "model_type", None), impl):
        return Found(from_transformers(model.config, eos), ModelSource(model), read_tokenizer(tokenizer))
    from paceline.models import fallback_files

    fallback = fallback_files.find_object(model)
    return Found(fallback_files.read_config(fallback, eos), ModelSource(model), read_tokenizer(tokenizer), fallback)


def locate(name: str, code: bool = False, weights: bool = True) -> Path:
    """An alias is fetched, a path taken as it is; a hub id, OWNER/NAME or an old NAME alone, is asked of the hub.

    code: with the code that comes with it; weights: with those.
    """
    if name in catalog.ALIASES:
        return catalog.ensure(catalog.ALIASES[name])
    path = Path(os.path.expanduser(name))  # which leaves the ~ of nobody as it is
    if is_folder(path) or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise CheckpointError(f"{name} is neither a model folder nor a .gguf file")
    aliases = ", ".join(catalog.ALIASES)
    missing = f"model {name!r} was not found: no such path, and not an alias ({aliases})"
    near = None if "/" in name else nearest(name, catalog.ALIASES)
    if near or path.suffix == ".gguf" or not hub.ID.fullmatch(name):
        hint = f"; did you mean {near!r}?" if near else ""
        raise CheckpointError(f"{missing} or a hub id{hint}")
    try:
        wanted = hub.EVERYTHING if weights else hub.TOKENIZER
        return hub.download(name, (*wanted, "*.py") if code else wanted)
    except CheckpointError as error:
        raise error if "/" in name else CheckpointError(f"{missing}; {error}") from None


def read_tokenizer(given: Any, trust: bool = False) -> Any:
    """A path or an alias becomes a tokenizer; an object is taken as it is; None stays None (token ids in and out)."""
    if given is None or not isinstance(given, str | Path):
        if isinstance(given, int | float | list | tuple | dict | type):
            raise OptionError(f"tokenizer must be a name, a path or a tokenizer, {not_an_object(given)}")
        return given
    folder = Path(catalog.resolve(str(given)) or given)
    if folder.suffix == ".gguf" and folder.is_file():
        from paceline.models.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(GGUFFile(folder))
    if is_folder(folder) and not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    if (found := find_tokenizer(folder)) is not None:
        return found
    if not folder.exists():
        given = folder = hub.download(str(given), hub.TOKENIZER)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(given, trust_remote_code=trust)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"the tokenizer in {given} comes with code of its own; such code is run only with "
                "trust_remote_code=True (--trust-remote-code)"
            ) from None
        raise CheckpointError(f"the tokenizer in {given} cannot be read: {first_line(error)}") from None


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def build(
    found: Found,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str,
    max_position: int,
    quantization: str | None = None,
    drafts: bool = False,
) -> Loaded:
    """Read the weights and make the model. `Loaded.dtype` is the arithmetic's: float32 on the native kernels.

    drafts: it is a drafter's, which more kernels pack.
    """
    config, asked = found.config, dtype
    if found.fallback is not None:
        return _build_fallback(found, dtype, device, kernels, quantization)
    ops = select(kernels, device, dtype, quantization, drafts)
    if ops.name == "native":
        dtype = torch.float32
    tiles = find_tiles(ops, found.source, dtype)
    kind = DummyWeights if isinstance(found.source, DummySource) else Weights
    weights = kind(found.source, ops, dtype, device, tiles)
    model = FAMILIES[config.architecture].build(config, ops, weights, max_position)
    if tiles is not None:
        keep_tiles(tiles)
    unused = weights.unused()
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        log.warning("%s holds tensors this model does not use: %s", weights.source.label, shown)
    for told in _dtype_notices(weights, None if dtype == asked else asked, quantization):
        log.warning("%s", told)
    _hand_back_memory()
    return Loaded(model, found.tokenizer, config, dtype, unused, kernels)


def _build_fallback(
    found: Found, dtype: torch.dtype, device: torch.device, kernels: str, quantization: str | None
) -> Loaded:
    """By transformers."""
    from paceline.models import fallback_files

    model = fallback_files.build(found.fallback, found.config, dtype, device, kernels, quantization)
    _hand_back_memory()
    return Loaded(model, found.tokenizer, model.config, dtype, [], model.ops.name)


def _dtype_notices(weights: Weights, asked: torch.dtype | None, quantization: str | None) -> Iterator[str]:
    """What became of a dtype that is not the arithmetic's, and of packing what is packed already."""
    blocks, floats = ", ".join(sorted(weights.kinds & set(SOURCES))), bool(weights.kinds - set(SOURCES))
    if blocks and quantization is not None and weights.ops.name == "native":
        rest = "packs only its float matrices" if floats else "changes nothing"
        yield f"{weights.source.label} is packed already ({blocks}): quantization={quantization!r} {rest}"
    if asked is not None:
        name = str(asked).removeprefix("torch.")
        kept = f"kept in {name}" if quantization is None else f"packed ({quantization})"
        told = f"float matrices are {kept}, " * floats
        told += f"matrices packed in the file ({blocks}) stay packed, " * bool(blocks)
        yield f"dtype={name} on a CPU: {told}and arithmetic is in float32"


def _hand_back_memory() -> None:
    """Reading tokenizer and weights frees tens of megabytes that glibc would keep for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
