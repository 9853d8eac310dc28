"""CUDA graphs: a round that ran once is replayed, and the host launches one thing instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.engine.device import Capture, Outcome


def cuda_capture() -> Capture:
    """All that is captured shares one pool of memory: one round runs at a time."""
    pool, first = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        first.capture_begin(pool=pool)
        torch.zeros(1, device="cuda")
        first.capture_end()

    def capture(compute: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        now, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(now)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(aside):
            compute()  # compiles what is new, and makes what is kept
            aside.synchronize()
            graph.capture_begin(pool=pool)  # torch.cuda.graph would collect garbage and empty caches each time
            try:
                outcome = compute()
            finally:
                graph.capture_end()
        now.wait_stream(aside)
        assert first is not None  # held as long as this function: a pool that no graph is in any more is gone
        return outcome, graph.replay

    return capture
