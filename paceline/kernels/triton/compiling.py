"""Kernels compiled many at a time: rounds are gone through once without being run, to find out what they launch.

A launch whose kernel is missing has it compiled elsewhere and does nothing. What it would have written is zero, so that
whoever goes on with that finds indices that exist. Nobody may have a slot meanwhile: what such a round leaves in tables
of slots is nonsense. What launches a kernel is made elsewhere, too: Triton has a C compiler make it when it is first
asked for, and would be waited for then, a kernel at a time.

Threads that compile parse one at a time. Up to Python 3.11.7 (and 3.12.1) all of them count how deep a tree is in one
place, and one that is interrupted meanwhile may fail: «AST constructor recursion depth mismatch».
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITCallable

THREADS = 12  # that compile
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)

log = logging.getLogger("paceline")


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.RLock()

    @functools.wraps(function)
    def called(*args: Any) -> Any:
        with lock:
            return function(*args)

    return called


JITCallable.parse = one_at_a_time(JITCallable.parse)


class Zeroed(TorchFunctionMode):
    """Memory that nobody has written to is zero."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _EMPTY else made


class Elsewhere(AsyncCompileMode):  # type: ignore[misc]
    """Kernels that are missing are compiled by other threads, and their launches left out: Triton launches what it is
    given, so it is given nothing."""

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> None:
        super().submit(key, functools.partial(made_ready, compile_fn), finalize_fn)


def made_ready(compile_fn: Callable[[], Any]) -> Any:
    """A kernel that can be launched at once."""
    kernel = compile_fn()
    _ = kernel.run  # made and loaded when it is first asked for
    return kernel


def pool() -> ThreadPoolExecutor:
    """Threads that load kernels where this one would: a new one has the first GPU."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(THREADS)
    return ThreadPoolExecutor(THREADS, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),))


def compile_for(rounds: Iterable[Callable[[], object]]) -> None:
    """What cannot be compiled, or gone through like this, fails when it is run in earnest, or does not."""
    with pool() as threads, Elsewhere(threads, ignore_errors=True), Zeroed():
        for go_through in rounds:
            try:
                go_through()
            except Exception as error:
                log.info("a round's kernels are compiled when it is first run: %s", error)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # rounds are captured on another stream, for which memory is kept apart
