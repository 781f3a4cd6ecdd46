"""What a tier is: pages by their hashes, read and written one at a time, and what is counted of it.

Owns the shape of a page on the host and the account of a tier. One thread reads and writes a tier; any thread may ask `contains`.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.kv_store.memory_limit import host_memory_bytes


@dataclass(frozen=True)
class PageLayout:
    """A page on the host: all layers, keys and values, as the device has them. dtype: of the KV."""

    num_layers: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: Any

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[L, 2, K, page_size, H]"""
        return (self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def bits(self) -> np.dtype:
        """Integers as wide as the KV's numbers. As such numpy copies any dtype while other threads run; of bfloat16 itself it keeps
        them waiting."""
        return np.dtype(f"u{np.dtype(self.dtype).itemsize}")

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's part of a page."""
        return self.page_bytes // self.num_kv_heads

    @property
    def name(self) -> str:
        """What must be equal where pages are shared."""
        return f"L{self.num_layers} K{self.num_kv_heads} P{self.page_size} H{self.head_dim} {np.dtype(self.dtype).name}"


def empty_pages(name: str, max_bytes: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory of a tier, which a thread takes from the system meanwhile (`take_memory`). ValueError: so much is not to be had."""
    memory = host_memory_bytes()
    if max_bytes > memory:
        raise ValueError(
            f"kv_store: a {name} tier of {max_bytes} bytes is more than the {memory} bytes of memory that this process may use: "
            "give less"
        )
    try:
        pages = np.empty(shape, dtype)
    except MemoryError:
        raise ValueError(f"kv_store: there is no memory for a {name} tier of {max_bytes} bytes: give it less") from None
    threading.Thread(target=take_memory, args=(weakref.ref(pages),), name="jaxserve-kv-memory", daemon=True).start()
    return pages


_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which leaves what is written as it is
_PIECE = 2 << 20  # bytes that are taken at once: some milliseconds, for which other calls for memory may have to wait
_SYSTEM_PAGE: int = os.sysconf("SC_PAGE_SIZE")


def take_memory(pages: Callable[[], np.ndarray | None]) -> None:
    """Takes an array's memory from the system, piece by piece, while others may write it already.

    Memory that is first written while requests run costs far more than the bytes copied there: 0.57 ms for 256 KiB of KV in
    place of 0.015 (a virtual machine of two AMD EPYC cores, 2026-11-26). Where the system has no such call, memory is taken when it
    is written. pages: the array, as long as it is there.
    """
    madvise, start = ctypes.CDLL(None).madvise, 0
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    while (array := pages()) is not None and start < array.nbytes:
        first = (array.ctypes.data + start) // _SYSTEM_PAGE * _SYSTEM_PAGE
        end = array.ctypes.data + min(start + _PIECE, array.nbytes)
        if madvise(first, end - first, _POPULATE_WRITE):
            return
        start += _PIECE
        del array


@dataclass
class TierStats:
    """Counts of a tier since it was made. Times in seconds, of the thread that reads and writes."""

    name: str
    pages_read: int = 0
    pages_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    num_failures: int = 0  # reads and writes that failed
    bytes_held: int = 0  # now; of a shared folder an estimate

    def add_written(self, num_bytes: int) -> None:
        """Counts a page that was written; one that was there already is none."""
        self.pages_written += 1
        self.bytes_written += num_bytes


class Tier(Protocol):
    """Pages by hash.

    is_shared: whether other processes find what is written here.
    """

    stats: TierStats
    is_shared: bool

    def contains(self, hash_: bytes) -> bool:
        """Whether a page seems to be here; `read` may find it gone or unusable. Asks no file."""
        ...

    def read(
        self,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """Copies a page into `out`. False where it is not here or can't be used; `out` then holds anything."""
        ...

    def write(
        self,
        hash_: bytes,
        page: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """Keeps a copy of the page, and counts it in `stats` unless it was here already. False where it could not."""
        ...

    def touch(self, hash_: bytes) -> None:
        """The page, if it is here, is the one that was used last. `read` alone says nothing of use."""
        ...

    def refresh(self) -> None:
        """Looks for pages that other processes have written."""
        ...

    def forget(self, hash_: bytes) -> None:
        """Drops a page, if it is here."""
        ...

    def close(self) -> None:
        """Ends what the tier began. It is not used after that."""
        ...
