"""Whether what a preempted request has lost comes back sooner from a store or by computing it again.

Owns the two times of a page, as measured: that of loads, and that of steps that compute prompts. Both are averages in which the
last ones count most.
"""

from __future__ import annotations

NEWEST = 0.25  # weight of the last measurement
TRY_EVERY = 16  # of loads that would be slower one is made all the same: the store may be faster by now


class SwapPace:
    """Seconds that a page of `page_size` tokens takes, loaded and computed; None while nothing is known."""

    def __init__(self, page_size: int):
        self._page_size = page_size
        self.load_seconds: float | None = None
        self.compute_seconds: float | None = None
        self._num_refused = 0

    def loaded(self, num_pages: int, seconds: float) -> None:
        """A load of so many pages has taken so long, from when it was asked for."""
        self.load_seconds = _average(self.load_seconds, seconds / num_pages)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step, most of it of prompts, has computed so many tokens in this time."""
        self.compute_seconds = _average(self.compute_seconds, seconds / num_tokens * self._page_size)

    @property
    def load_is_faster(self) -> bool:
        """As far as it is known; where it is not, yes."""
        return self.load_seconds is None or self.compute_seconds is None or self.load_seconds <= self.compute_seconds

    def chooses_load(self) -> bool:
        """Whether to load: where it is faster, and now and then where it is not."""
        if self.load_is_faster:
            self._num_refused = 0
            return True
        self._num_refused = (self._num_refused + 1) % TRY_EVERY
        return self._num_refused == 0


def _average(before: float | None, now: float) -> float:
    return now if before is None else (1 - NEWEST) * before + NEWEST * now
