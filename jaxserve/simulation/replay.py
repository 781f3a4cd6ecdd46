"""A workload through the real scheduler in virtual time.

Owns the clock and the loop of the engine (a step is scheduled while the one before runs, its tokens come back one step late); the
scheduler, the page pool and the choice of buckets are the engine's own, a step's time is a StepTimeModel's. No tokens are
computed: requests end by length, and every prompt is its own (or begins as others of its group do, where prefixes are cached).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from jaxserve.buckets import Bucket, BucketPlan, PaddingAccount
from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.demand import DemandLog, step_demand
from jaxserve.latency import ServedTimes
from jaxserve.page_pool import PagePool
from jaxserve.request import Request, SamplingParams
from jaxserve.schedule import Schedule, SchedulerStats
from jaxserve.scheduler import Scheduler
from jaxserve.simulation.step_time import StepTimeModel


_ORDER = attrgetter("order")  # of adding: the row of the workload


@dataclass(frozen=True)
class Load:
    """What arrives when: i64[n] prompt tokens, i64[n] output tokens, f64[n] seconds, in order of arrival.

    Raises:
      ValueError: nothing arrives, lengths below 1, or times that fall.
    """

    num_prompt: np.ndarray
    num_output: np.ndarray
    arrivals: np.ndarray

    def __post_init__(self):
        for name, kind in (("num_prompt", np.int64), ("num_output", np.int64), ("arrivals", np.float64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        if not len(self.num_prompt):
            raise ValueError("the workload is empty: the trace has no rows, or none of them fits")
        if not len(self.num_prompt) == len(self.num_output) == len(self.arrivals):
            raise ValueError("a workload needs as many prompt lengths, output lengths and arrivals")
        if self.num_prompt.min() < 1 or self.num_output.min() < 1:
            raise ValueError("every request of a workload needs one prompt token and one output token at least")
        if (np.diff(self.arrivals) < 0).any():
            raise ValueError("arrivals must not fall: sort the workload by its times")

    def __len__(self) -> int:
        return len(self.num_prompt)

    @property
    def at_once(self) -> bool:
        """Whether all requests arrive together."""
        return bool((self.arrivals == self.arrivals[0]).all())


@dataclass(frozen=True)
class Replay:
    """What a workload did. demands, buckets, seconds, starts: one entry a step (seconds: on the device)."""

    times: ServedTimes
    demands: DemandLog
    buckets: list[Bucket]
    starts: np.ndarray  # f64[steps], when the device began each
    seconds: np.ndarray  # f64[steps]
    padding: PaddingAccount
    stats: SchedulerStats

    @property
    def duration(self) -> float:
        return self.times.duration


class _Clock:
    """Host and device time of a pipeline of steps. The host dispatches, the device runs one step after another."""

    def __init__(self, host_seconds: float):
        self.now = 0.0  # of the host
        self._device_free = 0.0
        self._host_seconds = host_seconds

    def dispatch(self, seconds: float) -> tuple[float, float]:
        """(start, end) on the device of a step that takes `seconds`."""
        self.now += self._host_seconds
        start = max(self.now, self._device_free)
        self._device_free = start + seconds
        return start, self._device_free


def replay(
    load: Load,
    plan: BucketPlan,
    step_times: StepTimeModel,
    limits: SchedulerConfig,
    num_pages: int,
    *,
    async_scheduling: bool = True,
    page_size: int | None = None,
) -> Replay:
    """Serves `load` to its end in virtual time.

    Raises:
      ValueError: the plan can't hold the limits, or a request could never be served (it names the row of the workload).
    """
    plan.check(limits.max_num_seqs, limits.max_num_batched_tokens)
    cache = CacheConfig(page_size=page_size or step_times.page_size, num_pages=num_pages, enable_prefix_caching=False)
    scheduler = Scheduler(limits, PagePool(cache.num_pages, cache.page_size, cache.enable_prefix_caching))
    run = _Run(load, plan, step_times, scheduler)
    clock, in_flight = _Clock(step_times.host_seconds), deque()
    while True:
        run.admit(clock.now)
        schedule = scheduler.schedule()
        if schedule is not None:
            in_flight.append((schedule, run.dispatch(schedule, clock)))
        elif not in_flight:
            if run.done:
                return run.result()
            clock.now = run.next_arrival
            continue
        depth = 1 if schedule is not None and async_scheduling else 0
        while len(in_flight) > depth:
            schedule, end = in_flight.popleft()
            clock.now = max(clock.now, end)
            run.update(schedule, clock.now)


class _Run:
    """The books of one replay."""

    def __init__(self, load: Load, plan: BucketPlan, step_times: StepTimeModel, scheduler: Scheduler):
        n = len(load)
        self.load, self.plan, self.step_times, self.scheduler = load, plan, step_times, scheduler
        self.page_size = scheduler.pool.page_size
        self.padding = PaddingAccount()
        self.first = np.full(n, np.nan)
        self._token_times = np.full(n, np.nan)  # of each request's last token
        self._arrived = 0
        self._rows: list[tuple[int, ...]] = []
        self._buckets: list[Bucket] = []
        self._starts: list[float] = []
        self._seconds: list[float] = []
        self._gaps: list[np.ndarray] = []
        self._tokens = np.ones(scheduler.config.max_num_seqs, np.int32)
        self._params: dict[int, SamplingParams] = {}

    def admit(self, now: float) -> None:
        """Adds what has arrived by now."""
        load = self.load
        while self._arrived < len(load) and load.arrivals[self._arrived] <= now:
            i = self._arrived
            num_output = int(load.num_output[i])
            params = self._params.get(num_output)
            if params is None:
                params = self._params[num_output] = SamplingParams(max_tokens=num_output, ignore_eos=True)
            request = Request(f"r{i}", [1] * int(load.num_prompt[i]), params, arrival=float(load.arrivals[i]))
            try:
                self.scheduler.add(request)
            except ValueError as error:
                raise ValueError(f"row {i} of the workload: {error}") from None
            assert request.order == i
            self._arrived += 1

    @property
    def done(self) -> bool:
        return self._arrived == len(self.load)

    @property
    def next_arrival(self) -> float:
        return float(self.load.arrivals[self._arrived])

    def dispatch(self, schedule: Schedule, clock: _Clock) -> float:
        """Runs a step; the time at which its tokens are there."""
        row = step_demand(schedule, self.page_size)
        tokens, seqs, _, max_q_len, samples, kv_tokens, pairs = row
        bucket = self.plan.select(tokens, seqs, max_q_len)
        head_rows = self.plan.select_head_rows(samples) if samples else 0
        seconds = self.step_times.seconds(bucket, head_rows, kv_tokens, pairs)
        start, end = clock.dispatch(seconds)
        self.padding.add(bucket, tokens, head_rows, samples)
        self._rows.append(row)
        self._buckets.append(bucket)
        self._starts.append(start)
        self._seconds.append(seconds)
        return end

    def update(self, schedule: Schedule, now: float) -> None:
        """Takes in the tokens of a step."""
        result = self.scheduler.update(schedule, self._tokens[: schedule.num_seqs])
        who = np.fromiter(map(_ORDER, result.requests), np.intp, len(result.requests))
        before = self._token_times[who]
        self._token_times[who] = now
        first = np.isnan(before)
        self.first[who[first]] = now
        self._gaps.append(now - before[~first])

    def result(self) -> Replay:
        values, counts = np.unique(np.round(np.concatenate(self._gaps), 9), return_counts=True)
        load = self.load
        times = ServedTimes(load.arrivals, self.first, self._token_times, load.num_prompt, load.num_output, values, counts)
        demands = DemandLog.from_rows(self._rows)
        starts, seconds = np.array(self._starts), np.array(self._seconds)
        return Replay(times, demands, self._buckets, starts, seconds, self.padding, self.scheduler.stats())
