"""The compiled library: found, opened once, its functions typed. ctypes lets go of the GIL during every call."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from paceline.kernels.ops import ACTIVATIONS, TOGETHER

log = logging.getLogger("paceline")

NAME = "_native.so"
# Numbered on both sides; a library that numbers otherwise is not used (`agreement`).
SOURCES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
KINDS = ("W4", "W5", "W8", "K4", "K5", "K6", "F32", "BF16", "F16")
OPERATIONS = (
    *("embed", "input", "positions", "quantise", "linear", "rms_norm", "layer_norm", "activation", "gated"),
    *("add", "multiply", "scale", "concat", "columns", "head_norm", "rope", "store", "attention", "tap"),
    *("per_head", "route", "sort", "spread", "experts", "expert_gated", "combine"),
)


class Segment(Structure):
    _fields_ = [("kind", c_int32), ("pad", c_int32), ("data", c_void_p), ("rows", c_int64)]


class WeightStruct(Structure):
    _fields_ = [("segments", POINTER(Segment)), ("num_segments", c_int64), ("rows", c_int64), ("columns", c_int64)]


class Op(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("code", "a", "b", "out")),
        *((name, c_int64) for name in ("n0", "n1", "n2", "n3", "n4", "n5")),
        ("f", c_float),
        ("g", c_float),
        ("w0", c_void_p),
        ("w1", c_void_p),
    ]


class Buffer(Structure):
    _fields_ = [("offset", c_int64), ("width", c_int64)]


class Layer(Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("keys", "values")),
        *((n, c_int64) for n in ("rows", "heads", "width", "value_width")),
    ]


class Program(Structure):
    _fields_ = [
        ("ops", POINTER(Op)),
        ("num_ops", c_int64),
        ("buffers", POINTER(Buffer)),
        ("num_buffers", c_int64),
        ("row_floats", c_int64),
        ("num_bounds", c_int64),
    ]


class BatchStruct(Structure):
    _fields_ = [
        ("rows", c_int64),
        *(
            (n, c_void_p)
            for n in ("ids", "slots", "positions", "tree_base", "path", "first", "write", "page_table", "until")
        ),
        *((n, c_void_p) for n in ("windowed_write", "windowed_table")),
        *((n, c_int64) for n in ("path_width", "table_width", "block_size")),
        ("layers", c_void_p),
        ("named", c_void_p),
        ("bounds", c_void_p),
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


class KeysStruct(Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("slots", "seeds", "samples", "positions", "extra", "inverse", "logarithm")),
        ("stream", c_int64),
    ]


class PickingStruct(Structure):
    _fields_ = [("temperature", c_void_p), ("greedy", c_void_p), ("keys", KeysStruct), ("weight", c_float)]


class LinkStruct(Structure):
    _fields_ = [("program", c_void_p), ("final_buffer", c_int64), ("head", c_void_p), ("bias", c_void_p)]


class ChainStruct(Structure):
    _fields_ = [
        ("links", POINTER(LinkStruct)),
        *((n, c_int64) for n in ("steps", "null_slot")),
        *((n, c_void_p) for n in ("newest", "most", "ids", "finals", "picking")),
        ("least", c_double),
        *((n, c_void_p) for n in ("tokens", "counts")),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "paceline_agreement": (c_char_p, []),
    "paceline_path": (c_char_p, []),
    "paceline_select": (c_int, [c_char_p]),
    "paceline_threads": (None, [c_int]),
    "paceline_num_threads": (c_int, []),
    "paceline_kind": (c_int, [c_int]),
    "paceline_weight_bytes": (c_int64, [c_int, c_int64, c_int64]),
    "paceline_row_bytes": (c_int64, [c_int, c_int64]),
    "paceline_pack": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "paceline_pack_dense": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "paceline_quantise": (None, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]),
    "paceline_exp": (None, [c_void_p, c_int64, c_void_p]),
    "paceline_largest": (c_int64, [c_void_p, c_int64]),
    "paceline_gumbel": (None, [POINTER(KeysStruct), c_int64, c_int64, c_void_p]),
    "paceline_embed": (None, [POINTER(WeightStruct), c_void_p, c_int64, c_void_p]),
    "paceline_linear": (None, [POINTER(WeightStruct), c_void_p, c_int64, c_void_p, c_void_p]),
    "paceline_keep": (None, [POINTER(Layer), c_int64, c_void_p, c_void_p, c_int64]),
    "paceline_run": (None, [POINTER(Program), POINTER(BatchStruct)]),
    "paceline_pick": (None, [c_void_p, c_int64, c_int64, POINTER(PickingStruct), c_void_p]),
    "paceline_chain": (None, [POINTER(BatchStruct), POINTER(ChainStruct)]),
}


def agreement() -> str:
    """What the library must say too: names in their order, sizes of the structs, the rows that lie together."""
    names = [name.upper() for names in (OPERATIONS, KINDS, SOURCES, ACTIVATIONS) for name in names]
    structs = (Segment, WeightStruct, Op, Buffer, Layer, Program, BatchStruct)
    drawing = (KeysStruct, PickingStruct, LinkStruct, ChainStruct)
    return "".join(f"{word} " for word in (*names, *map(ctypes.sizeof, (*structs, *drawing)), TOGETHER))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built or is another version's (`missing` says which)."""
    path = Path(__file__).with_name(NAME)
    if not path.exists():
        return None
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
        if function is None or (name == "paceline_agreement" and function().decode() != agreement()):
            return None
    loaded.paceline_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return loaded


def missing() -> str:
    """Why there is no library, as the end of a sentence about the native kernels."""
    if Path(__file__).with_name(NAME).exists():
        return "are of another version: install paceline again"
    return "were not built: was there a C++ compiler when paceline was installed?"


@functools.cache
def say_missing() -> None:
    """Once, and only where PyTorch's kernels do take their place."""
    log.warning("the slower torch kernels are used, because paceline's native kernels %s", missing())
