"""Triton's interpreter, where there is no GPU, mended in three places.

Its scalars are arrays of one value, of which numpy 2.4 makes no index any more: a loop's bounds may be values of a
kernel. It multiplies bfloat16 by their bits, and matrices by a library in which a row's sum depends on how many rows
there are (on some processors); a tensor core adds one product after another. And it replaces the whole language anew
whenever one function calls another, which took half its time.
"""

from __future__ import annotations

from typing import Any

from paceline.kernels.triton.device import INTERPRETED


def mend() -> None:
    """Once, before the first kernel is run; nothing where kernels are compiled."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    language, calling = interpreter.tl, interpreter.InterpretedFunction.__call__
    patch = interpreter._patch_lang_tensor
    if getattr(patch, "mended", False):
        return

    def indexed(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def dot(self: Any, a: Any, b: Any, before: Any, *rest: Any) -> Any:
        total = before.data.copy()
        rows, columns = (_wide(interpreter, x).astype(total.dtype, copy=False) for x in (a, b))
        for k in range(rows.shape[-1]):
            total += rows[..., :, k, None] * columns[..., None, k, :]
        return interpreter.TensorHandle(total, before.dtype.scalar)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        languages = (value for value in self.fn.__globals__.values() if value is language or value is language.core)
        if any(language.core.is_builtin(value.arange) for value in languages):
            return calling(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)  # replaced already, by the kernel that is being run

    indexed.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = indexed
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpretedFunction.__call__ = call


def _wide(interpreter: Any, x: Any) -> Any:
    """A matrix's values; of bfloat16 the float32 whose upper half its bits are."""
    if x.dtype.scalar != interpreter.tl.bfloat16:
        return x.data
    return (x.data.astype("uint32") << 16).view("float32")
