"""The compiled library: found, opened once, its functions typed. ctypes lets go of the GIL during every call."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

log = logging.getLogger("paceline")

NAME = "_native.so"
SOURCES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # as numbered in pack.h
KINDS = ("W4", "W5", "W8", "K4", "K5", "K6", "F32", "BF16")  # as numbered in packed.h


class Segment(Structure):
    _fields_ = [("kind", c_int32), ("pad", c_int32), ("data", c_void_p), ("rows", c_int64)]


class WeightStruct(Structure):
    _fields_ = [("segments", POINTER(Segment)), ("num_segments", c_int64), ("rows", c_int64), ("columns", c_int64)]


class Op(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("code", "a", "b", "out")),
        *((name, c_int64) for name in ("n0", "n1", "n2", "n3")),
        ("f", c_float),
        ("pad", c_float),
        ("w0", c_void_p),
        ("w1", c_void_p),
    ]


class Buffer(Structure):
    _fields_ = [("offset", c_int64), ("width", c_int64)]


class Program(Structure):
    _fields_ = [
        ("ops", POINTER(Op)),
        ("num_ops", c_int64),
        ("buffers", POINTER(Buffer)),
        ("num_buffers", c_int64),
        ("row_floats", c_int64),
    ]


class BatchStruct(Structure):
    _fields_ = [
        ("rows", c_int64),
        *((n, c_void_p) for n in ("ids", "slots", "positions", "tree_base", "path", "first", "write", "page_table")),
        *((n, c_int64) for n in ("path_width", "table_width", "block_size")),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("head_stride", c_int64),
        ("final_buffer", c_int64),
        ("final_out", c_void_p),
        ("taps", c_void_p),
        ("tap_offsets", c_void_p),
        ("num_taps", c_int64),
        ("tap_width", c_int64),
        ("tapped_out", c_void_p),
        ("head", c_void_p),
        ("head_rows", c_void_p),
        ("num_head_rows", c_int64),
        ("logits_out", c_void_p),
        ("best_out", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "paceline_path": (c_char_p, []),
    "paceline_select": (c_int, [c_char_p]),
    "paceline_threads": (None, [c_int]),
    "paceline_num_threads": (c_int, []),
    "paceline_kind": (c_int, [c_int]),
    "paceline_tile_bytes": (c_int64, [c_int, c_int64]),
    "paceline_row_bytes": (c_int64, [c_int, c_int64]),
    "paceline_pack": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "paceline_pack_dense": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "paceline_quantise": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "paceline_exp": (None, [c_void_p, c_int64, c_void_p]),
    "paceline_largest": (c_int64, [c_void_p, c_int64]),
    "paceline_gumbel": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "paceline_embed": (None, [POINTER(WeightStruct), c_void_p, c_int64, c_void_p]),
    "paceline_linear": (None, [POINTER(WeightStruct), c_void_p, c_int64, c_void_p, c_void_p]),
    "paceline_keep": (None, [c_void_p, c_void_p, *(4 * [c_int64]), c_void_p, c_void_p, c_int64]),
    "paceline_run": (None, [POINTER(Program), POINTER(BatchStruct)]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built; says so once."""
    path = Path(__file__).with_name(NAME)
    if not path.exists():
        log.warning("paceline's native kernels were not built (no C++ compiler?); the slower torch kernels are used")
        return None
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            log.warning("paceline's native kernels are of another version (install it again); the torch ones are used")
            return None
        function.restype, function.argtypes = result, arguments
    loaded.paceline_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return loaded
