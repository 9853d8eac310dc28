"""CUDA graphs: a round that ran once is replayed, and the host launches one thing instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.engine.device import Outcome


class CudaCapture:
    """Captures rounds (`engine.replaying.Capture`). All share one pool of memory: one round runs at a time."""

    def __init__(self) -> None:
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # one: memory is kept for each apart
        self._pool = torch.cuda.graph_pool_handle()
        self._first = torch.cuda.CUDAGraph()  # a pool that no graph is in any more is gone: this one stays
        with torch.cuda.stream(self._aside):
            self._first.capture_begin(pool=self._pool)
            torch.zeros(1, device="cuda")
            self._first.capture_end()

    def __call__(self, compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        now, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(now)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            compute()  # compiles what is new, and makes what is kept
            aside.synchronize()
            graph.capture_begin(pool=self._pool)  # torch.cuda.graph would collect garbage and empty caches each time
            try:
                outcome = compute()
            finally:
                graph.capture_end()
        now.wait_stream(aside)
        return outcome, graph.replay
