"""What a CUDA graph would refuse, or would replay with old data, found without one.

On the `meta` device a read by the host raises by itself. What the host sends does not: a list that becomes a tensor
there, a tensor of the host among the device's, a mask that is looked through to find places, a number that is assigned
to one place (to several it is filled in). Here those raise as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.engine.device import Outcome

MADE = ("tensor", "as_tensor", "from_numpy", "new_tensor")  # of what the host has
aten: Any = torch.ops.aten
PLACED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Refused(Exception):
    """No graph can hold it."""


class NothingIsMade(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in MADE:
            raise Refused(f"{name}: numbers of the host become a tensor")
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                raise Refused("a list of places is sent")
            one = len(index) == args[0].dim() and all(isinstance(part, int) for part in index)
            if name == "__setitem__" and one and not isinstance(args[2], Tensor):
                raise Refused("a number is sent to its place")
        return func(*args, **(kwargs or {}))


class NothingIsSent(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [part for part in tree_leaves((args, kwargs, made)) if isinstance(part, Tensor) and part.dim()]
        if len({tensor.device.type for tensor in tensors}) > 1:
            raise Refused(f"{func}: a tensor of the host among the device's")
        masked = func in PLACED and any(part is not None and part.dtype == torch.bool for part in args[1])
        if masked and (func is PLACED[0] or args[2].numel() != 1):  # one value is filled in without looking
            raise Refused(f"{func}: a mask is looked through")
        return made


class Pretended:
    """A capture (`engine.device.Capture`) on a device without data: a round runs once, and then as it is captured."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        compute()  # what is made once and kept is made
        with NothingIsMade(), NothingIsSent():
            outcome = compute()
        self.count += 1
        return outcome, lambda: None
