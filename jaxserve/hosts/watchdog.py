"""How long the steps of this process go on: what must end soon is timed, whatever thread it blocks.

Owns when they began and the verdict that one is late. Who waits may hang inside a call that never returns, so another thread asks.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

STEP_SECONDS = 10.0  # in which a step, or its dispatch, must end
COMPILE_SECONDS = 600.0  # that a compile for which a step waits may hold that off


class Watchdog:
    """Times what runs inside `timed`. Time in which a step waits for a compile does not count, COMPILE_SECONDS of it at most."""

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}  # by time.monotonic
        self._numbers = itertools.count()
        self._awaiting_since: float | None = None

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around a step's dispatch, or the wait for its end. Any thread, any number at once."""
        number = next(self._numbers)
        self._begun[number] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[number]

    def is_late(self, awaits_compile: bool) -> bool:
        """Whether something has taken longer than STEP_SECONDS. One thread calls it, again and again. awaits_compile: whether, on
        any host, a step waits for a program now."""
        now = time.monotonic()
        if not awaits_compile:
            self._awaiting_since = None
        else:
            self._awaiting_since = self._awaiting_since or now
            if now - self._awaiting_since <= COMPILE_SECONDS:
                for number in list(self._begun):
                    if number in self._begun:  # it may have ended meanwhile
                        self._begun[number] = now
                return False
        return any(now - begun > STEP_SECONDS for begun in list(self._begun.values()))
