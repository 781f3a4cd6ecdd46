"""What malloc does with the memory that programs on a CPU work in.

XLA takes a program's working memory from malloc at each run and gives it back behind it. Above 32 MiB glibc asks the system for
it each time, and the system zeroes each page that is touched: a head of 32 rows and a vocabulary of 49,152 takes 1,900 page faults
at each step, 3 ms. A thread's own heap, as XLA's threads have them, ends at 64 MiB, so that what is larger is asked of the system
at each run whatever malloc is told; a head of 64 rows takes 89 MB. The process's first heap has no such end.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os

import jax

KEPT_BYTES = 1 << 30  # of free memory at the heap's end, which malloc gives back from there on
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of malloc.h
_OTHER_DEVICES = ("jax_plugins", "libtpu")  # packages that bring JAX one
_SETTINGS = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed() -> bool:
    """Has this process keep what it frees, up to KEPT_BYTES, to use it again; once. Returns whether it does: only where malloc is
    glibc's, and whose settings the environment leaves alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SETTINGS):
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, KEPT_BYTES))


@functools.cache
def share_heap() -> bool:
    """Asks malloc for no more heaps than it has, so that threads that come from now on share the process's first one, if no other
    thread has allocated yet: else they may be given that one's. Call it before JAX has a device: XLA's threads come with that.
    Returns whether malloc was asked: only on a CPU, where `keep_freed` would, and where the environment does not say how many heaps
    there may be."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not _is_cpu_alone() or any(name in os.environ for name in (*_SETTINGS, "MALLOC_ARENA_MAX")):
        return False
    return bool(mallopt(_ARENA_MAX, 1))


def _is_cpu_alone() -> bool:
    """Whether JAX has no device but the CPU, as far as can be told without asking it for one."""
    if platforms := jax.config.jax_platforms:
        return set(platforms.split(",")) == {"cpu"}
    return not any(importlib.util.find_spec(name) for name in _OTHER_DEVICES)


def give_back() -> None:
    """Gives the system what is free. Where malloc is not glibc's, it decides that itself."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
