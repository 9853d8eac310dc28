"""Rounds that are gone through before they are run: kernels are left out, and what is left finds nothing but zeros."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.testing import tiny_llm
from tests.drafters.contract import DRAFTERS
from tests.kernels.triton.leaving import go_through_all

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a fake device on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # rows of nobody hold anything
]


@pytest.mark.parametrize("name", [None, "ngram", "lookahead", "eagle3", "eagle_dynamic", "medusa_tree", "draft_model"])
def test_rounds_whose_kernels_are_left_out_fail_nowhere(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    drafter = None if name is None else DRAFTERS[name]({})
    given = {"behind": 1, "captured": True, "kernels": "triton", "max_num_seqs": 2, "max_batched_tokens": 32}
    assert go_through_all(monkeypatch, tiny_llm(drafter, budget="fixed", **given)) > 80


def test_a_missing_kernel_is_compiled_elsewhere_and_its_launch_left_out() -> None:
    from triton.runtime import _async_compile

    from paceline.kernels.triton.compiling import Elsewhere

    done: list[tuple[str, int]] = []
    kept: list[Any] = []

    class Kernel:
        @property
        def run(self) -> None:
            done.append(("launcher", threading.get_ident()))

    def compile_it() -> Kernel:
        done.append(("kernel", threading.get_ident()))
        return Kernel()

    with ThreadPoolExecutor(2) as pool, Elsewhere(pool, ignore_errors=True):
        mode = _async_compile.active_mode.get()
        assert mode is not None
        for _ in range(2):
            assert mode.submit("one", compile_it, kept.append) is None, "Triton would launch what is returned"
        assert mode.submit("two", lambda: 1 / 0, kept.append) is None
    assert [type(kernel) for kernel in kept] == [Kernel]
    assert [what for what, _ in done] == ["kernel", "launcher"], "both once"
    assert threading.get_ident() not in {thread for _, thread in done}


def test_kernels_are_loaded_where_they_will_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import compiling

    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append((threading.get_ident(), device)))
    with compiling.pool() as threads:
        assert threads.submit(threading.get_ident).result() != threading.get_ident()
    assert chosen and {device for _, device in chosen} == {1}
    assert threading.get_ident() not in {thread for thread, _ in chosen}


def test_what_fails_when_it_is_gone_through_keeps_nobody_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.kernels.triton import compiling

    seen: list[torch.Tensor] = []

    def fails() -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(compiling, "THREADS", 2)
    compiling.compile_for([fails, lambda: seen.append(torch.empty(1000)), lambda: seen.append(seen[0].new_empty(1000))])
    assert [one.count_nonzero().item() for one in seen] == [0, 0]


def test_a_thread_that_is_interrupted_while_it_parses_is_not_disturbed_by_another() -> None:
    """Up to Python 3.11.7 both count how deep they are in one place."""
    from triton.runtime.jit import JITFunction

    from paceline.kernels.triton import compiling, looking

    assert compiling.THREADS > 1
    kernel = JITFunction(looking.look.fn)
    other = threading.Thread(target=kernel.parse)

    def interrupt(phase: str, found: object) -> None:
        gc.callbacks.remove(interrupt)
        other.start()
        other.join(0.2)

    usual, enabled = gc.get_threshold(), gc.isenabled()
    gc.collect(0)
    gc.callbacks.append(interrupt)
    try:
        gc.set_threshold(500)  # objects: a tree has more
        gc.enable()
        assert kernel.parse().body
    finally:
        (gc.enable if enabled else gc.disable)()
        gc.set_threshold(*usual)
    other.join()
    assert interrupt not in gc.callbacks
