"""A workload through the real scheduler in virtual time.

Owns the clock and the loop of the engine (a step is scheduled while the one before runs, its tokens come back one step late); the
scheduler, the page pool and the choice of buckets are the engine's own, a step's time is what the StepTimes say. No tokens are
computed: requests end by length, and every prompt is its own (or begins as others of its group do, where prefixes are cached).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from jaxserve.buckets import Bucket, BucketPlan, PaddingAccount
from jaxserve.config import SchedulerConfig
from jaxserve.demand import DemandLog, step_demand
from jaxserve.latency import ServedTimes
from jaxserve.page_pool import PagePool
from jaxserve.request import Request, SamplingParams
from jaxserve.schedule import Schedule, SchedulerStats
from jaxserve.scheduler import Scheduler
from jaxserve.simulation.step_time import StepTimes
from jaxserve.simulation.unpadded import UnpaddedPlan
from jaxserve.step_budget import StepBudget
from jaxserve.workloads import Workload

_ORDER = attrgetter("order")  # of adding: the row of the workload
_OTHER_IDS = 1 << 28  # beyond every vocabulary


@dataclass(frozen=True)
class Replay:
    """What a workload did. demands, buckets, seconds, starts: one entry a step (seconds: on the device).

    scheduled: f64[n], when the first step with each request began; less its arrival, the scheduling delay.
    """

    times: ServedTimes
    scheduled: np.ndarray
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
    workload: Workload,
    plan: BucketPlan | UnpaddedPlan,
    step_times: StepTimes,
    limits: SchedulerConfig,
    num_pages: int,
    *,
    async_scheduling: bool = True,
    max_concurrency: int | None = None,
    objective: float | None = None,
) -> Replay:
    """Serves `workload` to its end in virtual time.

    max_concurrency: most requests sent and not ended; later ones are sent, and count as arrived, when an earlier one ends (closed
    loop). Prefixes are cached where the workload gives token ids.
    objective: seconds that a step with decodes may take, by a dynamic budget; None: none.

    Raises:
      ValueError: the plan can't hold the limits, or a request could never be served (it names the row of the workload).
    """
    plan.check(limits.max_num_seqs, limits.max_num_batched_tokens)
    budget = None
    if objective is not None:
        budget = StepBudget(step_times, plan, objective, limits.max_num_seqs, limits.max_num_batched_tokens)
    pool = PagePool(num_pages, step_times.page_size, any(r.prompt_token_ids for r in workload.requests))
    scheduler = Scheduler(limits, pool, budget)
    run = _Run(workload, plan, step_times, scheduler, max_concurrency or len(workload.requests))
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

    def __init__(
        self, workload: Workload, plan: BucketPlan | UnpaddedPlan, step_times: StepTimes, scheduler: Scheduler, max_concurrency: int
    ):
        n = len(workload.requests)
        self.requests, self.plan, self.step_times, self.scheduler = workload.requests, plan, step_times, scheduler
        self.max_concurrency = max_concurrency
        self.sent = np.array([r.arrived_at for r in workload.requests])
        if (np.diff(self.sent) < 0).any():
            raise ValueError(f"workload {workload.name} is not in the order of its arrivals; see traffic.as_recorded")
        self._num_ended = 0
        self.page_size = scheduler.pool.page_size
        self.padding = PaddingAccount()
        self.first = np.full(n, np.nan)
        self._scheduled = np.full(n, np.nan)
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
        while not self.done and self.next_arrival <= now:
            i, request = self._arrived, self.requests[self._arrived]
            if i - self._num_ended >= self.max_concurrency:
                return
            if i >= self.max_concurrency:
                self.sent[i] = max(now, request.arrived_at)
            params = self._params.get(request.num_output_tokens)
            if params is None:
                params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
                self._params[request.num_output_tokens] = params
            # A prompt known by its length alone is like no other.
            prompt = request.prompt_token_ids or [_OTHER_IDS + i] * request.num_prompt_tokens
            request = Request(f"r{i}", list(prompt), params, arrival=float(self.sent[i]))
            try:
                self.scheduler.add(request)
            except ValueError as error:
                raise ValueError(f"row {i} of the workload: {error}") from None
            assert request.order == i
            self._arrived += 1

    @property
    def done(self) -> bool:
        return self._arrived == len(self.requests)

    @property
    def next_arrival(self) -> float:
        return self.requests[self._arrived].arrived_at

    def dispatch(self, schedule: Schedule, clock: _Clock) -> float:
        """Runs a step; the time at which its tokens are there."""
        row = step_demand(schedule, self.page_size, self.step_times.window)
        tokens, seqs, _, max_q_len, samples, kv_tokens, pairs = row
        bucket = self.plan.select(tokens, seqs, max_q_len)
        head_rows = self.plan.select_head_rows(samples) if samples else 0
        seconds = self.step_times.seconds(bucket, head_rows, kv_tokens, pairs)
        start, end = clock.dispatch(seconds)
        for request in schedule.requests[schedule.num_decodes :]:
            if np.isnan(self._scheduled[request.order]):
                self._scheduled[request.order] = start
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
        self._num_ended += len(result.finished)

    def result(self) -> Replay:
        values, counts = np.unique(np.round(np.concatenate(self._gaps), 9), return_counts=True)
        num_prompt, num_output = np.array([(r.num_prompt_tokens, r.num_output_tokens) for r in self.requests]).T
        times = ServedTimes(self.sent, self.first, self._token_times, num_prompt, num_output, values, counts, self._scheduled)
        demands = DemandLog.from_rows(self._rows)
        starts, seconds = np.array(self._starts), np.array(self._seconds)
        return Replay(times, self._scheduled, demands, self._buckets, starts, seconds, self.padding, self.scheduler.stats())
