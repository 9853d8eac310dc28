"""Triton's interpreter, where there is no GPU, mended in two places.

Its scalars are arrays of one value, of which numpy 2.4 makes no index any more: a loop's bounds may be values of a
kernel. And it multiplies bfloat16 by their bits.
"""

from __future__ import annotations

from typing import Any

from paceline.kernels.triton.device import INTERPRETED


def mend() -> None:
    """Once, before the first kernel is run; nothing where kernels are compiled."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    if getattr(patch, "mended", False):
        return

    def indexed(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _wide(interpreter, a), _wide(interpreter, b), *rest)

    indexed.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = indexed
    interpreter.InterpreterBuilder.create_dot = widened


def _wide(interpreter: Any, x: Any) -> Any:
    """bfloat16 as the float32 whose upper half its bits are."""
    if x.dtype.scalar != interpreter.tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)
