"""One engine in virtual time: the real scheduler and page pool, and a clock in place of a device.

Owns the loop of the engine (a step is scheduled while the one before runs, its tokens come back one step late) and its times. Where
requests come from is replay.py's and cluster.py's; a pipeline of stages is pipeline.py's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import StepDemand, step_demand
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.schedule import Schedule, SchedulerStats
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_budget import StepBudget
from jaxserve.simulation.decode_runs import kv_tokens_of_run, num_certain_steps
from jaxserve.simulation.records import RequestRecords, StepRecords
from jaxserve.step_times.fitted import StepTimes

_ORDER = attrgetter("order")  # of adding: the place in a replica's _rows
TOKEN = 1  # what every step samples
_OTHER_IDS = 1 << 28  # beyond every vocabulary


class SimulatedEngine(ABC):
    """What replicas share: a scheduler, its requests as rows of the workload, and the records.

    plan, step_times, limits, num_pages, objective: as `replay`'s. prefix_caching: whether prompts with token ids share pages.
    budget_every_step: as StepBudget's every_step. hides_in_flight: as Scheduler's.
    """

    def __init__(
        self,
        records: RequestRecords,
        plan: BucketPlan | UnpaddedPlan,
        step_times: StepTimes,
        limits: SchedulerConfig,
        num_pages: int,
        *,
        prefix_caching: bool,
        objective: float | None = None,
        budget_every_step: bool = False,
        hides_in_flight: bool = False,
    ):
        plan.check(limits.max_num_seqs, limits.max_num_batched_tokens)
        budget = None
        if objective is not None:
            seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
            budget = StepBudget(step_times, plan, objective, seqs, tokens, every_step=budget_every_step)
        self.records = records
        self.plan = plan
        self.step_times = step_times
        pool = PagePool(num_pages, step_times.page_size, prefix_caching)
        self.scheduler: Scheduler = Scheduler(limits, pool, budget, hides_in_flight=hides_in_flight)
        self.steps: StepRecords = StepRecords()
        self.now: float = 0.0  # of the host: whatever arrived by now is known to the next schedule
        self._rows: list[int] = []  # of the workload, in order of adding
        self._tokens = np.full(limits.max_num_seqs, TOKEN, np.int32)
        self._params: dict[int, SamplingParams] = {}
        self._last_update = math.nan

    def submit(self, row: int) -> None:
        """A request of the workload arrives. ValueError, which names the row, if it could never be served."""
        given = self.records.workload.requests[row]
        params = self._params.get(given.num_output_tokens)
        if params is None:
            params = SamplingParams(max_tokens=given.num_output_tokens, ignore_eos=True)
            self._params[given.num_output_tokens] = params
        # A prompt known by its length alone is like no other.
        prompt = list(given.prompt_token_ids or ()) or [_OTHER_IDS + row] * given.num_prompt_tokens
        request = Request(f"r{row}", prompt, params, arrival=float(self.records.sent[row]))
        try:
            self.scheduler.add(request)
        except ValueError as error:
            raise ValueError(f"row {row} of the workload: {error}") from None
        self._rows.append(row)
        self.records.num_sent += 1

    @property
    def unfinished(self) -> list[tuple[int, int]]:
        """(row of the workload, output tokens so far) of each request that has not ended, in their order of arrival here."""
        requests = sorted(self.scheduler.requests.by_id.values(), key=_ORDER)
        return [(self._rows[request.order], request.num_output_tokens) for request in requests]

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        return self.scheduler.num_waiting, self.scheduler.num_running

    @property
    def quiet_until(self) -> float:
        """Until when `load` stays what it is, for certain, if nothing is submitted. Who goes by it alone need not take turns."""
        return self.now if any(self.load) else math.inf

    @property
    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    @abstractmethod
    def turn(self, until: float = math.inf) -> bool:
        """The next thing that happens, and perhaps more that begins before `until`. False if there is nothing to compute."""

    def _demand(self, schedule: Schedule) -> tuple[StepDemand, Bucket, int]:
        """(demand, bucket, rows of the head) of a step."""
        demand = step_demand(schedule, self.step_times.page_size, self.step_times.window)
        head_rows = self.plan.select_head_rows(demand.samples) if demand.samples else 0
        return demand, self.plan.select(demand.tokens, demand.seqs, demand.max_q_len), head_rows

    def _begin(self, schedule: Schedule, start: float) -> None:
        """Notes who is computed for the first time, perhaps."""
        if schedule.num_decodes < schedule.num_seqs:
            self.records.schedule([self._rows[r.order] for r in schedule.requests[schedule.num_decodes :]], start)

    def _update(self, schedule: Schedule, now: float) -> None:
        """Takes in the tokens of a step."""
        result = self.scheduler.update(schedule, self._tokens[: schedule.num_seqs])
        self.records.take(self._rows_of(result.requests), now, self._last_update)
        self._last_update = now
        self.records.end(len(result.finished))

    def _rows_of(self, requests: list[Request]) -> np.ndarray:
        """intp[n]: their rows of the workload."""
        rows = self._rows
        return np.fromiter([rows[order] for order in map(_ORDER, requests)], np.intp, len(requests))


class Replica(SimulatedEngine):
    """An engine of one stage. async_scheduling: a step is dispatched before the tokens of the one before are back."""

    now: float

    def __init__(self, *args: Any, async_scheduling: bool = True, **options: Any):
        super().__init__(*args, **options)
        self._depth = int(async_scheduling)
        self._in_flight: deque[tuple[Schedule, float]] = deque()  # with the time at which its tokens are there
        self._device_free = 0.0

    def turn(self, until: float = math.inf) -> bool:
        """One step, or a run of decodes that all begin before `until`. False if there is nothing to compute."""
        if self._run_of_decodes(until):
            return True
        schedule = self.scheduler.schedule()
        if schedule is not None:
            self._in_flight.append((schedule, self._dispatch(schedule)))
        elif not self._in_flight:
            return False
        depth = self._depth if schedule is not None else 0
        while len(self._in_flight) > depth:
            schedule, end = self._in_flight.popleft()
            self.now = max(self.now, end)
            self._update(schedule, self.now)
        return True

    @property
    def quiet_until(self) -> float:
        """As `SimulatedEngine.quiet_until`: as long as steps are certain that decode who runs."""
        num_steps, bucket, head = self._certain_run()
        if not num_steps:
            return super().quiet_until
        return self.now + max(0, num_steps - 2) * (float(self.step_times.body_seconds(bucket)) + head)

    def _certain_run(self) -> tuple[int, Bucket, float]:
        """(steps of decodes that are certain, 0 if there are none; their bucket; seconds of their head)."""
        scheduler, flying = self.scheduler, self._in_flight
        num_seqs = scheduler.num_running
        nothing = 0, Bucket(0, 0, 0), 0.0
        if flying and (flying[0][0].num_decodes != num_seqs or flying[0][0].num_seqs != num_seqs):
            return nothing
        most = num_certain_steps(scheduler, len(flying))
        if not most:
            return nothing
        return most, self.plan.select(num_seqs, num_seqs, 1), self.step_times.head_seconds(self.plan.select_head_rows(num_seqs))

    def _dispatch(self, schedule: Schedule) -> float:
        """The host dispatches a step, the device runs one after another; when its tokens are there."""
        demand, bucket, head_rows = self._demand(schedule)
        seconds = self.step_times.seconds(bucket, head_rows, demand.kv_tokens, demand.pairs)
        self.now += self.step_times.host_seconds
        start = max(self.now, self._device_free)
        self._device_free = start + seconds
        self._begin(schedule, start)
        self.steps.add(demand, bucket, head_rows, start, seconds)
        return self._device_free

    def _run_of_decodes(self, until: float) -> bool:
        """Several steps at once where they are certain; False, and nothing done, where they are not."""
        most, bucket, head = self._certain_run()
        if not most:
            return False
        scheduler, flying = self.scheduler, self._in_flight
        num_seqs = scheduler.num_running
        head_rows = self.plan.select_head_rows(num_seqs)
        if math.isfinite(until):  # a step takes no less than one that reads nothing
            most = min(most, int((until - self.now) / (float(self.step_times.body_seconds(bucket)) + head)) + 3)
        kv_tokens = kv_tokens_of_run(scheduler, scheduler.rows.order, most, self.step_times.window)
        seconds = (self.step_times.body_seconds(bucket, kv_tokens, 0) + head).tolist()
        rows = self._rows_of(scheduler.rows.requests_at(scheduler.rows.order))
        starts, updates, now, free = [], [], self.now, self._device_free
        end = flying[0][1] if flying else 0.0  # of the step whose tokens come back next
        for step in seconds:
            if now >= until:
                break
            now += self.step_times.host_seconds
            start = max(now, free)
            free = start + step
            now = max(now, end if flying else free)
            end = free
            starts.append(start)
            updates.append(now)
        n = len(starts)
        if n < 2:
            return False
        self.records.take(rows, updates[0], self._last_update)
        self.records.take_run(rows, updates)
        self._last_update = now
        self.steps.add_decodes([num_seqs], kv_tokens[:n, None], [bucket], [head_rows], starts, seconds[:n])
        scheduler.skip_decodes(n, TOKEN)
        if flying:
            last = flying[0][0]
            flying[0] = replace(last, step_id=last.step_id + n, starts=last.starts + n), free
        self.now, self._device_free = now, free
        return True
