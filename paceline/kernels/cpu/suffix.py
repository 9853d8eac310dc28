"""Suffix trees of the compiled library: the same as drafters/suffix_tree.py's, at a fraction of their time.

Counts and drafts equal those of the reference, probabilities to the last bit. Memory is counted as the library takes
it, not as Python would: texts that are removed for their bytes go at other moments, and from then on drafts may differ,
but no answer does. This module knows tokens and trees. It must not know requests or what drafts are for.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cpu.library import library

Array = np.ndarray[Any, np.dtype[np.int64]]
_MOST = 2**31 - 1  # tokens of a text, and so of a path
_NO_LIMIT = -1


class AskedStruct(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("batch", "width")),
        ("table", c_void_p),
        ("row", c_int64),
        *((name, c_void_p) for name in ("slots", "lengths", "budgets", "own", "others")),
        *((name, c_double) for name in ("factor", "floor")),
        ("branching", c_int64),
        *((name, c_void_p) for name in ("out", "scores", "matches")),
        *((name, c_int64) for name in ("nodes", "deepest", "chain")),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "paceline_suffix_asked": (c_int64, []),
    "paceline_suffix_new": (c_void_p, [c_int64, c_int64, c_int64]),
    "paceline_suffix_free": (None, [c_void_p]),
    "paceline_suffix_bytes": (c_int64, [c_void_p]),
    "paceline_suffix_begin": (c_int64, [c_void_p]),
    "paceline_suffix_extend": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "paceline_suffix_end": (None, [c_void_p, c_int64]),
    "paceline_suffix_count": (c_int64, [c_void_p, c_void_p, c_int64]),
    "paceline_suffix_speculate": (c_int64, [POINTER(AskedStruct)]),
}


@functools.cache
def suffix_library() -> ctypes.CDLL | None:
    """The library, or None where it is not there or has no such trees: it was built before there were any."""
    loaded = library()
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, arguments
    assert loaded is not None
    return loaded if loaded.paceline_suffix_asked() == ctypes.sizeof(AskedStruct) else None


class NativeTree:
    """Counts over the texts begun and not yet removed; past `max_texts` or `max_bytes` the oldest are removed.

    A text is a number. One that was removed, or has ended, takes no more tokens.
    """

    def __init__(self, max_depth: int, max_texts: int | None = None, max_bytes: int | None = None) -> None:
        found = suffix_library()
        assert found is not None
        limits = (_NO_LIMIT if limit is None else min(limit, 2**62) for limit in (max_texts, max_bytes))
        self.address = found.paceline_suffix_new(min(max_depth, _MOST), *limits)
        if self.address is None:
            _no_memory()
        self._library = found
        weakref.finalize(self, found.paceline_suffix_free, self.address).atexit = False

    def __reduce__(self) -> NoReturn:
        raise TypeError("a suffix tree of the library cannot be copied")  # two would free the same

    @property
    def num_bytes(self) -> int:
        """What texts, nodes and tables of children take, as allocators round it."""
        return int(self._library.paceline_suffix_bytes(self.address))

    def begin(self) -> int:
        text: int = self._library.paceline_suffix_begin(self.address)
        if text < 0:
            _no_memory()
        return text

    def read(self, text: int, tokens: Array) -> None:
        """Append tokens, which are read where they lie. Without memory for them the tree forgets all texts."""
        assert tokens.dtype == np.int64
        if not len(tokens):
            return
        first = ctypes.addressof(c_int64.from_buffer(tokens.data))  # in half the time that tokens.ctypes takes
        if self._library.paceline_suffix_extend(self.address, text, first, len(tokens)) < 0:
            _no_memory()

    def end(self, text: int) -> None:
        """The text will not grow any more; it still counts."""
        self._library.paceline_suffix_end(self.address, text)

    def count(self, tokens: Sequence[int]) -> int:
        """How often a run of at most max_depth tokens occurs."""
        run = array("q", tokens)
        count: int = self._library.paceline_suffix_count(self.address, run.buffer_info()[0], len(run))
        if count < 0:
            _no_memory()
        return count


class Limits(Protocol):
    """How far to trust the counts: see drafters/suffix_tree.py."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def factor(self) -> float: ...
    @property
    def min_probability(self) -> float: ...
    @property
    def branching(self) -> bool: ...


class Drafts(NamedTuple):
    """Of B sequences, at most N nodes each."""

    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]; -1: the last token of the text, -2: padding
    sizes: Tensor  # [B]
    chain: bool  # all of them are
    max_depth: int
    scores: array[float]  # [B]
    matches: array[int]  # [B]


def speculate(
    own: Sequence[NativeTree],
    others: NativeTree | None,
    host: Array,
    rows: Sequence[tuple[int, int, int]],
    limits: Limits,
    device: torch.device,
) -> Drafts:
    """What follows each sequence, by its own tree or by that of all, whichever scores higher; its own if they are even.

    host [rows, columns]: committed tokens. rows: of each sequence its row there, its length and its budget.
    """
    batch, found = len(rows), suffix_library()
    assert found is not None and host.dtype == np.int64 and host.flags.c_contiguous and len(own) == batch
    slots, lengths, budgets = (array("q", column) for column in zip(*rows)) if rows else (array("q"),) * 3
    trees = array("Q", [tree.address for tree in own])
    width = max(0, min(limits.max_tokens, max(budgets, default=0)))
    out = torch.empty(batch * (1 + 2 * width), dtype=torch.int64, device="cpu")
    scores, matches = array("d", bytes(8 * batch)), array("q", bytes(8 * batch))
    asked = AskedStruct(batch, width, host.ctypes.data, host.shape[1])
    asked.slots, asked.lengths, asked.budgets, asked.own, asked.scores, asked.matches = (
        column.buffer_info()[0] for column in (slots, lengths, budgets, trees, scores, matches)
    )
    asked.others = None if others is None else others.address
    asked.factor, asked.floor, asked.branching = limits.factor, limits.min_probability, limits.branching
    asked.out = out.data_ptr()
    if found.paceline_suffix_speculate(asked) < 0:  # what it points at is held until here
        _no_memory()
    sent = out[: batch * (1 + 2 * asked.nodes)].to(device)
    tokens, parents = sent[batch:].view(2, batch, asked.nodes).unbind()
    return Drafts(tokens, parents, sent[:batch], bool(asked.chain), asked.deepest, scores, matches)


def _no_memory() -> NoReturn:
    raise MemoryError("there is no memory for a suffix tree")


__all__ = ["Array", "Drafts", "NativeTree", "speculate", "suffix_library"]
