"""What every launch needs to know: is there a GPU or Triton's interpreter, and may a kernel start before the last ends?

Launched one behind another in a graph, a kernel with `PDL` starts while the one before it still runs, asks for what no
kernel writes (weights), and only then waits for its inputs. It must wait (`begin`) before it reads or writes any tensor
that another kernel may write. But for what was written before the last product: that lets nobody start before it has
waited itself, so all before it is there. A layout is older than a layer's products, and read at once where a layer's
heads are stored and looked at; so is who picks, than the logits (`Keyed.old`): past the processor's own cache (`.cg`),
which nobody promises to be up to date before a kernel has waited. Kernels without `PDL` are serialised as ever.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
PDL = HOPPER  # programmatic dependent launch
BOXES = HOPPER or INTERPRETED  # tiles that the device copies by itself


def launching(num_warps: int, num_stages: int = 3) -> dict[str, Any]:
    """Options of a launch. Products and sums stay apart: a fused one rounds once, and a compiler chooses where."""
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    return {**options, "launch_pdl": True} if PDL else options


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU; the interpreter has three, so that programs have something to share."""
    return 3 if INTERPRETED else int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def begin(PDL: tl.constexpr, EARLY: tl.constexpr = False):
    """Wait for what the kernels before have written, and let the next one start; EARLY: before it waits itself.

    The next one waits for all of this kernel, and so for all before it. Early pays where this one is small.
    """
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for the lines that these pointers name, and wait for none of them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
