"""How late an event loop is: what an event that comes at any time waits until the loop turns to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import numpy as np

INTERVAL = 0.005  # seconds between two samples


class LoopLag:
    """Samples of the running loop, from `run` until it is cancelled."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(INTERVAL)
            self._lags.append(max(0.0, time.perf_counter() - started - INTERVAL))

    def take(self) -> dict[str, float]:
        """Quantiles in milliseconds of what was sampled since the last call."""
        lags, self._lags = with_missed(self._lags), []
        names = {"median": 0.5, "p99": 0.99, "max": 1.0}
        return {f"{name}_loop_lag_ms": 1000 * float(np.quantile(lags, q)) if len(lags) else 0.0 for name, q in names.items()}


def with_missed(lags: Iterable[float]) -> np.ndarray:
    """The samples, in seconds, and those that a late loop did not take: of a wait of 100 ms there is one sample, and the events
    that would have come 5, 10, ... ms later wait for the rest of it (as HdrHistogram corrects for coordinated omission)."""
    return np.array([left for lag in lags for left in np.arange(lag, -1e-9, -INTERVAL)])
