"""Virtual time against hand calculation, and the demands of a replay against those of a real engine."""

import itertools

import numpy as np
import pytest

from jaxserve import BucketPlan, SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import COLUMNS, DemandLog
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.simulation.replay import replay
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from jaxserve.workloads.traffic import at_rate, multi_turn, shared_prefix
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.dummy import SETTINGS, dummy_model, make_engine
from tests.scheduler_state import has_unfinished
from tests.selection import chosen
from tests.simulation.machines import LIMITS, MODEL, random_workload

PLAN = BucketPlan((8,), ((16, 8), (64, 8)), (8,))
# A second a decode step, ten a mixed one, whatever they hold; a tenth on the host.
SECONDS = StepTimeModel(
    (BucketTimes(8, 8, 1, 1.0, 0.0, 0.0), BucketTimes(64, 8, 64, 10.0, 0.0, 0.0)), ((8, 0.0),), (8,), 4, host_seconds=0.1
)


def workload(*requests: tuple[int, int, float]) -> Workload:
    return Workload("some", tuple(WorkloadRequest(*r) for r in requests))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_one_request_by_hand(async_scheduling):
    """100 prompt tokens are two steps of 10 s; then two decodes. The device never waits where steps are dispatched ahead."""
    run = replay(workload((100, 3, 5.0)), PLAN, SECONDS, LIMITS, 64, async_scheduling=async_scheduling)
    waits = [0.1] * 4 if not async_scheduling else [0.1, 0, 0, 0]
    ends = 5.0 + np.cumsum(np.array([10, 10, 1, 1]) + waits)
    assert run.times.first == pytest.approx([ends[1]]) and run.times.last == pytest.approx([ends[3]])
    assert run.starts + run.seconds == pytest.approx(ends)
    assert np.repeat(run.times.gaps, run.times.gap_counts) == pytest.approx(np.diff(ends[1:]))
    assert [b.tokens for b in run.buckets] == [64, 64, 8, 8] and run.padding.padded_tokens == 28 + 14


def test_requests_wait_for_their_time():
    """The second arrives while the first decodes; the third after all is done, and the clock jumps."""
    run = replay(workload((60, 20, 0.0), (60, 1, 12.5), (4, 1, 100.0)), PLAN, SECONDS, LIMITS, 64)
    assert run.demands.tokens[:6].tolist() == [60, 1, 1, 1, 1, 61]  # it joins one step late: one was dispatched already
    assert run.times.first[2] == pytest.approx(110.1)
    assert run.times.scheduled == pytest.approx([0.1, 14.1, 100.1]) and run.times.scheduling_delays == pytest.approx(
        [0.1, 1.6, 0.1]
    )
    assert run.times.peak_concurrency() == 2


def test_closed_loop():
    run = replay(workload(*[(8, 4, 0.0)] * 9), PLAN, SECONDS, LIMITS, 64, max_concurrency=2)
    assert run.times.peak_concurrency() == 2 and run.demands.seqs.max() == 2
    assert sorted(run.times.arrivals)[-1] > 0


def test_all_tokens_are_served():
    work = random_workload(60, 3, rate=5.0)
    ended = []
    run = replay(work, PLAN, MODEL, LIMITS, 64, progress=ended.append)
    assert sum(ended) == 60 and len(ended) > 20, "requests end one after another"
    assert run.demands.samples.sum() == work.num_output_tokens == run.times.gap_counts.sum() + 60
    assert run.demands.tokens.sum() - run.demands.decodes.sum() == work.num_prompt_tokens
    assert (run.times.first > run.times.arrivals).all() and (run.times.last >= run.times.first).all()
    assert (np.diff(run.starts) >= run.seconds[:-1] - 1e-9).all(), "two steps on the device at once"


@pytest.mark.parametrize("make", [lambda: shared_prefix(12, 2, 40, 8, 4, 96, 0), lambda: multi_turn(3, 3, 12, 6, 96, 0)])
def test_shared_prefixes_are_hit(make):
    run = replay(make(), PLAN, SECONDS, LIMITS, 256)
    assert run.stats.num_hit_tokens > 0.4 * run.stats.num_queried_tokens
    without = replay(make(), PLAN, SECONDS, LIMITS, 256, prefix_caching=False)
    assert without.stats.num_hit_tokens == 0 and without.duration > run.duration


