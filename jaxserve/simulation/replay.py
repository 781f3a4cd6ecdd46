"""A workload through the real scheduler in virtual time.

Owns when requests are sent, and the result. The engine is replica.py's (its scheduler, page pool and choice of buckets are the real
ones), a step's time is what the StepTimes say. No tokens are computed: requests end by length, and every prompt is its own (or
begins as others of its group do, where prefixes are cached).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxserve.buckets.padding import PaddingAccount
from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import DemandLog
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replica import Replica, SimulatedEngine
from jaxserve.step_times.fitted import StepTimes
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload

NUM_ASKED = 64  # times that a run asks whether to give up


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


def replay(
    workload: Workload,
    plan: BucketPlan | UnpaddedPlan,
    step_times: StepTimes,
    limits: SchedulerConfig,
    num_pages: int,
    *,
    async_scheduling: bool = True,
    prefix_caching: bool = True,
    progress: Callable[[int], object] | None = None,
    max_concurrency: int | None = None,
    objective: float | None = None,
    give_up: Callable[[ServedTimes], bool] | None = None,
) -> Replay:
    """Serves `workload` to its end in virtual time.

    max_concurrency: most requests sent and not ended; later ones are sent, and count as arrived, when an earlier one ends (closed
    loop).
    prefix_caching: requests share the pages of equal prefixes, where the workload gives token ids.
    progress: told how many requests ended, whenever some do.
    objective: seconds that a step with decodes may take, by a dynamic budget; None: none.
    give_up: asked now and then with what RequestRecords.times says of the run so far; True ends it there, its times incomplete.

    Raises:
      ValueError: the plan can't hold the limits, or a request could never be served (it names the row of the workload).
    """
    records = RequestRecords(workload, progress)
    prefix_caching = prefix_caching and any(r.prompt_token_ids for r in workload.requests)
    replica = Replica(
        records,
        plan,
        step_times,
        limits,
        num_pages,
        prefix_caching=prefix_caching,
        objective=objective,
        async_scheduling=async_scheduling,
    )
    times = serve(records, replica, max_concurrency, give_up)
    steps = replica.steps
    return Replay(times, steps.demands, steps.buckets, steps.starts, steps.seconds, steps.padding, replica.stats)


def serve(
    records: RequestRecords,
    server: SimulatedEngine,
    max_concurrency: int | None = None,
    give_up: Callable[[ServedTimes], bool] | None = None,
) -> ServedTimes:
    """Sends every request of the workload at its time, or when max_concurrency allows it, and lets the server end them all, or as
    many as give_up lets it."""
    arrivals, n = [r.arrived_at for r in records.workload.requests], len(records.sent)
    most, asked = max_concurrency or n, 0
    while True:
        while (row := records.num_sent) < n and arrivals[row] <= server.now and row - records.num_ended < most:
            if row >= most:
                records.sent[row] = max(server.now, arrivals[row])
            server.submit(row)
        room = row < n and row - records.num_ended < most
        if not server.turn(arrivals[row] if room else math.inf):
            if row == n:
                return records.times()
            server.now = arrivals[row]
        done = (row + records.num_ended) * NUM_ASKED // (2 * n)  # arriving and ending are half of a run each
        if give_up is not None and done > asked:
            asked = done
            if give_up(times := records.times(server.now)):
                return times
