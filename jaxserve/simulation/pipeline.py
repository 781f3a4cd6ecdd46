"""Pipeline parallelism in virtual time: stages that each run one micro-batch, and what time they lose to waiting.

Owns the micro-batches in flight (each its own schedule of the real scheduler, at most one a stage), the stages' times, and the
account of bubbles. The scheduler keeps the requests of a micro-batch in flight out of every other until it returns.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.buckets.padding import PaddingAccount
from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.scheduling.bubbles import Bubbles, bubbles
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import DemandLog
from jaxserve.scheduling.schedule import Schedule, SchedulerStats
from jaxserve.simulation.decode_runs import kv_tokens_of_run
from jaxserve.simulation.pipeline_runs import num_certain_rounds, time_turns
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replay import Replay, replay, serve
from jaxserve.simulation.replica import TOKEN, Replica, SimulatedEngine
from jaxserve.step_times.fitted import StepTimes
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


@dataclass(frozen=True)
class PipelineReplay:
    """What a workload did on a pipeline. One entry a micro-batch; sends: seconds between two stages."""

    times: ServedTimes
    demands: DemandLog
    buckets: list[Bucket]
    starts: np.ndarray  # f64[steps, stages], when each stage began it
    seconds: np.ndarray  # f64[steps, stages]
    sends: np.ndarray  # f64[steps, stages - 1], from each stage to the next
    padding: PaddingAccount
    stats: SchedulerStats

    @property
    def duration(self) -> float:
        return self.times.duration

    @property
    def bubbles(self) -> Bubbles:
        return bubbles(self.starts, self.seconds, self.sends, self.demands.tokens > self.demands.decodes)


@dataclass(frozen=True)
class LongestGaps:
    """The StepTimes that a dynamic budget goes by on a pipeline: not of a step in one stage, but of the longest time between tokens
    that steps like it can make.

    That is a turn of the longest stage for each stage, one more for a first stage that another step has just taken, the sends, and
    the host before both steps. With two stages no gap is longer, in whatever order steps come; with more, unlike steps in flight
    can hold up each other further.
    """

    stages: tuple[StepTimes, ...]
    send_seconds: Callable[[int, int], float]

    @property
    def page_size(self) -> int:
        return self.stages[0].page_size

    @property
    def host_seconds(self) -> float:
        return self.stages[0].host_seconds

    @property
    def window(self) -> int | None:
        return self.stages[0].window

    def sends(self, num_tokens: int) -> list[float]:
        """Seconds from each stage to the next."""
        return [self.send_seconds(num_tokens, stage) for stage in range(len(self.stages) - 1)]

    def coefficients(self, bucket: Bucket) -> np.ndarray:
        turns = (len(self.stages) + 1) * np.max([stage.coefficients(bucket) for stage in self.stages], axis=0)
        return turns + [sum(self.sends(bucket.tokens)) + 2 * self.host_seconds, 0.0, 0.0]

    def body_seconds(self, bucket: Bucket, kv_tokens: Any = 0, pairs: Any = 0) -> Any:
        base, per_kv_token, per_pair = self.coefficients(bucket)
        return base + per_kv_token * kv_tokens + per_pair * pairs

    def head_seconds(self, rows: int) -> float:
        return (len(self.stages) + 1) * max(stage.head_seconds(rows) for stage in self.stages)

    def seconds(self, bucket: Bucket, head_rows: int, kv_tokens: float, pairs: float) -> float:
        return float(self.body_seconds(bucket, kv_tokens, pairs)) + self.head_seconds(head_rows)


class PipelineReplica(SimulatedEngine):
    """An engine of several stages. stages: step times of each, the last one's head included. send_seconds: (num_tokens, stage) ->
    seconds from that stage to the next. A dynamic budget holds for steps of prompts alone too, which others' decodes wait behind.

    There is one scheduler, and whatever it schedules while a micro-batch is in flight is another micro-batch.
    """

    now: float

    def __init__(
        self,
        records: RequestRecords,
        plan: BucketPlan | UnpaddedPlan,
        stages: Sequence[StepTimes],
        send_seconds: Callable[[int, int], float],
        limits: SchedulerConfig,
        num_pages: int,
        *,
        prefix_caching: bool,
        objective: float | None = None,
    ):
        gaps, options = LongestGaps(tuple(stages), send_seconds), {"prefix_caching": prefix_caching, "objective": objective}
        super().__init__(records, plan, gaps, limits, num_pages, budget_every_step=True, hides_in_flight=True, **options)
        self.stages: tuple[StepTimes, ...] = gaps.stages
        self._gaps = gaps
        self._free = [0.0] * len(stages)  # when each stage has ended its last micro-batch
        self._in_flight: deque[tuple[Schedule, float]] = deque()
        self._may_run = False  # whether all that happened since the last turn is that a micro-batch was sent
        self._starts, self._seconds, self._sends = array("d"), array("d"), array("d")  # a micro-batch after the other

    @property
    def bubbles(self) -> Bubbles:
        """Of the micro-batches so far."""
        demands = self.steps.demands
        return bubbles(*self.stage_times, demands.tokens > demands.decodes)

    @property
    def stage_times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(starts, seconds, sends) as PipelineReplay has them."""
        starts, seconds = (np.array(column).reshape(-1, len(self.stages)) for column in (self._starts, self._seconds))
        return starts, seconds, np.array(self._sends).reshape(len(starts), len(self.stages) - 1)

    def submit(self, row: int) -> None:
        super().submit(row)
        self._may_run = False

    def turn(self, until: float = math.inf) -> bool:
        """Schedules a micro-batch, or waits for one to return, or, where nothing can be scheduled, for `until`; or sends all in
        flight down the stages again and again, scheduled before `until`. False if there is nothing to compute."""
        may_run, self._may_run = self._may_run, False
        if may_run and self._run_of_decodes(until):
            return True
        flying = self._in_flight
        if flying and flying[0][1] <= self.now:
            self._update(*flying.popleft())
            return True
        if len(flying) < len(self.stages):
            schedule = self.scheduler.schedule()
            if schedule is not None:
                flying.append((schedule, self._dispatch(schedule)))
                self._may_run = True
                return True
            if not flying:
                return False
            if until < flying[0][1]:
                self.now = max(self.now, until)
                return True
        self.now = max(self.now, flying[0][1])
        return True

    def _dispatch(self, schedule: Schedule) -> float:
        """Sends a micro-batch down the stages; when its tokens are there. The next is scheduled when the first stage is free."""
        demand, bucket, head_rows = self._demand(schedule)
        starts, seconds = [], []
        sends = self._gaps.sends(demand.tokens)
        arrives = self.now + self.stages[0].host_seconds
        for i, stage in enumerate(self.stages):
            start = max(arrives, self._free[i])
            seconds.append(stage.seconds(bucket, head_rows, demand.kv_tokens, demand.pairs))
            self._free[i] = start + seconds[-1]
            arrives = self._free[i] + (sends[i] if i < len(sends) else 0.0)
            starts.append(start)
        self._begin(schedule, starts[0])
        self.steps.add(demand, bucket, head_rows, starts[0], sum(seconds))
        self._starts.extend(starts)
        self._seconds.extend(seconds)
        self._sends.extend(sends)
        self.now = self._free[0]
        return self._free[-1]

    def _run_of_decodes(self, until: float) -> bool:
        """Several rounds of the micro-batches in flight at once where they are certain; False, and nothing done, where they are
        not. It begins and ends as a micro-batch has just been sent."""
        scheduler, window = self.scheduler, self.step_times.window
        batches, returns = [batch for batch, _ in self._in_flight], [end for _, end in self._in_flight]
        most, k = num_certain_rounds(scheduler, batches), len(batches)
        if not most:
            return False
        sizes = [batch.num_seqs for batch in batches]
        buckets = [self.plan.select(size, size, 1) for size in sizes]
        head_rows = [self.plan.select_head_rows(size) for size in sizes]
        if math.isfinite(until):  # a round takes no less than one of its micro-batches that reads nothing
            most = min(most, int((until - self.now) / sum(s.seconds(buckets[0], head_rows[0], 0, 0) for s in self.stages)) + 2)
        kv_tokens = np.stack([kv_tokens_of_run(scheduler, batch.rows, most, window) for batch in batches], axis=1)
        seconds = np.empty((most, k, len(self.stages)))
        for i, stage in enumerate(self.stages):
            for j, (bucket, rows) in enumerate(zip(buckets, head_rows, strict=True)):
                seconds[:, j, i] = stage.body_seconds(bucket, kv_tokens[:, j], 0) + stage.head_seconds(rows)
        sends = [self._gaps.sends(size) for size in sizes]
        turns = seconds.reshape(most * k, -1).tolist()
        starts, back = time_turns(self.now, until, self._free, returns, turns, sends, self.stages[0].host_seconds)
        n = len(starts) // k
        if not n:
            return False
        turns, starts, returns = turns[: n * k], starts[: n * k], returns + back[: n * k]
        self.steps.add_decodes(sizes, kv_tokens[:n], buckets, head_rows, [s[0] for s in starts], [sum(s) for s in turns])
        self._starts.extend(itertools.chain.from_iterable(starts))
        self._seconds.extend(itertools.chain.from_iterable(turns))
        self._sends.extend(list(itertools.chain.from_iterable(sends)) * n)
        self._skip_rounds(n, returns)
        self._free = [start + step for start, step in zip(starts[-1], turns[-1], strict=True)]
        self.now = self._free[0]
        return True

    def _skip_rounds(
        self,
        n: int,
        returns: list[float],  # [k * (n + 1)]: of the k micro-batches in flight, and of each in its next n turns
    ) -> None:
        """Takes in the tokens of n certain rounds; what is in flight then are the last of them."""
        batches = [batch for batch, _ in self._in_flight]
        k = len(batches)
        for i, batch in enumerate(batches):
            rows, times = self._rows_of(batch.requests), returns[i : n * k : k]
            self.records.take(rows, times[0], float(self.records.last[rows[0]]))
            self.records.take_run(rows, times)
            batches[i] = replace(batch, step_id=batch.step_id + n * k, starts=batch.starts + n)
        self._in_flight = deque(zip(batches, returns[n * k :], strict=True))
        self._last_update = returns[n * k - 1]
        self.scheduler.skip_decodes(n, TOKEN, k)


