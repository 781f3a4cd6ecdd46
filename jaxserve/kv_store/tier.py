"""What a tier is: pages by their hashes, read and written one at a time, and what is counted of it.

Owns the shape of a page on the host and the account of a tier. One thread reads and writes a tier; any thread may ask `contains`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


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
    def head_bytes(self) -> int:
        """Bytes of one KV head's part of a page."""
        return self.page_bytes // self.num_kv_heads

    @property
    def name(self) -> str:
        """What must be equal where pages are shared."""
        return f"L{self.num_layers} K{self.num_kv_heads} P{self.page_size} H{self.head_dim} {np.dtype(self.dtype).name}"


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
        """Keeps a copy of the page. False where it could not."""
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
