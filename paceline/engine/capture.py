"""CUDA graphs: a round that ran once is replayed, and the host launches one thing instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.engine.device import Capture, Outcome


def cuda_capture() -> Capture:
    """All that is captured shares one pool of memory: one round runs at a time."""
    pool = torch.cuda.graph_pool_handle()

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
        return outcome, graph.replay

    return capture