@pytest.mark.slow
def test_demands_are_the_engines(tmp_path):
    """All at once, the steps of a real engine are those of the replay, one by one."""
    rng = np.random.default_rng(0)
    work = workload(*[(int(p), int(o), 0.0) for p, o in zip(rng.integers(1, 60, 25), rng.integers(1, 12, 25), strict=True)])
    log = tmp_path / "demand.jsonl"
    engine = make_engine(dummy_model(), demand_log=str(log), enable_prefix_caching=False)
    limits, plan = engine.config.scheduler, engine.config.plan
    for i, (prompt, request) in enumerate(zip(work.prompts(96, 1), work.requests, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.close()
    served, simulated = DemandLog.load(log), replay(work, plan, SECONDS, limits, engine.config.cache.num_pages).demands
    for name in COLUMNS:
        assert getattr(served, name).tolist() == getattr(simulated, name).tolist(), name
    assert served.pairs.sum() > 0 and served.kv_tokens.max() % SETTINGS["page_size"] == 0


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="row 1 of the workload.*max_model_len=128.*shorten"):
        replay(workload((5, 5, 0.0), (500, 5, 0.0)), PLAN, SECONDS, LIMITS, 64)
    with pytest.raises(ValueError, match="not in the order of its arrivals"):
        replay(workload((5, 5, 1.0), (5, 5, 0.0)), PLAN, SECONDS, LIMITS, 64)
    with pytest.raises(ValueError, match="fewer than max_num_batched_tokens=128"):
        limits = SchedulerConfig(max_model_len=128, max_num_batched_tokens=128, max_num_seqs=8)
        replay(workload((5, 5, 0.0)), PLAN, SECONDS, limits, 64)
    path = tmp_path / "log"
    path.write_text("")
    with pytest.raises(ValueError, match="empty demand log"):
        DemandLog.load(path)
    path.write_text('{"tokens": 1}\n')
    with pytest.raises(ValueError, match="line 1: not a record"):
        DemandLog.load(path)


POLICIES = [
    {},
    {"policy": "orca"},
    {"policy": "prefill_first"},
    {"policy": "request_level"},
    {"mixed": False},
    {"chunked": False},
    {"order": "priority"},
]


def name_of(options: dict[str, object]) -> str:
    """What tests call one of them."""
    return "-".join(map(str, options.values())) or "sarathi"


@pytest.mark.parametrize(
    ("num_pages", "async_scheduling", "options"),
    chosen(
        itertools.product((60, 400), (True, False), POLICIES),
        quick=lambda num_pages, async_scheduling, _: num_pages == 60 and async_scheduling,
        in_ci=lambda num_pages, async_scheduling, _: num_pages == 400 and not async_scheduling,
    ),
    ids=lambda x: name_of(x) if isinstance(x, dict) else x,
)
def test_runs_of_decodes_change_nothing(monkeypatch, options, async_scheduling, num_pages):
    """Steps taken many at once leave every time, demand and count as single steps do, bit for bit, short of pages or not."""
    limits = SchedulerConfig(max_model_len=220, max_num_batched_tokens=64, max_num_seqs=8, **options)
    rng = np.random.default_rng(7)
    prompts, outputs, times = rng.integers(1, 60, 80), rng.integers(1, 120, 80), np.cumsum(rng.exponential(0.2, 80))
    work = workload(*zip(prompts.tolist(), outputs.tolist(), times.tolist(), strict=True))
    at_once, sizes = replay_counting(monkeypatch, work, limits, num_pages, async_scheduling)
    monkeypatch.setattr("jaxserve.simulation.replica.num_certain_steps", lambda *_: 0)
    singly = replay(work, PLAN, MODEL, limits, num_pages, async_scheduling=async_scheduling)
    assert sum(sizes) > 0.2 * len(singly.seconds), "hardly a step was skipped"
    for name in ("starts", "seconds", "buckets"):
        assert list(getattr(at_once, name)) == list(getattr(singly, name)), name
    for name in ("arrivals", "scheduled", "first", "last", "gaps", "gap_counts"):
        assert getattr(at_once.times, name).tolist() == getattr(singly.times, name).tolist(), name
    for name in COLUMNS:
        assert getattr(at_once.demands, name).tolist() == getattr(singly.demands, name).tolist(), name
    assert at_once.stats == singly.stats and at_once.padding == singly.padding
    assert num_pages == 400 or options.get("policy") in ("orca", "request_level") or singly.stats.num_preemptions > 0


@pytest.mark.parametrize("num_pages", [60, 400])
def test_runs_of_decodes_change_nothing_where_prefixes_are_cached(monkeypatch, num_pages):
    """Hits included: the pages that a run fills are those that single steps would have filled."""
    limits = SchedulerConfig(max_model_len=220, max_num_batched_tokens=64, max_num_seqs=8)
    work = at_rate(shared_prefix(80, 4, 24, 8, 100, 96, 0), 3.0, 1)
    at_once, sizes = replay_counting(monkeypatch, work, limits, num_pages, True)
    monkeypatch.setattr("jaxserve.simulation.replica.num_certain_steps", lambda *_: 0)
    singly = replay(work, PLAN, MODEL, limits, num_pages)
    assert sum(sizes) > 0.2 * len(singly.seconds), "hardly a step was skipped"
    assert at_once.seconds.tolist() == singly.seconds.tolist() and at_once.times.last.tolist() == singly.times.last.tolist()
    assert at_once.times.scheduled is not None and singly.times.scheduled is not None
    assert at_once.times.scheduled.tolist() == singly.times.scheduled.tolist() and at_once.stats == singly.stats
    assert singly.stats.num_hit_tokens > 0 and (singly.stats.num_preemptions > 0) == (num_pages == 60)


def replay_counting(monkeypatch, work, limits, num_pages, async_scheduling):
    """(a replay, how many steps each run had), with every scheduler and pool checked at its end."""
    sizes, schedulers = [], []

    def skip(scheduler, num_steps, token, real=Scheduler.skip_decodes):
        sizes.append(num_steps)
        schedulers.append(scheduler)
        real(scheduler, num_steps, token)
        scheduler.check_invariants()

    monkeypatch.setattr(Scheduler, "skip_decodes", skip)
    run = replay(work, PLAN, MODEL, limits, num_pages, async_scheduling=async_scheduling)
    schedulers[0].check_invariants()
    assert not has_unfinished(schedulers[0]) and schedulers[0].pool.num_free_pages == num_pages
    return run, sizes
