"""Whether a server behind a router takes requests, by the checks and answers counted so far. Knows no connection and no clock."""

from __future__ import annotations


class BackendHealth:
    """Whether a server is up. The first check decides. Later, max_failures in a row take it out, and min_successes bring it
    back."""

    def __init__(self, max_failures: int, min_successes: int):
        if max_failures < 1 or min_successes < 1:
            raise ValueError(f"{max_failures=} and {min_successes=} must be at least 1")
        self._max_failures, self._min_successes = max_failures, min_successes
        self._failures, self._successes = 0, min_successes - 1
        self.up: bool = False

    def succeed(self) -> None:
        self._failures = 0
        self._successes += 1
        self.up = self.up or self._successes >= self._min_successes

    def answer(self) -> None:
        """The server has answered a request. That ends a row of failures, and does not bring it up."""
        self._failures = 0

    def fail(self) -> None:
        """The server did not answer. One failure alone does not take it out, unless max_failures is 1."""
        self._failures += 1
        self._successes = 0
        self.up = self.up and self._failures < self._max_failures

    @property
    def gone(self) -> bool:
        """Whether it has not answered max_failures times in a row."""
        return self._failures >= self._max_failures

    def refuse(self) -> None:
        """The server says that it takes no requests: it drains, sleeps or is broken."""
        self._failures, self._successes, self.up = 0, 0, False
