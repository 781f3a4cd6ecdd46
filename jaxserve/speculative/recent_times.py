"""How long steps of each shape took of late.

Steps are counted: a time is old when many others went by. Knows nothing of drafts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from jaxserve.buckets.plan import Bucket

NUM_TIMES = 48  # last times of a shape that count: half a second of a small model, so that a short bad moment is not its time
ENOUGH_TIMES = 3  # fewer say nothing: the first may hold a compile
RETRY_STEPS = 1000  # a shape that did not run for so many steps is timed anew,
DUE_STEPS, MOST_DOUBLINGS = 64, 2  # and one is due after so many, and after up to four times as many while
AGREEING = 0.95  # it takes so much of its time or more: what was timed in a bad moment is mended soon, at little cost

Shape = tuple[Bucket, int]  # of a step of decodes alone: its bucket, its head's rows


@dataclass
class _Timed:
    """The last times of a shape, in seconds."""

    times: deque[float]
    last: int  # at which step it ran last
    due_steps: int  # behind that, until it is due
    quartile: float | None = None  # the lower one of the times, where it was asked for since the last of them


class RecentTimes:
    """How long steps of each shape took of late, in seconds. Their lower quartile: what else the machine did is not the shape's."""

    def __init__(self, due_steps: int = DUE_STEPS) -> None:
        self._due_at_first, self._due_at_most = due_steps, due_steps << MOST_DOUBLINGS
        self._timed: dict[Shape, _Timed] = {}
        self._num_steps = 0

    def add(self, shape: Shape, seconds: float) -> None:
        timed = self._timed.get(shape)
        if timed is None or self._num_steps - timed.last > RETRY_STEPS:
            due_steps = self._due_at_first if timed is None else timed.due_steps
            timed = self._timed[shape] = _Timed(deque(maxlen=NUM_TIMES), self._num_steps, due_steps)
        if self._is_due(timed):
            before = self._quartile(timed)
            agrees = seconds >= AGREEING * before
            timed.due_steps = min(2 * timed.due_steps, self._due_at_most) if agrees else self._due_at_first
            timed.times.clear()
            timed.times += [before if agrees else seconds] * (ENOUGH_TIMES - 1)
        timed.times.append(seconds)
        timed.quartile = None
        self.skip()
        timed.last = self._num_steps

    def skip(self) -> None:
        """A step went by that is none of these."""
        self._num_steps += 1

    def is_due(self, shape: Shape) -> bool:
        """Whether its time is known, and so old that it is worth a step to see whether that moment was a bad one."""
        timed = self._timed.get(shape)
        return timed is not None and self._is_due(timed)

    def _is_due(self, timed: _Timed) -> bool:
        return len(timed.times) >= ENOUGH_TIMES and self._num_steps - timed.last > timed.due_steps

    def get(self, shape: Shape) -> float | None:
        """None: not known, or not any more."""
        timed = self._timed.get(shape)
        if timed is None or len(timed.times) < ENOUGH_TIMES or self._num_steps - timed.last > RETRY_STEPS:
            return None
        return self._quartile(timed)

    def _quartile(self, timed: _Timed) -> float:
        if timed.quartile is None:
            timed.quartile = sorted(timed.times)[len(timed.times) // 4]
        return timed.quartile

    def least(self, shape: Shape) -> float:
        """What a step of this shape takes at least, by those of no more tokens and rows that are known; 0 without."""
        (bucket, rows), known = shape, 0.0
        for other, of_rows in self._timed:
            if other.tokens <= bucket.tokens and of_rows <= rows:
                known = max(known, self.get((other, of_rows)) or 0.0)
        return known
