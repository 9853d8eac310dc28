"""What is launched, counted under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """Notes kernels by name, and PyTorch's operations that make or write a tensor's values."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime import interpreter

        self.seen: list[str] = []
        self.inside = False
        run: Any = interpreter.GridExecutor.__call__

        def noting(executor: Any, *args: Any, **given: Any) -> None:
            self.seen.append(executor.fn.__name__)
            self.inside = True  # of the interpreter, which works in tensors itself
            run(executor, *args, **given)
            self.inside = False

        patch.setattr(interpreter.GridExecutor, "__call__", noting)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        name = op._schema.name.removeprefix("aten::")
        given = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        parts = made if isinstance(made, tuple | list) else [made]
        views = all(not isinstance(part, Tensor) or part.untyped_storage().data_ptr() in given for part in parts)
        if not self.inside and (not views or name.endswith("_")) and "empty" not in name:
            self.seen.append(name)
        return made

    def noted(self, run: Callable[..., Any], found: list[list[str]]) -> Callable[..., Any]:
        """The same function, which adds what each call of it launches."""

        def noting(*args: Any) -> Any:
            self.seen.clear()
            with self:
                made = run(*args)
            found.append(list(self.seen))
            return made

        return noting
