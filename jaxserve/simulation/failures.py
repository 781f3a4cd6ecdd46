"""Replicas that fail in virtual time, and are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, order=True, slots=True)
class Failure:
    """A replica (by number) is lost at `time`, between two of its steps, with all that it holds; another is there `seconds` later.
    A replica that is lost already cannot be lost again: such a failure is none. Raises ValueError: a number out of range."""

    time: float
    replica: int
    seconds: float

    def __post_init__(self) -> None:
        if not (self.time >= 0 and self.seconds > 0 and self.replica >= 0):
            raise ValueError(f"{self}: time and replica must be at least 0, and seconds above 0")


def random_failures(number: int, num_replicas: int, end: float, seconds: float, seed: int) -> list[Failure]:
    """So many failures in [0, end), each of any replica at any time, in their order."""
    rng = np.random.default_rng(seed)
    times, replicas = np.sort(rng.uniform(0, end, number)), rng.integers(num_replicas, size=number)
    return [Failure(time, replica, seconds) for time, replica in zip(times.tolist(), replicas.tolist(), strict=True)]


def of_replicas(failures: Sequence[Failure], first: int, number: int) -> list[Failure]:
    """The failures of `number` replicas from `first` on, which are then counted from 0."""
    return [Failure(f.time, f.replica - first, f.seconds) for f in failures if first <= f.replica < first + number]
