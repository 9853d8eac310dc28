"""Dependent launches under Triton's interpreter: who reads what a kernel that may still be running writes?

On a GPU a kernel starts when all programs of the one before have let it, and until it waits nothing is promised of what
that one, and those it did not wait for itself, write (`kernels/triton/device.py`). The interpreter runs one program
after another, so nothing goes wrong there; here it notes who reads and writes where, before or after waiting.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Launch:
    """A kernel's run."""

    name: str
    waits: bool = False  # some program does; the next kernel waits for all of them, and so for what that one waited for
    waits_first: bool = False  # and it does not let the next kernel start before
    too_early: dict[str, set[int]] = field(default_factory=dict)  # what programs did before they waited, and where


class Dependence(TorchDispatchMode):
    """Notes all launches, in order. Inside, no tensor is freed: an address is one tensor's.

    shuffled: programs of a kernel run in an order of their own.
    """

    def __init__(self, patch: pytest.MonkeyPatch, shuffled: random.Random | None = None) -> None:
        super().__init__()
        import triton.language as tl
        from triton._C.libtriton import ir
        from triton.runtime import interpreter

        from paceline.kernels.triton import noise, product, seeing

        self.launches: list[Launch] = []
        self.faults: list[str] = []
        self._kept: list[Any] = []
        self._writer: dict[int, int] = {}  # by address the number of the launch that wrote there last
        self._running = self._waited = self._let = False
        self._shuffled = shuffled
        self._coherent = ir.CACHE_MODIFIER.CG
        for module in [module for name, module in sys.modules.items() if name.startswith("paceline.kernels.triton")]:
            if hasattr(module, "PDL"):
                patch.setattr(module, "PDL", True)
        for module in (noise, product, seeing):
            patch.setattr(module, "prefetch", lambda pointers: None)  # into a cache that all share
        patch.setattr(tl.extra.cuda, "gdc_wait", self._wait)
        patch.setattr(tl.extra.cuda, "gdc_launch_dependents", self._let_start)

        builder = interpreter.InterpreterBuilder
        run, load, store, rmw = (
            interpreter.GridExecutor.__call__,
            builder.create_masked_load,
            builder.create_masked_store,
            builder.create_atomic_rmw,
        )
        place: Any = builder.set_grid_idx

        def running(executor: Any, *args: Any, **given: Any) -> None:
            self._begin(executor.fn.__name__)
            run(executor, *args, **given)
            if self._running:
                self._end_program()
                self._end()
            else:  # nothing is launched
                self.launches.pop()

        def placing(this: Any, *index: int) -> None:
            if self._running:
                self._end_program()
            place(this, *self._place_of(index, this.grid_dim))
            self._running, self._waited, self._let = True, False, False

        def loading(this: Any, ptrs: Any, mask: Any, other: Any, cache: Any = None, *rest: Any, **more: Any) -> Any:
            cache = more.pop("cache_modifier", cache)  # boxes give it by name
            self._read(ptrs.data[mask_of(ptrs, mask)], cache)
            return load(this, ptrs, mask, other, cache, *rest, *more.values())

        def storing(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._write(ptrs.data[mask_of(ptrs, mask)])
            return store(this, ptrs, value, mask, *rest)

        def changing(this: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._write(ptr.data[mask_of(ptr, mask)])
            return rmw(this, op, ptr, value, mask, *rest)

        patches: dict[str, Callable[..., Any]] = {
            "set_grid_idx": placing,
            "create_masked_load": loading,
            "create_masked_store": storing,
            "create_atomic_rmw": changing,
        }
        for name, noting in patches.items():
            patch.setattr(builder, name, noting)
        patch.setattr(interpreter.GridExecutor, "__call__", running)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        parts = made if isinstance(made, tuple | list) else [made]
        self._kept += [part for part in parts if isinstance(part, Tensor)]
        return made

    def _begin(self, name: str) -> None:
        self.launches.append(Launch(name))
        self._wrote: set[int] = set()
        self._places: list[int] = []
        self._running, self._waited = False, True  # no program runs yet

    def _place_of(self, index: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
        if self._shuffled is None:
            return index
        if not self._places:
            self._places = list(range(int(np.prod(grid))))
            self._shuffled.shuffle(self._places)
        return tuple(int(part) for part in np.unravel_index(self._places[np.ravel_multi_index(index, grid)], grid))

    def _end_program(self) -> None:
        """That lets the next kernel start, too, as far as this program goes."""
        launch = self.launches[-1]
        launch.waits |= self._waited
        launch.waits_first |= self._waited and not self._let

    def _end(self) -> None:
        number, launch = len(self.launches) - 1, self.launches[-1]
        self._running, self._waited = False, True
        if not launch.waits:
            self.faults.append(f"{launch.name}: no program waits")
        # The last kernel before this one that waited before it let anybody start: all in front of it are done.
        done = next((n for n in reversed(range(number)) if self.launches[n].waits_first), 0)
        for how, addresses in launch.too_early.items():
            writers = {self._writer.get(address, -1) for address in addresses}
            if how == "reads":
                late = sorted({self.launches[n].name for n in writers if n >= done})
                self.faults += [f"{launch.name} reads what {name} may still write" for name in late]
            elif how == "reads from its own cache":
                stale = sorted({self.launches[n].name for n in writers if n >= 0})
                self.faults += [f"{launch.name} {how} what {name} wrote" for name in stale]
            else:
                self.faults.append(f"{launch.name} {how} before it waits")
        self._writer.update(dict.fromkeys(self._wrote, number))

    def _read(self, addresses: Any, cache: Any) -> None:
        if not self._waited:
            found = addresses.ravel().tolist()
            self._note("reads", found)
            if cache != self._coherent:
                self._note("reads from its own cache", found)

    def _write(self, addresses: Any) -> None:
        found = addresses.ravel().tolist()
        if not self._waited:
            self._note("writes", found)
        self._wrote.update(found)

    def _note(self, how: str, addresses: list[int]) -> None:
        if addresses:
            self.launches[-1].too_early.setdefault(how, set()).update(addresses)

    def _wait(self) -> None:
        self._waited = True

    def _let_start(self) -> None:
        self._let |= not self._waited


def mask_of(pointers: Any, mask: Any) -> Any:
    given = mask if isinstance(mask, np.ndarray) else mask.data
    return np.broadcast_to(given.astype(bool), pointers.data.shape)
