"""A pipeline of stages against the replay of one stage, against hand calculation, and its bubbles by kind."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.buckets.unpadded import UnpaddedPlan
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import COLUMNS
from jaxserve.simulation import pipeline
from jaxserve.simulation.pipeline import LongestGaps, PipelineReplica, bubbles, replay_pipeline
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replay import replay, serve
from jaxserve.step_times.analytic import Deployment
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from jaxserve.workloads.traffic import at_rate, log_normal
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.simulation.machines import LIMITS, MODEL, random_workload

PLAN = BucketPlan((8,), ((16, 8), (64, 8)), (8,))


def second(decode: float = 1.0, mixed: float = 1.0) -> StepTimeModel:
    """A stage that takes so many seconds, whatever its step holds."""
    return StepTimeModel((BucketTimes(8, 8, 1, decode, 0.0, 0.0), BucketTimes(64, 8, 64, mixed, 0.0, 0.0)), ((8, 0.0),), (8,), 4)


def short_workload(n: int, seed: int, rate: float) -> Workload:
    """Prompts that a step holds whole."""
    work = random_workload(n, seed, rate)
    return Workload("short", tuple(replace(r, num_prompt_tokens=min(r.num_prompt_tokens, 60)) for r in work.requests))


@pytest.mark.parametrize("policy", ["sarathi", "orca", "prefill_first", "request_level"])
def test_one_stage_is_a_replay(policy):
    """Bit for bit, with preemptions and in a closed loop: nothing is scheduled before the step in flight is back."""
    limits = SchedulerConfig(max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8, policy=policy)
    work = short_workload(60, 3, rate=8.0)
    for most in (None, 5):
        one = replay(work, PLAN, MODEL, limits, 36, async_scheduling=False, max_concurrency=most)
        staged = replay_pipeline(work, PLAN, [MODEL], lambda *_: 99.0, limits, 36, max_concurrency=most)
        assert staged.starts[:, 0].tolist() == one.starts.tolist() and staged.seconds[:, 0].tolist() == one.seconds.tolist()
        for name in ("arrivals", "scheduled", "first", "last", "gaps", "gap_counts"):
            assert getattr(staged.times, name).tolist() == getattr(one.times, name).tolist(), name
        for name in COLUMNS:
            assert getattr(staged.demands, name).tolist() == getattr(one.demands, name).tolist(), name
        assert staged.stats == one.stats and (policy != "sarathi" or one.stats.num_preemptions > 0)


def test_two_equal_stages_by_hand():
    """Two groups of four prompts take turns: each stage works without a gap, and 20 micro-batches of a second a stage last 21."""
    work = Workload("two groups", tuple(WorkloadRequest(16, 10) for _ in range(8)))
    run = replay_pipeline(work, PLAN, [second(), second()], lambda *_: 0.0, LIMITS, 200)
    assert run.duration == 21 and run.demands.seqs.tolist() == [4] * 20
    assert run.starts[:, 0].tolist() == list(range(20)) and run.starts[:, 1].tolist() == list(range(1, 21))
    lost = run.bubbles
    assert (lost.pb1, lost.pb2, lost.pb3, lost.send, lost.idle, lost.busy) == (0, 0, 0, 0, 0, 40) and lost.share == 0
    assert np.repeat(run.times.gaps, run.times.gap_counts).tolist() == [2.0] * 72  # a token each time round both stages


def test_stages_are_never_faster_than_their_bounds():
    """Tokens a second of a stage's steps bound the pipeline's; sends and bubbles only add, and every second is accounted for."""
    work = random_workload(80, 5, rate=30.0)
    stages = [MODEL, MODEL, MODEL]
    run = replay_pipeline(work, PLAN, stages, lambda tokens, _: 1e-5 * tokens, LIMITS, 256)
    assert run.duration >= run.seconds.sum(axis=0).max()
    ends = run.starts + run.seconds
    assert (run.starts[1:] >= ends[:-1] - 1e-12).all(), "two micro-batches in a stage at once"
    assert (run.starts[:, 1:] >= ends[:, :-1] + run.sends - 1e-12).all(), "a micro-batch began before it arrived"
    in_flight = [int(((run.starts[:, 0] <= t) & (t < ends[:, -1])).sum()) for t in run.starts[:, 0]]
    assert max(in_flight) == 3
    lost = run.bubbles
    spans = (run.starts[-1] + run.seconds[-1] - run.starts[0]).sum()
    assert lost.pb1 + lost.pb2 + lost.pb3 + lost.send + lost.idle + lost.busy == pytest.approx(spans)
    assert min(lost.pb1, lost.pb2, lost.pb3, lost.send) > 0


@pytest.mark.parametrize("policy", ["sarathi", "orca", "prefill_first", "request_level"])
@pytest.mark.parametrize("num_pages", [45, 400])
def test_all_tokens_are_served(monkeypatch, policy, num_pages):
    """None lost, none twice, no request in two micro-batches at once, short of pages or not; scheduler and pool hold together."""
    limits = SchedulerConfig(max_model_len=128, max_num_batched_tokens=64, max_num_seqs=8, policy=policy)
    work, flying = short_workload(60, 4, rate=20.0), []

    class Checked(PipelineReplica):
        def turn(self, until):
            in_flight = [r.request_id for schedule, _ in self._in_flight for r in schedule.requests]
            assert len(set(in_flight)) == len(in_flight), "a request is in two micro-batches"
            flying.append(len(self._in_flight))
            self.scheduler.check_invariants()
            return super().turn(until)

    monkeypatch.setattr(pipeline, "PipelineReplica", Checked)
    run = replay_pipeline(work, PLAN, [MODEL, MODEL], lambda *_: 1e-4, limits, num_pages)
    assert run.demands.samples.sum() == work.num_output_tokens == run.times.gap_counts.sum() + 60
    preempted = run.stats.num_preemptions
    assert preempted == 0 or run.demands.tokens.sum() > work.num_prompt_tokens + work.num_output_tokens - 60
    assert (preempted > 0) == (num_pages == 45 and policy in ("sarathi", "prefill_first")) and max(flying) == 2
    assert (run.times.first > run.times.arrivals).all() and (run.times.last >= run.times.first).all()


def test_bubbles_by_hand():
    """Two stages. A prompt of 5 s a stage follows decodes of 1 s: the second stage waits 4 s for it (PB2). Decodes follow: the
    first stage waits for the prompt's return, 4 s (PB2). Then two decodes, of 1 s and 3 s: 2 s (PB3). Then prompts of 1 s and 2 s:
    1 s (PB1). A send of half a second is not a bubble, a pause before the last is idle time in both stages."""
    assert bubbles(*_two_stages([(1, 0), (5, 1), (1, 0), (1, 0)])) == pipeline.Bubbles(0, 8, 0, 0, 0, 16)
    assert bubbles(*_two_stages([(1, 0), (3, 0)])) == pipeline.Bubbles(0, 0, 2, 0, 0, 8)
    assert bubbles(*_two_stages([(1, 1), (2, 1)])) == pipeline.Bubbles(1, 0, 0, 0, 0, 6)
    assert bubbles(*_two_stages([(1, 0), (1, 0)], send=0.5)) == pipeline.Bubbles(0, 0, 0, 0, 0, 4)
    assert bubbles(*_two_stages([(1, 0), (3, 0)], send=0.5)) == pipeline.Bubbles(0, 0, 1.5, 0.5, 0, 8)
    starts, seconds, sends, prefills = _two_stages([(1, 0), (1, 0)])
    starts[1] += 10
    assert bubbles(starts, seconds, sends, prefills) == pipeline.Bubbles(0, 0, 0, 0, 20, 4)
    assert bubbles(starts[:1], seconds[:1], sends[:1], prefills[:1]).share == 0


def test_a_replica_that_ran_nothing_lost_nothing():
    records = RequestRecords(Workload("one", (WorkloadRequest(16, 10),)))
    for stages in ([MODEL], [MODEL, MODEL, MODEL]):
        replica = pipeline.PipelineReplica(records, PLAN, stages, lambda *_: 0.0, LIMITS, 200, prefix_caching=False)
        assert replica.bubbles == pipeline.Bubbles(0, 0, 0, 0, 0, 0) and replica.bubbles.share == 0


def _two_stages(steps: list[tuple[float, int]], send: float = 0.0):
    """(starts, seconds, sends, prefills) of micro-batches (seconds a stage, whether it holds a prompt) that are always at hand."""
    free, returned, starts = [0.0, 0.0], [0.0, 0.0], []
    for seconds, _ in steps:
        first = max(free[0], returned[-2])
        second = max(first + seconds + send, free[1])
        free = [first + seconds, second + seconds]
        returned.append(free[1])
        starts.append([first, second])
    seconds = np.array([[s, s] for s, _ in steps], float)
    return np.array(starts), seconds, np.full((len(steps), 1), send), np.array([bool(p) for _, p in steps])


def test_chunks_make_fewer_bubbles():
    """Falcon-180B on two stages, overloaded: whole prompts beside decodes make it wait far longer than chunks of 512 do."""
    stages = (deployment := Deployment.named("falcon-180b", "a100-80gb", 4, 2, gpus_per_node=4)).stages()
    work = at_rate(log_normal("openchat_sharegpt4", 64, 0), 3.0, 0)
    share = {}
    for policy, budget in (("sarathi", 512), ("orca", 8192)):
        limits = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=budget, max_num_seqs=64, policy=policy)
        plan, pages = UnpaddedPlan(budget, 64), deployment.num_pages(16, budget)
        run = replay_pipeline(work, plan, stages, deployment.send_seconds, limits, pages)
        share[policy] = run.bubbles.share
        assert run.bubbles.pb2 > 0
    assert share["sarathi"] < 0.7 * share["orca"]


def test_the_longest_gap_by_hand():
    """A step of 1 s in both stages begins just before another's tokens are back, which goes on behind it: three turns, a send and
    two dispatches. The coefficients of a budget say the same as the seconds."""
    gaps = LongestGaps((replace(MODEL, host_seconds=0.25), replace(MODEL, host_seconds=0.25)), lambda tokens, _: 1e-3 * tokens)
    bucket = Bucket(64, 8, 64)
    one = MODEL.seconds(bucket, 8, 100, 50)
    assert gaps.seconds(bucket, 8, 100, 50) == pytest.approx(3 * one + 0.064 + 0.5)
    assert gaps.coefficients(bucket) @ [1, 100, 50] + gaps.head_seconds(8) == pytest.approx(gaps.seconds(bucket, 8, 100, 50))
    # Four slots of 16 tokens fill a step. The second prompt begins in stage 0 at 1.5 s, the first one's token is back at 2 s.
    work = Workload("late", (WorkloadRequest(16, 4, 0.0), WorkloadRequest(16, 4, 1.5)))
    run = replay_pipeline(work, PLAN, [second(), second()], lambda *_: 0.0, LIMITS, 200)
    assert run.times.first.tolist() == [2.0, 3.5] and run.times.gaps.max() == 2.5
    assert LongestGaps((second(), second()), lambda *_: 0.0).seconds(bucket, 8, 0, 0) == 3.0


@pytest.mark.parametrize(("model", "gpu", "tp", "objective"), [("falcon-180b", "a100-80gb", 4, 0.4), ("qwen3-8b", "a40", 1, 0.1)])
@pytest.mark.parametrize("rate", [0.5, 3.0])
def test_a_dynamic_budget_counts_all_stages(model, gpu, tp, objective, rate):
    """A token takes both stages, and waits for the first: with a budget no gap is longer than the objective, and it is used up."""
    deployment = Deployment.named(model, gpu, tp, 2, gpus_per_node=4)
    limits = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=64)
    work, pages = at_rate(log_normal("openchat_sharegpt4", 60, 0), rate, 0), deployment.num_pages(16, 2048)
    run = replay_pipeline(
        work, UnpaddedPlan(2048, 64), deployment.stages(), deployment.send_seconds, limits, pages, objective=objective
    )
    assert 0.65 * objective < run.times.gaps.max() <= objective
    mixed = (run.demands.decodes > 0) & (run.demands.max_q_len > 1)
    assert mixed.sum() > 100 and run.stats.num_preemptions == 0


def test_a_request_that_no_pool_could_hold():
    records = RequestRecords(Workload("long", (WorkloadRequest(100, 20),)))
    replica = PipelineReplica(records, PLAN, [MODEL, MODEL], lambda *_: 0.0, LIMITS, 4, prefix_caching=False)
    with pytest.raises(ValueError, match="row 0 of the workload.*the pool has 4"):
        serve(records, replica)
