"""A published drafter's folder: its config as it was written, and its tensors under one spelling.

Sizes are read from tensors, since configs of drafters are often wrong or incomplete. Every tensor a network needs has
to be there in the right shape, and one that nobody asked for is refused: lenient loading is how a wrong drafter becomes
one that never guesses right. Knows files and names; must not know any format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.base import Target
from paceline.errors import CheckpointError, OptionError, PacelineError, not_an_object
from paceline.kernels import Ops, select
from paceline.kernels.ops import Packed, Weight
from paceline.kernels.quantise import INT8, METHODS
from paceline.models import loader
from paceline.models.json_file import read_object
from paceline.models.sources import FolderSource
from paceline.models.weights import Source, Weights
from paceline.params import check_count

FLOATS = "none"  # the packing that packs nothing


class Renamed:
    """A source under other names: `strip` is cut off the front of each, as often as it is there."""

    def __init__(self, source: Source, strip: str = "", only: str = "") -> None:
        """only: names that do not begin so are not there at all."""
        self.label, self.files, self._source = source.label, source.files, source
        self._names: dict[str, str] = {}
        for name in source.names():
            if re.match(only, name):
                short = re.sub(rf"^(?:{strip})+", "", name) if strip else name
                if short in self._names:
                    raise CheckpointError(f"{self.label} holds {short} twice: as {self._names[short]} and as {name}")
                self._names[short] = name

    def names(self) -> Collection[str]:
        return self._names.keys()

    def read(self, name: str) -> Tensor | Packed:
        return self._source.read(self._names[name])

    def kind(self, name: str) -> str:
        return self._source.kind(self._names[name])

    def release(self) -> None:
        self._source.release()


class Checkpoint:
    """A drafter's files. `files`: names of weight files that its format has beside the usual ones.

    make: of a config and its folder's name, tensors that stand for the files'.
    """

    def __init__(
        self,
        model: str | Path,
        files: tuple[str, ...] = (),
        strip: str = "",
        only: str = "",
        make: Callable[[dict[str, Any], str], Source] | None = None,
    ) -> None:
        if not isinstance(model, str | Path):
            raise OptionError(f"model must be a folder's path or a hub id, {not_an_object(model)}")
        self.path = loader.locate(str(model), weights=make is None)
        self.label = str(self.path)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.label} is no folder; a drafter of this kind is a folder with a config.json")
        where = self.path / "config.json"
        self.config: dict[str, Any] = read_object(where) if where.is_file() else {}
        made = FolderSource(self.path, files) if make is None else make(self.config, self.label)
        self.source = Renamed(made, strip, only)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around what makes sense of a config: a value of the wrong kind is told in a sentence."""
        try:
            yield
        except PacelineError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.label}: its config has a value that cannot be used: {error}") from None

    def names(self, pattern: str) -> list[str]:
        """The tensors whose names a pattern matches whole, sorted."""
        return sorted(name for name in self.source.names() if re.fullmatch(pattern, name))

    def has(self, name: str) -> bool:
        return name in self.source.names()

    def matrix(self, name: str) -> tuple[int, int]:
        """A matrix's rows and columns; it has to be there, and to hold something."""
        rows, columns = self._shape(name, 2, "a matrix")
        return rows, columns

    def vector(self, name: str) -> int:
        """The same of a vector."""
        return self._shape(name, 1, "a vector")[0]

    def _shape(self, name: str, dimensions: int, called: str) -> tuple[int, ...]:
        shape = tuple(self._read(name).shape)
        if len(shape) != dimensions or 0 in shape:
            raise CheckpointError(f"{self.label}: tensor {name} has shape {list(shape)}, but must be {called}")
        return shape

    def tensor(self, name: str) -> Tensor:
        """A tensor as it stands in the file, for what is no weight (maps, masks)."""
        found = self._read(name)
        return found if isinstance(found, Tensor) else found.dequantize()

    def _read(self, name: str) -> Tensor | Packed:
        if not self.has(name):
            raise CheckpointError(f"{self.label} lacks the tensor {name}, which this drafter needs")
        return self.source.read(name)

    def token_ids(self, name: str, size: int, targets: int) -> Tensor:
        """[size] the target's id of each row of a head that knows some tokens, each row another.

        d2t says how much is added to a row's own number, so that ids rise; t2d, where there is one, which they are.
        """
        ids = self.tensor(name).to(torch.int64).flatten()
        if name == "d2t":
            ids = ids + torch.arange(len(ids), device=ids.device)
        fits = len(set(ids.tolist())) == len(ids) == size and 0 <= int(ids.min()) <= int(ids.max()) < targets
        if fits and name == "d2t":
            fits = torch.equal(ids, ids.sort().values)
        if fits and name == "d2t" and self.has("t2d"):
            told = self.tensor("t2d").flatten().bool()
            self.check("a vocabulary of", len(told), targets)
            unfilled = size == targets and not told.any()  # all tokens: some files leave the maps at zero
            fits = unfilled or torch.equal(ids, told.nonzero()[:, 0])
        if not fits:
            wanted = f"each of the head's {size} rows another token of the target's {targets}"
            raise CheckpointError(f"{self.label}: {name} does not give {wanted}")
        return ids

    def check(self, what: str, own: int, targets: int) -> None:
        """Refuse a drafter that was made for another target."""
        if own != targets:
            raise CheckpointError(f"{self.label} was made for a target with {what} {own}, but this one has {targets}")

    def weights(self, target: Target, quantization: str) -> Weights:
        """To read a network's weights with, for the target's kernels."""
        ops = select(target.kernels, target.device, target.dtype, packing(quantization, target), drafts=True)
        return Weights(self.source, ops, target.dtype, target.device)

    def finish(self, weights: Weights, ignored: str = "") -> None:
        """Every tensor was used; `ignored` is a pattern of those that need not be."""
        unused = [name for name in weights.unused() if not (ignored and re.fullmatch(ignored, name))]
        if unused:
            shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
            raise CheckpointError(f"{self.label} holds tensors that no drafter of this kind has: {shown}")


