"""What malloc does with the memory that programs on a CPU work in.

XLA takes a program's working memory from malloc at each run and gives it back behind it. Above 32 MiB glibc asks the system for
it each time, and the system zeroes each page that is touched: a head of 32 rows and a vocabulary of 49,152 takes 1,900 page faults
at each step, 3 ms.
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT_BYTES = 1 << 30  # of free memory at the heap's end, which malloc gives back from there on
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h
_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed() -> bool:
    """Has this process keep what it frees, up to KEPT_BYTES, to use it again; once. Returns whether it does: only where malloc is
    glibc's, and whose settings the environment leaves alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> None:
    """Gives the system what is free. Where malloc is not glibc's, it decides that itself."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
