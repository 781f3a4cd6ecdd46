"""The requests that wait to be admitted, sorted by an order key (policies.py).

Owns their order only. A preempted request is put back like any other; its key places it before all that came later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from jaxserve.request import Request
from jaxserve.scheduling.policies import OrderKey


class WaitingQueue:
    """A sorted list with the next request at its end, from where it is popped in O(1). Keys are unique."""

    def __init__(self, key: Callable[[Request], OrderKey]):
        self._key = key
        self._entries: list[tuple[tuple[float, ...], Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """From the next to be served to the last."""
        return (request for _, request in reversed(self._entries))

    def _reversed_key(self, request: Request) -> tuple[float, ...]:
        return tuple(-x for x in self._key(request))

    def push(self, request: Request) -> None:
        """Inserts a request at the place of its key, with O(log n) comparisons."""
        insort(self._entries, (self._reversed_key(request), request), key=lambda entry: entry[0])

    def peek(self) -> Request:
        """The next to be served. IndexError if nobody waits."""
        return self._entries[-1][1]

    def pop(self) -> Request:
        """Removes and returns the next to be served. IndexError if nobody waits."""
        return self._entries.pop()[1]

    def remove(self, request: Request) -> None:
        """Removes a request that waits."""
        index = bisect_left(self._entries, self._reversed_key(request), key=lambda entry: entry[0])
        assert index < len(self._entries) and self._entries[index][1] is request, f"{request.request_id} does not wait"
        del self._entries[index]