def replay_pipeline(
    workload: Workload,
    plan: BucketPlan | UnpaddedPlan,
    stages: Sequence[StepTimes],
    send_seconds: Callable[[int, int], float],
    limits: SchedulerConfig,
    num_pages: int,
    *,
    max_concurrency: int | None = None,
    objective: float | None = None,
    give_up: Callable[[ServedTimes], bool] | None = None,
) -> PipelineReplay:
    """Serves `workload` to its end on a pipeline of stages. Arguments and errors as `replay`'s; with one stage it is `replay` with
    async_scheduling=False, since nobody's next step is scheduled before his last one's token is back.

    stages, send_seconds: as PipelineReplica's, `Deployment.stages()` and `Deployment.send_seconds` for example. limits: of all
    micro-batches together but for max_num_batched_tokens, which is each one's. objective: seconds between tokens, by a
    dynamic budget (LongestGaps); None: none.
    """
    records = RequestRecords(workload)
    prefix_caching = any(r.prompt_token_ids for r in workload.requests)
    replica = PipelineReplica(
        records, plan, stages, send_seconds, limits, num_pages, prefix_caching=prefix_caching, objective=objective
    )
    times = serve(records, replica, max_concurrency, give_up)
    steps = replica.steps
    return PipelineReplay(
        times,
        steps.demands,
        steps.buckets,
        *replica.stage_times,
        steps.padding,
        replica.stats,
    )


def make_replica(
    records: RequestRecords,
    plan: BucketPlan | UnpaddedPlan,
    stages: Sequence[StepTimes],
    send_seconds: Callable[[int, int], float],
    limits: SchedulerConfig,
    num_pages: int,
    **options: Any,  # prefix_caching, objective
) -> Replica | PipelineReplica:
    """An engine of so many stages; one of one stage runs a step ahead."""
    if len(stages) == 1:
        return Replica(records, plan, stages[0], limits, num_pages, **options)
    return PipelineReplica(records, plan, stages, send_seconds, limits, num_pages, **options)


def replay_stages(
    workload: Workload,
    plan: BucketPlan | UnpaddedPlan,
    stages: Sequence[StepTimes],
    send_seconds: Callable[[int, int], float],
    limits: SchedulerConfig,
    num_pages: int,
    **options: Any,  # max_concurrency, objective, give_up
) -> Replay | PipelineReplay:
    """`workload` on what make_replica makes: `replay` on one stage, else `replay_pipeline`."""
    if len(stages) == 1:
        return replay(workload, plan, stages[0], limits, num_pages, **options)
    return replay_pipeline(workload, plan, stages, send_seconds, limits, num_pages, **options)
