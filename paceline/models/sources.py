"""Tensor files under one face: safetensors, `.bin` (tensors-only unpickler), a loaded transformers model, GGUF."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CheckpointError, first_line
from paceline.kernels.ops import Packed
from paceline.models.config import ModelConfig
from paceline.models.families import FAMILIES
from paceline.models.fp8 import Block, Scales, find_block
from paceline.models.gguf import GGUFFile, GGUFTensor
from paceline.models.json_file import read_object
from paceline.models.quantised import refuse_names

# Not quantised: answered as tensors.
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}

# Tensors that files carry and nobody needs: rotary tables and causal masks.
IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias)$")


class FolderSource:
    """A Hugging Face folder: one file or shards, safetensors before `.bin`; `others` are files to look for first."""

    def __init__(self, folder: Path, others: tuple[str, ...] = ()) -> None:
        self.label = str(folder)
        self._files: dict[str, Path] = {}  # tensor name → file
        self._open: dict[Path, Any] = {}
        self.files = _weight_files(folder, others)
        for path in self.files:
            for name in self._handle(path).keys():  # noqa: SIM118 - a safetensors handle is not a dict
                if not IGNORED.search(name):
                    self._files[name] = path
        self._scales = Scales(self._files, _block_of(folder), self.label)
        self._names = self._files.keys() - self._scales.names
        refuse_names(self._names, self.label)

    def names(self) -> Collection[str]:
        return self._names

    def kind(self, name: str) -> str:
        return "float"

    def release(self) -> None:
        """The files' readers keep nothing that was read."""

    def read(self, name: str) -> Tensor:
        return self._scales.scaled(name, self._read)

    def stored(self, prefix: str) -> dict[str, Tensor]:
        """Everything under a prefix as it lies in the files, scales too."""
        return {name: self._read(name) for name in sorted(self._files) if name.startswith(prefix)}

    def _read(self, name: str) -> Tensor:
        path = self._files[name]
        handle = self._handle(path)
        try:
            tensor: Tensor = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {first_line(error)}") from None
        return tensor

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open_weights(path)
        return self._open[path]


def _block_of(folder: Path) -> Block | None:
    """What its config says of matrices in 8-bit blocks; a drafter's folder may have no config."""
    config = folder / "config.json"
    return find_block(read_object(config).get("quantization_config")) if config.is_file() else None


def _open_weights(path: Path) -> Any:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is named in the index but does not exist")
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            return safe_open(path, framework="pt")
        new = zipfile.is_zipfile(path)  # only files since PyTorch 1.6 can be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=new)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as tensors: {first_line(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds something other than a plain dictionary of tensors")
    return state


def _weight_files(folder: Path, others: tuple[str, ...] = ()) -> list[Path]:
    for name in others:
        if (folder / name).is_file():
            return [folder / name]
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _shards(folder, index)
    raise CheckpointError(
        f"{folder} has no weights: neither model.safetensors nor pytorch_model.bin, nor an index of them"
    )


def _shards(folder: Path, index: str) -> list[Path]:
    """The files an index names: each inside the folder, whatever system the index was written on."""
    where = folder / index
    named = read_object(where).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(shard, str) for shard in named.values()):
        raise CheckpointError(f"{where} is not a weight index: weight_map must give a file name for each tensor")
    shards = sorted(set(named.values()))
    for shard in shards:
        posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
        if posix.is_absolute() or windows.anchor or ".." in (*posix.parts, *windows.parts):
            raise CheckpointError(f"{where} names the shard {shard!r}; allowed: files inside the folder")
    return [folder / shard for shard in shards]


class ModelSource:
    """A transformers model that is already in memory."""

    def __init__(self, model: Any) -> None:
        self.label = f"the {type(model).__name__} object"
        self.files: list[Path] = []
        self._state = {name: t for name, t in model.state_dict().items() if not IGNORED.search(name)}
        block = find_block(getattr(model.config, "quantization_config", None))
        self._scales = Scales(self._state, block, self.label)
        self._names = self._state.keys() - self._scales.names

    def names(self) -> Collection[str]:
        return self._names

    def kind(self, name: str) -> str:
        return "float"

    def release(self) -> None:
        """The weights are the user's."""

    def read(self, name: str) -> Tensor:
        return self._scales.scaled(name, lambda name: self._state[name].detach())


class GGUFSource:
    """A GGUF file, its tensors renamed and its q and k rows put back into half-split order."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.label, self.files = file.path, [Path(file.path)]
        names = FAMILIES[config.architecture].gguf
        assert names is not None, "the config was read from a GGUF file"
        self._heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if names.interleaved else {}
        self._tensors = {names.hugging_face(name): tensor for name, tensor in file.tensors.items()}
        self._file = file

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def release(self) -> None:
        self._file.release()

    def kind(self, name: str) -> str:
        tensor = self._tensors[name]
        return tensor.kind if _is_packed(tensor) else "float"

    def read(self, name: str) -> Tensor | Packed:
        tensor = self._tensors[name]
        heads = self._heads.get(tensor.name.split(".")[-2], 0) if "." in tensor.name else 0
        if heads and tensor.shape and tensor.shape[0] % (2 * heads) == 0:  # another count is refused for its shape
            tensor = tensor.rows(half_split_order(tensor.shape[0], heads).numpy())
        if _is_packed(tensor):
            packed: Packed = tensor
            return packed
        return tensor.dequantize(PLAIN.get(tensor.kind, torch.float32))


def _is_packed(tensor: GGUFTensor) -> bool:
    """Matrices and stacks of them; vectors are few and unpacked."""
    return len(tensor.shape) in (2, 3) and tensor.kind not in PLAIN


def half_split_order(rows: int, heads: int) -> Tensor:
    """Where each row of a half-split q or k stands in the interleaved order of llama GGUF files."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
