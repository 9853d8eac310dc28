"""Triton's interpreter, where there is no GPU, mended in three places.

Its scalars are arrays of one value, of which numpy 2.4 makes no index any more: a loop's bounds may be values of a
kernel. It multiplies bfloat16 by their bits. And it replaces the whole language anew whenever one function calls
another, which took half its time.
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
    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    if getattr(patch, "mended", False):
        return

    def indexed(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _wide(interpreter, a), _wide(interpreter, b), *rest)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        languages = (value for value in self.fn.__globals__.values() if value is language or value is language.core)
        if any(language.core.is_builtin(value.arange) for value in languages):
            return calling(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)  # replaced already, by the kernel that is being run

    indexed.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = indexed
    interpreter.InterpreterBuilder.create_dot = widened
    interpreter.InterpretedFunction.__call__ = call


def _wide(interpreter: Any, x: Any) -> Any:
    """bfloat16 as the float32 whose upper half its bits are."""
    if x.dtype.scalar != interpreter.tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)
