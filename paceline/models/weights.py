"""Reading named tensors: every one a model needs is found and has the right shape, every one left over is reported.

A `Source` answers names in Hugging Face spelling, whatever the file; `Weights` is a view of it under a prefix. Matrices
go to the kernels, which keep them as they like: a file's quantised blocks are handed over untouched. Everything else
becomes a tensor of the model's dtype.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.kernels import Ops
from paceline.kernels.ops import Packed, Weight
from paceline.models.quantised import refuse_dtype

if TYPE_CHECKING:
    from paceline.kernels.cpu.tiles import Tiles

log = logging.getLogger("paceline")

Shape = tuple[int, ...]
ROWS = 1024  # compared at a time: what differs mostly does so at once


class Source(Protocol):
    """Where tensors come from. A matrix that a file keeps in quantised blocks is answered as it is."""

    label: str  # the file or folder, for error messages
    files: list[Path]  # what the tensors are read from; none: they are in memory

    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor | Packed: ...

    def kind(self, name: str) -> str:
        """Of the blocks a matrix is kept in; "float" if it is in none."""
        ...

    def release(self) -> None:
        """What was read has been packed: a mapped file need not stay in memory beside it."""
        ...


class Weights:
    """tiles: matrices that were packed before, which need not even be read."""

    def __init__(
        self, source: Source, ops: Ops, dtype: torch.dtype, device: torch.device, tiles: Tiles | None = None
    ) -> None:
        self.source, self.ops, self.dtype, self.device, self.tiles = source, ops, dtype, device, tiles
        self.prefix = ""
        self.used: set[str] = set()
        self.kinds: set[str] = set()  # of the matrices' blocks; "float" for those in none

    def under(self, prefix: str) -> Weights:
        view = copy.copy(self)  # what is used and of which kind is noted in one place
        view.prefix += prefix
        return view

    def has(self, name: str) -> bool:
        return self.prefix + name in self.source.names()

    def any_under(self, prefix: str) -> bool:
        return any(name.startswith(self.prefix + prefix) for name in self.source.names())

    def unused(self) -> list[str]:
        return sorted(set(self.source.names()) - self.used)

    def whole(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        return self._dense(name, shape).to(self.device, dtype or self.dtype).contiguous()

    def vectors(self, names: list[str], shapes: list[Shape]) -> Tensor:
        """Several vectors, joined."""
        return torch.cat([self.whole(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def matrix(self, names: list[str], shapes: list[Shape], exact: bool = False, picked: bool = False) -> Weight:
        """Several matrices, stacked into one weight; exact: in float32 and as it is, whatever others are packed to.

        picked: some of its rows are taken, or it is no one matrix but many: more than a linear product.
        """
        shape = sum(shape[0] for shape in shapes), shapes[0][1]
        parts = list(zip(names, shapes, strict=True))
        return self._kept(names, shape, lambda: [self._read(*part) for part in parts], exact, picked)

    def experts(self, count: int, names: list[str], shape: Shape, fused: str) -> Weight:
        """The matrices of so many experts, each `names` of one shape, one expert under another, as the file has them:

        `{expert}.{name}.weight` each; stacks `{name}.weight` of all experts' (GGUF); or one stack, `fused`.
        """
        rows, columns = shape
        if self.has(fused):
            stacks = {fused: (count, len(names) * rows, columns)}
        else:
            stacks = {f"{name}.weight": (count, rows, columns) for name in names}
            if not self.has(next(iter(stacks))):
                each = [f"{expert}.{name}.weight" for expert in range(count) for name in names]
                return self.matrix(each, [shape] * len(each), picked=True)

        def read() -> list[Tensor | Packed]:
            found = [self._read(name, whole) for name, whole in stacks.items()]
            return [stack[e] if isinstance(stack, Tensor) else stack.part(e) for e in range(count) for stack in found]

        return self._kept(list(stacks), (count * len(names) * rows, columns), read, picked=True)

    def transposed(self, name: str, shape: Shape) -> Weight:
        """A matrix stored [in, out]; `shape` is [out, in]."""
        return self._kept([name], (shape[0], shape[1]), lambda: [self._dense(name, shape[::-1]).t()])

    def derived(
        self,
        name: str,
        shape: Shape,
        into: tuple[int, int],
        use: str,
        make: Callable[[Tensor], Sequence[Tensor]],
        picked: bool = False,
    ) -> Weight:
        """A weight [out, in] of matrices made from one of a file. use: tells what is made of the same one apart."""
        return self._kept([name], into, lambda: list(make(self._dense(name, shape))), picked=picked, use=use)

    def leave_out(self, prefix: str) -> int:
        """Tensors under a prefix are another's business, hence none that nobody uses; how many there are."""
        found = [name for name in self.source.names() if name.startswith(self.prefix + prefix)]
        self.used.update(found)
        return len(found)

    def leave_out_modules(self, first: int) -> None:
        """Layers from that number on are modules that predict further tokens: a drafter's, not the target's."""
        number = first
        while self.leave_out(f"layers.{number}."):
            number += 1
        if number > first:
            log.info("%s holds %d modules for further tokens, which are left out", self.source.label, number - first)

    def vocabulary(self, embedding: str, head: str, shape: Shape, tied: bool) -> tuple[Weight, Weight]:
        """The embedding and the vocabulary head; when tied, one weight for both.

        As transformers does it: of tied ones either will do alone, and a file that holds two that differ is believed.
        """
        if not tied:
            return self.matrix([embedding], [shape], picked=True), self.matrix([head], [shape])
        names = [name for name in (embedding, head) if self.has(name)] or [embedding]
        if len(names) == 1:
            one = self.matrix(names, [shape], picked=True)
            return one, one
        found = [self._read(name, shape) for name in names]
        first = self._pack(found[:1], picked=True)
        if self._same(*found):
            return first, first
        log.warning("%s ties %s to %s, but holds two that differ: both are used", self.source.label, head, embedding)
        return first, self._pack(found[1:])

    def is_copy(self, name: str, other: Weight, ops: Ops) -> bool:
        """Whether a matrix is another weight over again, as the kernels that hold that one pack it and read it back."""
        if self.device.type == "meta":
            return False  # it has no values to compare
        found = self._read(name, other.shape)
        dense = found if isinstance(found, Tensor) else found.dequantize()
        for first in range(0, len(dense), ROWS):
            part = ops.pack([dense[first : first + ROWS]], self.dtype, self.device)
            ids = torch.arange(part.shape[0], device=self.device)
            if not torch.equal(ops.embed(part, ids), ops.embed(other, first + ids)):
                return False
        return True

    def _same(self, one: Tensor | Packed, other: Tensor | Packed) -> bool:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        if one.dtype != other.dtype:
            one, other = one.to(self.dtype), other.to(self.dtype)
        return torch.equal(one, other.to(one.device))

    def _kept(
        self,
        names: list[str],
        shape: tuple[int, int],
        read: Callable[[], list[Tensor | Packed]],
        exact: bool = False,
        picked: bool = False,
        use: str = "",
    ) -> Weight:
        """A weight that was kept as it was packed, else what is read now."""
        full = [self.prefix + name for name in names]
        key = " ".join([*full, use] if use else full)
        found = None if self.tiles is None else self.tiles.find(key, shape)
        if found is not None:
            self.used.update(full)
            self.kinds.update(() if exact else map(self.source.kind, full))
            return found
        packed = self._pack(read(), exact, picked)
        if self.tiles is not None:
            self.tiles.add(key, packed)
        return packed

    def _pack(self, parts: list[Tensor | Packed], exact: bool = False, picked: bool = False) -> Weight:
        kinds = ("float" if isinstance(part, Tensor) else part.kind for part in parts)
        self.kinds.update(() if exact else kinds)
        packed = self.ops.pack(parts, torch.float32 if exact else self.dtype, self.device, exact, picked)
        self.source.release()
        return packed

    def _dense(self, name: str, shape: Shape) -> Tensor:
        found = self._read(name, shape)
        return found if isinstance(found, Tensor) else found.dequantize()

    def _read(self, name: str, shape: Shape) -> Tensor | Packed:
        full = self.prefix + name
        if full not in self.source.names():
            raise CheckpointError(f"{self.source.label} lacks the tensor {full}, which this model needs")
        self.used.add(full)
        found = self.source.read(full)
        if isinstance(found, Tensor):
            refuse_dtype(full, found.dtype, self.source.label)
        if tuple(found.shape) != shape:
            raise CheckpointError(
                f"{self.source.label}: tensor {full} has shape {list(found.shape)}, but the config "
                f"makes it {list(shape)}"
            )
        return found
