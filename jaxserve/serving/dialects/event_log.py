"""The events of a stream that may be read again: by who comes back, and by several at once, while more events come.

Owns the bounds of what is kept of a stream, and of streams that have ended. Knows nothing of what an event says.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator

MAX_LOG_BYTES: int = 8 << 20  # of one stream
MAX_ENDED, MAX_ENDED_BYTES = 64, 16 << 20  # streams that have ended, and of all of them


class EventsGoneError(Exception):
    """An event that a reader comes to has been forgotten."""


class EventLog:
    """A stream's events, numbered from 0. The oldest are forgotten where all of them have more than max_bytes, but for the newest.

    first: the number of the oldest that is kept. num_bytes: of those that are kept. ended: whether no event comes any more.
    """

    def __init__(self, max_bytes: int = MAX_LOG_BYTES):
        self.first: int = 0
        self.num_bytes: int = 0
        self._max_bytes = max_bytes
        self._events: deque[bytes] = deque()
        self.ended: bool = False
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """Of the events up to now, forgotten ones too."""
        return self.first + len(self._events)

    def add(self, event: bytes) -> None:
        """The next event."""
        self._events.append(event)
        self.num_bytes += len(event)
        while self.num_bytes > self._max_bytes and len(self._events) > 1:
            self.num_bytes -= len(self._events.popleft())
            self.first += 1
        self._tell()

    def end(self) -> None:
        """No event comes any more."""
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, begin: int = 0) -> AsyncGenerator[bytes]:
        """The events from this number on, until the stream has ended. Raises EventsGoneError where the next one has been forgotten:
        who reads too slowly sees no gap."""
        number = begin
        while True:
            while self.first <= number < self.count:
                yield self._events[number - self.first]
                number += 1
            if number < self.first:
                raise EventsGoneError(f"the events before {self.first} are not kept any more")
            if self.ended:
                return
            await self._changed.wait()


class EndedLogs:
    """The logs of streams that have ended: the oldest are forgotten first."""

    def __init__(self, max_logs: int = MAX_ENDED, max_bytes: int = MAX_ENDED_BYTES):
        self._max_logs, self._max_bytes = max_logs, max_bytes
        self._logs: OrderedDict[str, EventLog] = OrderedDict()

    def put(self, name: str, log: EventLog) -> None:
        self._logs[name] = log
        while len(self._logs) > self._max_logs or sum(one.num_bytes for one in self._logs.values()) > self._max_bytes:
            self._logs.popitem(last=False)

    def get(self, name: str) -> EventLog | None:
        return self._logs.get(name)

    def delete(self, name: str) -> None:
        self._logs.pop(name, None)