def own_or_borrowed(
    weights: Weights, name: str, shape: tuple[int, int], borrowed: Weight, ops: Ops, picked: bool = False
) -> Weight:
    """A matrix of the checkpoint's own, where it has one that is no copy of the target's; else the target's.

    ops: the target's kernels. picked: as `Weights.matrix` knows it.
    """
    if weights.has(name) and not (shape == borrowed.shape and weights.is_copy(name, borrowed, ops)):
        return weights.matrix([name], [shape], picked=picked)
    if borrowed.shape[1] != shape[1]:
        raise CheckpointError(
            f"{weights.source.label} has a hidden size of {shape[1]} and no {name} of its own, but the target's is "
            f"{borrowed.shape[1]} wide"
        )
    return borrowed


def is_dummy(load_format: str | None, target: Target) -> bool:
    """Whether a drafter's weights are to be random: what its own option says, else what the engine's does."""
    return (target.load_format if load_format is None else load_format) == loader.DUMMY


def check_load_format(load_format: Any) -> None:
    if load_format not in (None, "auto", loader.DUMMY):
        raise OptionError(f"load_format={load_format!r} is not known; allowed: auto, {loader.DUMMY}")


def check_packing(quantization: Any) -> None:
    """How a drafter's float weights are packed at load. Acceptance is exact, so this changes nothing but speed."""
    if not isinstance(quantization, str) or quantization not in (*METHODS, FLOATS):
        raise OptionError(f"quantization={quantization!r} is not known; allowed: {', '.join(METHODS)}, {FLOATS}")


def check_options(num_draft_tokens: Any, quantization: str) -> None:
    """Of a drafter whose checkpoint says how long its drafts are, unless a user does."""
    if num_draft_tokens is not None:
        check_count("num_draft_tokens", num_draft_tokens, 1)
    check_packing(quantization)


def chain_length(asked: int | None, most: int, label: str) -> int:
    """As long as asked for, or as the checkpoint can; more is refused."""
    if asked is not None and asked > most:
        raise OptionError(f"num_draft_tokens={asked} is too many: {label} drafts {most} at most")
    return asked or most


def packing(quantization: str, target: Target) -> str | None:
    """The same as kernels are told it: the native ones pack, Triton's to int8 alone, others nothing."""
    kernels = target.model.ops.name
    packs = kernels == "native" or (kernels == "triton" and METHODS.get(quantization) == INT8)
    return quantization if packs and quantization != FLOATS else None


__all__ = [
    "Checkpoint",
    "Renamed",
    "chain_length",
    "check_load_format",
    "check_options",
    "check_packing",
    "is_dummy",
    "own_or_borrowed",
    "packing",
]
