"""Rounds booked at once against the same micro-batches one by one: whatever a replay holds, and the scheduler, bit for bit."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.routing.policy import make_policy
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import COLUMNS
from jaxserve.simulation import pipeline
from jaxserve.simulation.cluster import replay_cluster
from jaxserve.simulation.pipeline import PipelineReplay, PipelineReplica, replay_pipeline
from jaxserve.simulation.pipeline_runs import time_turns
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.hardware import GPUS
from jaxserve.step_times.model_shapes import MODELS
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.selection import chosen
from tests.simulation.machines import MODEL
from tests.simulation.test_replay import POLICIES, name_of

PLAN = BucketPlan((2, 4, 8), ((16, 8), (64, 8)), (2, 8))
HOST = replace(MODEL, host_seconds=3e-4)
SLOW = replace(HOST, slowdown=4.0)
STAGES = {
    "two": (HOST, replace(HOST, slowdown=1.3)),
    "three": (HOST, replace(HOST, slowdown=0.7), replace(HOST, slowdown=1.1)),
    "slow_first": (SLOW, HOST, HOST),  # the two others are back before it is through with one: micro-batches become one
}
LIMITS = SchedulerConfig(max_model_len=220, max_num_batched_tokens=64, max_num_seqs=8)


def send_seconds(num_tokens: int, stage: int) -> float:
    return 1e-4 * num_tokens * (1 + stage)


def long_outputs(n: int, seed: int, rate: float) -> Workload:
    rng = np.random.default_rng(seed)
    prompts, outputs, times = rng.integers(1, 60, n), rng.integers(1, 120, n), np.cumsum(rng.exponential(1 / rate, n))
    sizes = zip(prompts.tolist(), outputs.tolist(), times.tolist(), strict=True)
    return Workload("long outputs", tuple(WorkloadRequest(*r) for r in sizes))


@dataclass
class Log:
    """states: a replica's when it has sent so many micro-batches, just after the last. sizes: micro-batches of each turn that sent
    several."""

    states: dict[int, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)


def state(replica: PipelineReplica) -> tuple[Any, ...]:
    """All that decides what a replica does next, and its counts."""
    scheduler, rows = replica.scheduler, replica.scheduler.rows
    names = ("num_computed", "prefill_end", "num_known", "limit", "capacity", "num_uploaded", "generation")
    return (
        (replica.now, replica._last_update, list(replica._free), replica.scheduler._num_holding.tolist()),
        [(b.step_id, b.rows.tolist(), b.starts.tolist(), b.generations.tolist(), end) for b, end in replica._in_flight],
        [getattr(rows, name)[rows.order].tolist() for name in names],
        [(r.request_id, list(r.token_ids)) for r in scheduler.running],
        (
            rows.order.tolist(),
            scheduler.pool.num_free_pages,
            scheduler.composer.batch_end,
            scheduler.composer.last_was_prefill,
            replica.stats,
        ),
    )


def recorded(log: Log, *, singly: bool) -> type[PipelineReplica]:
    class Recorded(PipelineReplica):
        def turn(self, *until):
            before = self.scheduler.stats().num_steps
            busy = super().turn(*until)
            after = self.scheduler.stats().num_steps
            if after > before:
                log.states[after] = state(self)
            if after > before + 1:
                log.sizes.append(after - before)
                self.scheduler.check_invariants()
            return busy

        def _run_of_decodes(self, until):
            return not singly and super()._run_of_decodes(until)

    return Recorded


def replay_both(monkeypatch, *args: Any, **options: Any) -> tuple[PipelineReplay, list[int]]:
    """(the replay by single micro-batches, how many each turn of the other one sent that sent several), both alike."""
    logs, runs = [], []
    for singly in (True, False):
        logs.append(log := Log())
        monkeypatch.setattr(pipeline, "PipelineReplica", recorded(log, singly=singly))
        runs.append(replay_pipeline(*args, **options))
    one, many = runs
    assert one.times.complete == many.times.complete
    for name in ("arrivals", "scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(many.times, name).tolist() == getattr(one.times, name).tolist(), name
    for name in COLUMNS:
        assert getattr(many.demands, name).tolist() == getattr(one.demands, name).tolist(), name
    for name in ("starts", "seconds", "sends"):
        assert np.array_equal(getattr(many, name), getattr(one, name)), name
    assert many.buckets == one.buckets and many.padding == one.padding
    assert many.stats == one.stats and many.bubbles == one.bubbles
    assert not logs[0].sizes and len(logs[1].states) < len(logs[0].states)
    for num_sent, seen in logs[1].states.items():
        assert seen == logs[0].states[num_sent], f"after {num_sent} micro-batches"
    return one, logs[1].sizes


@pytest.mark.parametrize(
    ("num_pages", "stages", "options"),
    chosen(
        itertools.product((60, 400), STAGES, POLICIES),
        quick=lambda num_pages, stages, _: num_pages == 60 and stages == "slow_first",
        in_ci=lambda num_pages, stages, options: stages == list(STAGES)[(POLICIES.index(options) + num_pages // 60) % 3],
    ),
    ids=lambda x: name_of(x) if isinstance(x, dict) else x,
)
def test_runs_change_nothing(monkeypatch, options, stages, num_pages):
    """Each policy, short of pages or not, with more or fewer micro-batches than stages, unlike ones, arrivals at any time."""
    work, limits = long_outputs(40, 7, rate=1.5 if stages == "slow_first" else 5.0), replace(LIMITS, **options)
    run, sizes = replay_both(monkeypatch, work, PLAN, STAGES[stages], send_seconds, limits, num_pages)
    assert sum(sizes) > 0.2 * len(run.seconds), "hardly a micro-batch was skipped"
    assert num_pages == 400 or options.get("policy") in ("orca", "request_level") or run.stats.num_preemptions > 0


def test_a_closed_loop(monkeypatch):
    work = long_outputs(40, 3, rate=50.0)
    _, sizes = replay_both(monkeypatch, work, PLAN, STAGES["two"], send_seconds, LIMITS, 400, max_concurrency=5)
    assert len(sizes) > 20


def test_giving_up(monkeypatch):
    """It is asked at the same times, of the same times."""
    asked = []

    def give_up(times):
        asked.append((times.gaps.tolist(), times.gap_counts.tolist(), times.first.tolist(), times.last.tolist()))
        return len(asked) % 40 == 0

    run, sizes = replay_both(
        monkeypatch, long_outputs(60, 5, rate=8.0), PLAN, STAGES["three"], send_seconds, LIMITS, 400, give_up=give_up
    )
    assert not run.times.complete and len(asked) == 80 and asked[:40] == asked[40:] and len(sizes) > 20


@pytest.mark.parametrize("pp", [2, 3])
def test_a_window_and_a_dynamic_budget(monkeypatch, pp):
    """Analytic stages of unlike layers, without padding."""
    deployment = Deployment(replace(MODELS["mistral-7b"], window=64), GPUS["a40"], 1, pp)
    work, plan, stages = long_outputs(40, 2, rate=4.0), UnpaddedPlan(64, 8, 16), deployment.stages(4)
    _, sizes = replay_both(monkeypatch, work, plan, stages, deployment.send_seconds, LIMITS, 300, objective=0.05)
    assert len(sizes) > 20


def test_prefixes_that_are_cached(monkeypatch):
    """Pages are hashed as they fill, also in a run."""
    requests = [WorkloadRequest(8, 40, i / 50, prompt_token_ids=tuple(range(8))) for i in range(6)]
    run, sizes = replay_both(monkeypatch, Workload("same", tuple(requests)), PLAN, STAGES["two"], send_seconds, LIMITS, 400)
    assert sizes and run.stats.num_hit_tokens > 0


def test_replicas_behind_a_router():
    """Brought up to an arrival, each is where single micro-batches would have brought it: the router sees the same loads."""
    work, runs, logs = long_outputs(80, 4, rate=12.0), [], [Log(), Log()]
    for singly, log in zip((True, False), logs, strict=True):
        kind = recorded(log, singly=singly)

        def make(records, prefix_caching, kind=kind):
            return kind(records, PLAN, STAGES["two"], send_seconds, LIMITS, 400, prefix_caching=prefix_caching)

        runs.append(replay_cluster(work, make, 3, make_policy("least_loaded")))
    one, many = runs
    assert many.chosen.tolist() == one.chosen.tolist() and many.stats == one.stats and many.busy.tolist() == one.busy.tolist()
    for name in ("scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(many.times, name).tolist() == getattr(one.times, name).tolist(), name
    assert len(logs[1].sizes) > 20


def test_turns_by_hand():
    """Two stages of a second and of two, half a second between them, and a second on the host."""
    args = {"now": 2.0, "free": [2.0, 5.0], "returns": [3.0, 5.0], "sends": [[0.5], [0.5]], "host_seconds": 1.0}
    starts, back = time_turns(until=100.0, seconds=[[1.0, 2.0]] * 4, **args)
    assert starts == [[4.0, 5.5], [6.0, 7.5], [8.5, 10.0], [10.5, 12.0]] and back == [7.5, 9.5, 12.0, 14.0]
    # The third is scheduled at 7.5: not, if a request may come then.
    assert time_turns(until=7.5, seconds=[[1.0, 2.0]] * 4, **args) == (starts[:2], back[:2])
    assert time_turns(until=7.6, seconds=[[1.0, 2.0]] * 4, **args) == (starts[:3], back[:3])
    # The first of three takes 5 s in the first of three stages: the others are both back by then, as one micro-batch.
    args = {"now": 2.0, "free": [2.0, 3.0, 4.0], "returns": [3.0, 4.0, 5.0], "sends": [[0.0, 0.0]] * 3, "host_seconds": 0.0}
    assert time_turns(until=100.0, seconds=[[5.0, 0.0, 0.0]] * 9, **args) == ([[3.0, 8.0, 8.0]], [8.0])
