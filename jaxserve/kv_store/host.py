"""Pages in the host's memory, the least recently used evicted first.

Owns one array that holds all pages, whose memory the system gives when it is first written.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from jaxserve.kv_store.tier import PageLayout, TierStats, empty_pages


class HostTier:
    """As many pages as `max_bytes` hold. ValueError if that is none, or more than the machine's memory."""

    def __init__(self, layout: PageLayout, max_bytes: int):
        num_pages = max_bytes // layout.page_bytes
        if not num_pages:
            raise ValueError(f"kv_store: a host tier of {max_bytes} bytes can't hold a KV page, which takes {layout.page_bytes}")
        self.stats: TierStats = TierStats("host")
        self.is_shared: bool = False
        self._page_bytes = layout.page_bytes
        self._pages = empty_pages("host", max_bytes, (num_pages, *layout.shape), layout.bits)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_pages))[::-1]

    def contains(self, hash_: bytes) -> bool:
        """As `Tier.contains`."""
        return hash_ in self._slots

    def read(
        self,
        hash_: bytes,
        out: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.read`."""
        slot = self._slots.get(hash_)
        if slot is None:
            return False
        np.copyto(out.view(self._pages.dtype), self._pages[slot])
        return True

    def write(
        self,
        hash_: bytes,
        page: np.ndarray,  # PageLayout.shape
    ) -> bool:
        """As `Tier.write`; evicts a page where there is no room."""
        if hash_ in self._slots:
            self._slots.move_to_end(hash_)
            return True
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        np.copyto(self._pages[slot], page.view(self._pages.dtype))
        self._slots[hash_] = slot  # only now: it is whole
        self.stats.add_written(page.nbytes)
        self.stats.bytes_held = len(self._slots) * self._page_bytes
        return True

    def touch(self, hash_: bytes) -> None:
        """As `Tier.touch`."""
        if hash_ in self._slots:
            self._slots.move_to_end(hash_)

    def refresh(self) -> None:
        """As `Tier.refresh`: nobody else writes here."""

    def close(self) -> None:
        """As `Tier.close`: there is nothing to end."""

    def forget(self, hash_: bytes) -> None:
        """As `Tier.forget`."""
        slot = self._slots.pop(hash_, None)
        if slot is not None:
            self._free.append(slot)
            self.stats.bytes_held = len(self._slots) * self._page_bytes
