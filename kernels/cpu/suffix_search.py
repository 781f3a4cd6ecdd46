"""Suffix decoding's search in C++: what jaxserve.speculative.suffix does in numpy, on the same arrays, with the same drafts.

Owns how the arrays are passed. It needs the library alone, and no vector instructions.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import numpy as np

from kernels.cpu import build, library

logger: logging.Logger = logging.getLogger("jaxserve")

_TYPES = {np.ndarray: ctypes.c_void_p, int: ctypes.c_int64, float: ctypes.c_double}


class Texts(NamedTuple):
    """What is searched, as SuffixTexts of suffix_search.h says. The arrays are contiguous and stay where they are."""

    tokens: np.ndarray  # i32
    chains: np.ndarray  # i32[2^(64 - shift), 8]
    begins: np.ndarray  # i64[S]
    lens: np.ndarray  # i64[S]
    groups: np.ndarray  # i64[2S]
    places: np.ndarray  # i64[2S, 8]
    lengths: np.ndarray  # i64[2S]
    group_at: np.ndarray  # i32
    outputs_begin: int
    num_outputs: int
    num_rows: int  # S
    shift: int
    most: int
    depth: int
    factor: float
    min_prob: float


class _Texts(ctypes.Structure):
    _fields_ = [(name, _TYPES[kind]) for name, kind in get_type_hints(Texts).items()]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "entries", "sampled", "counts")),
        *((name, ctypes.c_int64) for name in ("n", "width")),
        ("with_outputs", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in ("proposed", "used")),
    ]


assert (ctypes.sizeof(_Texts), ctypes.sizeof(_Step)) == (16 * 8, 9 * 8), "suffix_search.h has the same fields"

# (rows i64[n], entries i64[n], sampled i32[m, width], counts i64[n], with_outputs, proposed i32[S, most]) -> i64[<= n]: where the
# outputs stand that were drafted from.
Propose = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, bool, np.ndarray], np.ndarray]


def make(texts: Texts) -> Propose | None:
    """What indexes the tokens of a step and writes the drafts after them; None where there is no library for it."""
    found = library.find()
    if found is None:
        _say_missing()
        return None
    assert all(x.flags.c_contiguous for x in texts if isinstance(x, np.ndarray)) and texts.places.shape[1] == 8
    fields = [x.ctypes.data if isinstance(x, np.ndarray) else x for x in texts]
    call: Any = found.jaxserve_suffix_propose
    call.restype, call.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_void_p)
    return _Call(call, texts, _Texts(*fields))


@functools.cache
def _say_missing() -> None:
    logger.info("suffix decoding searches in numpy, which takes seven times as long: run `python %s`", build.__file__)


class _Call:
    """`make`'s. Keeps the arrays alive."""

    def __init__(self, call: Any, texts: Texts, packed: _Texts):
        self._call, self._texts, self._packed = call, texts, packed
        self._rows, self._entries, self._counts, self._used = arrays = np.zeros((4, texts.num_rows), np.int64)
        rows, entries, counts, used = (x.ctypes.data for x in arrays)
        self._proposed: np.ndarray | None = None
        self._step = _Step(rows=rows, entries=entries, counts=counts, used=used)

    def __call__(
        self,
        rows: np.ndarray,
        entries: np.ndarray,
        sampled: np.ndarray,
        counts: np.ndarray,
        with_outputs: bool,
        proposed: np.ndarray,
    ) -> np.ndarray:
        step, n, sampled = self._step, len(rows), np.ascontiguousarray(sampled, np.int32)
        if proposed is not self._proposed:  # an address takes 3 us to ask for: as long as 256 rows take to copy
            assert proposed.dtype == np.int32 and proposed.shape == (self._texts.num_rows, self._texts.most)
            assert proposed.flags.c_contiguous
            self._proposed, step.proposed = proposed, proposed.ctypes.data
        self._rows[:n], self._entries[:n], self._counts[:n] = rows, entries, counts
        step.sampled, step.width, step.n, step.with_outputs = sampled.ctypes.data, sampled.shape[1], n, with_outputs
        return self._used[: self._call(ctypes.byref(self._packed), ctypes.byref(step))]
