"""What moves bytes between the memories of processes, as a tier of theirs needs it.

Owns the interface. nixl_transfer.py and mooncake_transfer.py have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

_FIRST_WAIT, _LONGEST_WAIT = 20e-6, 1e-3  # seconds between looks whether a read is done


class TransferError(OSError):
    """A read that failed, or is not done in time. It may still write into the memory that it was to fill."""


class Transfer(Protocol):
    """Reads memory of other processes. One thread calls it."""

    def register(self, memory: np.ndarray) -> None:
        """This memory may be read by others, and be filled by `read`. It stays registered, and must be kept."""
        ...

    @property
    def metadata(self) -> bytes:
        """What others need for reading what is registered so far."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """The name of whoever's metadata this is. OSError: it is of no use."""
        ...

    def remove_peer(self, name: str) -> None:
        """Nothing is read from there any more."""
        ...

    def read(
        self,
        peer: str,
        address: int,
        into: np.ndarray,  # u8[any], registered
        seconds: float,
    ) -> None:
        """Fills `into` from the peer's memory at `address`. TransferError: it could not."""
        ...

    def close(self) -> None:
        """Ends its threads. Nothing of it is called after this, and the memory that was registered is its owner's alone."""
        ...


def looks(seconds: float, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yields when it is time to look whether a read is done, for so many seconds: often at first, then each millisecond."""
    deadline, wait = clock() + seconds, _FIRST_WAIT
    while clock() < deadline:
        yield
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT)
