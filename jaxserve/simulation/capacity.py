"""The highest request rate at which a machine still meets its objectives, by bisection.

Owns the objectives, the search over rates and the spread over seeds. Serving a rate is a function passed in, of an engine or of a
replay: nothing here knows which.

Capacity as Sarathi-Serve defines it (Agrawal et al., OSDI 2024, section 5): P99 of the time between tokens within an objective, and
a median scheduling delay of at most 2 s, without which any rate would do for a while.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from jaxserve.workloads.latency import ServedTimes

LOWEST_RATE, HIGHEST_RATE = 1e-3, 1e5  # requests a second; outside of them nothing is searched


@dataclass(frozen=True)
class Objective:
    """What must hold: `quantile` of the time between tokens within `tbt` seconds, the median scheduling delay (arrival to the first
    step that holds the request) within `delay` seconds. min_gaps: times between tokens that a quantile needs."""

    tbt: float
    quantile: float = 0.99
    delay: float = 2.0
    min_gaps: int = 10_000

    def missed_by(self, times: ServedTimes) -> bool:
        """Whether these times miss it, and so does the whole run where they are an incomplete one's."""
        return times.gap_quantile(self.quantile) > self.tbt or float(np.median(times.scheduling_delays)) > self.delay

    def __post_init__(self) -> None:
        if not (self.tbt > 0 and self.delay > 0 and 0 < self.quantile < 1):
            raise ValueError(f"tbt and delay must be above 0 seconds, the quantile between 0 and 1: {self}")


@dataclass(frozen=True)
class Trial:
    """One rate served. tbt: seconds between tokens at the quantile asked for; delay: seconds, the median; peak: most requests at
    once. complete: False where the run was broken off, so that all three may be more."""

    rate: float
    tbt: float
    delay: float
    num_gaps: int
    peak: int
    complete: bool = True

    @classmethod
    def of(cls, rate: float, times: ServedTimes, quantile: float) -> Trial:
        delay, num_gaps = float(np.median(times.scheduling_delays)), int(times.gap_counts.sum())
        return cls(rate, times.gap_quantile(quantile), delay, num_gaps, times.peak_concurrency(), times.complete)

    def meets(self, objective: Objective) -> bool:
        """ValueError if there are too few gaps to tell."""
        if self.num_gaps < objective.min_gaps:
            raise ValueError(
                f"{self.num_gaps} times between tokens are fewer than the {objective.min_gaps} that P{100 * objective.quantile:g} "
                "should come from; serve more requests"
            )
        return self.tbt <= objective.tbt and self.delay <= objective.delay

    def decides(self, objective: Objective) -> bool:
        """Whether `meets` would say the same of the whole run."""
        return self.complete or not self.meets(objective)


def capacity(serve: Callable[[float], Trial], objective: Objective, *, start: float = 1.0, precision: float = 0.02) -> float:
    """The highest rate that meets the objective, in requests a second: one whose neighbour, `precision` higher, does not. 0.0 where
    none does.

    serve: a rate -> its trial, one that decides the objective. Rates are powers of 1 + precision, so that searches for several
    objectives ask for the same ones.
    start: where the search begins; it goes up or down from there in steps that double, then bisects.

    Raises:
      ValueError: a trial has too few gaps, or no rate is too high (too few requests to overload anything).
    """
    if not 0 < precision <= 1:
        raise ValueError(f"{precision=} must be in (0, 1]")
    base = math.log1p(precision)

    def rate_of(k: int) -> float:
        return math.exp(base * k)

    trials: dict[int, Trial] = {}

    def good(k: int) -> bool:
        trials[k] = serve(rate_of(k))
        return trials[k].meets(objective)

    stride = max(1, round(math.log(1.2) / base))
    low = high = round(math.log(start) / base)
    if good(low):
        while good(high := low + stride):
            low, stride = high, 2 * stride
            if rate_of(high) > HIGHEST_RATE:
                raise ValueError(f"{rate_of(high):.3g} requests a second still meet {objective}: serve more requests")
    else:
        while not good(low := high - stride):
            high, stride = low, 2 * stride
            if trials[low].peak == 1 or rate_of(low) < LOWEST_RATE:
                return 0.0  # each request had the machine to itself when it was missed: going slower helps nobody
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return rate_of(low)


@dataclass(frozen=True)
class Spread:
    """A mean over seeds, and the half-width of its 95% confidence interval (nan from one seed)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        n = len(values)
        if n == 1:
            return cls(values[0], math.nan)
        t = float(stdtrit(n - 1, 0.975))  # Student's, two-sided
        return cls(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n))

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if math.isnan(self.half_width) else f"{self.mean:.3g} ± {self.half_width:.2g}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """The ratio of two capacities over the same seeds, paired; None where one of theirs is 0."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)]) if all(theirs) else None
