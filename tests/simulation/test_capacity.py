"""The search over rates against known answers: a step function, and machines whose capacity follows from their step time."""

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxserve import BucketPlan
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.simulation.capacity import Objective, Spread, Trial, capacity, ratio
from jaxserve.simulation.pipeline import replay_stages
from jaxserve.simulation.replay import replay
from jaxserve.step_times.fitted import BucketTimes, StepTimeModel
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.traffic import at_rate
from jaxserve.workloads.workload import Workload, WorkloadRequest
from tests.selection import slow_unless
from tests.simulation import machines

PAGE, SEQS = 16, 8
PLAN = BucketPlan((SEQS,), ((256, SEQS),), (SEQS,))
LIMITS = SchedulerConfig(max_model_len=256, max_num_batched_tokens=256, max_num_seqs=SEQS)
EVERYTHING = Objective(tbt=1e9, delay=1e9, min_gaps=1)


def trial(rate: float, tbt: float = 1.0, delay: float = 0.0, num_gaps: int = 10_000) -> Trial:
    return Trial(rate, tbt, delay, num_gaps, peak=9)


@pytest.mark.parametrize("edge", [0.0123, 0.99, 1.0, 3.21, 1234.5])
@pytest.mark.parametrize("start", [0.02, 1.0, 50.0])
@pytest.mark.parametrize("precision", [0.01, 0.3])
def test_step_function(edge, start, precision):
    """The last rate of the grid under the edge; each rate is asked for once, and few of them."""
    asked = []

    def serve(rate):
        asked.append(rate)
        return trial(rate, tbt=1.0 if rate <= edge else 3.0)

    found = capacity(serve, Objective(tbt=2.0), start=start, precision=precision)
    assert found <= edge < found * (1 + precision) * (1 + 1e-9)
    assert len(asked) == len(set(asked)) <= 6 + 2 * math.log2(2 + abs(math.log(edge / start)) / math.log1p(precision))


def test_both_objectives_bind():
    serve = lambda rate: trial(rate, tbt=rate, delay=rate / 10)  # noqa: E731
    assert capacity(serve, Objective(tbt=5.0, delay=2.0)) == pytest.approx(5, rel=0.02)
    assert capacity(serve, Objective(tbt=500.0, delay=2.0)) == pytest.approx(20, rel=0.02)


def test_no_rate_and_every_rate():
    asked = []
    assert capacity(lambda rate: asked.append(rate) or trial(rate, tbt=9.0), Objective(tbt=2.0)) == 0.0
    assert len(asked) > 4 and min(asked) < 1e-3
    alone = lambda rate: asked.append(rate) or replace(trial(rate, tbt=9.0), peak=1 if rate < 0.1 else 2)  # noqa: E731
    del asked[:]
    assert capacity(alone, Objective(tbt=2.0)) == 0.0 and min(asked) > 0.01, "it went on where no request met another"
    with pytest.raises(ValueError, match="still meet .* serve more requests"):
        capacity(trial, Objective(tbt=2.0))
    with pytest.raises(ValueError, match="99 times between tokens are fewer than the 10000 that P99"):
        capacity(lambda rate: trial(rate, num_gaps=99), Objective(tbt=2.0))
    for tbt, quantile, delay in ((0.0, 0.99, 2.0), (1.0, 1.0, 2.0), (1.0, 0.99, 0.0)):
        with pytest.raises(ValueError, match="must be above 0 seconds"):
            Objective(tbt, quantile, delay)
    with pytest.raises(ValueError, match=r"precision=0 must be in"):
        capacity(trial, Objective(tbt=2.0), precision=0)


def test_trial_of_served_times():
    arrivals = np.array([0.0, 1.0, 2.0])
    gaps, counts = np.array([0.1, 5.0]), np.array([98, 2])
    last, one = np.array([9.0, 9.0, 10.0]), np.ones(3, int)
    times = ServedTimes(arrivals, arrivals + 1, last, one, one, gaps, counts, scheduled=arrivals + np.array([0.5, 9.0, 0.25]))
    made = Trial.of(0.3, times, 0.9)
    assert made == Trial(0.3, 0.1, 0.5, 100, 3)
    assert replace(made, num_gaps=10_000).meets(Objective(0.1, 0.9)) and not Trial.of(0.3, times, 0.99).meets(EVERYTHING_BUT_GAPS)


EVERYTHING_BUT_GAPS = replace(EVERYTHING, tbt=0.1)


def machine(decode: float, mixed: float, num_requests: int = 1200):
    """Serves 100-token prompts with 10 tokens of output; a step takes `decode` seconds, or `mixed` where it holds a prompt."""
    steps = StepTimeModel(
        (BucketTimes(SEQS, SEQS, 1, decode, 0.0, 0.0), BucketTimes(256, SEQS, 256, mixed, 0.0, 0.0)), ((SEQS, 0.0),), (SEQS,), PAGE
    )
    work = Workload("fixed", (WorkloadRequest(100, 10),) * num_requests)

    def serve(rate: float) -> Trial:
        return Trial.of(rate, replay(at_rate(work, rate, seed=1), PLAN, steps, LIMITS, 1000).times, 0.99)

    return serve


def test_throughput_bounds_the_capacity():
    """Every step takes 0.1 s whatever it holds. A row is taken for 10 steps and one more, since the host learns of an end a step
    late: 8 rows serve 8 / 1.1 s. Above, half of the requests have waited for 600 (1.1/8 - 1/rate) s: 2 s at 7.45 a second."""
    found = capacity(machine(0.1, 0.1), Objective(tbt=0.11), start=4.0, precision=0.01)
    assert 8 / 1.1 * 0.97 < found < 7.45 * 1.03


@pytest.mark.slow
def test_stalls_bound_the_capacity():
    """A step with a prompt takes 1 s and stalls who decodes. Who arrives while another's prompt runs, or in the 0.1 s of its
    decodes, stalls one of its 9 gaps: P99 holds while rate * 1.1 / 9 < 1%."""
    serve = machine(0.01, 1.0)
    strict = capacity(serve, Objective(tbt=0.5), start=0.1, precision=0.02)
    assert serve(strict).tbt < 0.5 < serve(strict * 1.021).tbt
    assert strict == pytest.approx(0.01 * 9 / 1.1, rel=0.15)
    relaxed = capacity(serve, Objective(tbt=1.5), start=1.0, precision=0.1)
    assert relaxed > 5 * strict and serve(relaxed).tbt > 0.5


def overloaded(policy: str, num_stages: int, rate: float, give_up=None):
    """Times of 150 requests, some of them preempted, on stages of machines.MODEL."""
    limits = replace(machines.LIMITS, policy=policy)
    short = [replace(r, num_prompt_tokens=min(60, r.num_prompt_tokens)) for r in machines.random_workload(150, 7).requests]
    work, plan = at_rate(Workload("short", tuple(short)), rate, seed=1), BucketPlan((8,), ((16, 8), (64, 8)), (8,))
    stages, send = [machines.MODEL] * num_stages, lambda *_: 1e-3
    return replay_stages(work, plan, stages, send, limits, 60, give_up=give_up).times


@pytest.mark.parametrize("num_stages", slow_unless(lambda num_stages: num_stages == 1, [1, 2]))
@pytest.mark.parametrize("policy", ["sarathi", "orca", "prefill_first", "request_level"])
def test_a_trial_that_gives_up_has_the_same_verdict(policy, num_stages):
    """Whatever the objective, a trial that was broken off for it meets it no less than the whole one does; what it says of gaps and
    delays is never more than the whole one's, at any moment at which it was asked."""
    ends = {}
    for rate in (4.0, 30.0):
        sofar = []
        whole = overloaded(policy, num_stages, rate, give_up=lambda times: sofar.append(times))  # noqa: B023
        assert whole.complete and len(sofar) > 40 and not any(times.complete for times in sofar)
        for times in sofar:
            assert times.gap_counts.sum() == whole.gap_counts.sum()
            assert all(times.gap_quantile(q) <= whole.gap_quantile(q) for q in (0.1, 0.5, 0.9, 0.99, 1.0))
            assert (times.scheduling_delays >= 0).all() and (times.scheduling_delays <= whole.scheduling_delays).all()
        assert np.isclose(sofar[-1].gap_quantile(0.99), whole.gap_quantile(0.99), rtol=0.05), "these bounds would never bind"
        for tbt in (0.5, 0.9, 1.25):
            for delay in (0.5, 5.0):
                objective = Objective(tbt * whole.gap_quantile(0.9), 0.9, delay, min_gaps=1)
                broken = Trial.of(rate, overloaded(policy, num_stages, rate, objective.missed_by), 0.9)
                full = Trial.of(rate, whole, 0.9)
                assert broken.meets(objective) == full.meets(objective) and broken.decides(objective)
                assert broken.num_gaps == full.num_gaps and broken.complete == full.meets(objective) or broken == full
                assert not broken.decides(Objective(1e9, 0.9, 1e9, 1)) or broken.complete
                ends[broken.complete] = ends.get(broken.complete, 0) + 1
    assert min(ends.get(True, 0), ends.get(False, 0)) >= 2


def test_a_trial_that_gives_up_is_short():
    """A rate that cannot be held is given up when half of its requests are late, one whose gaps are all too long after a tenth."""
    for rate, objective, most in ((30.0, Objective(1e9, 0.9, 1.0, 1), 0.55), (30.0, Objective(0.002, 0.9, 1e9, 1), 0.2)):
        whole = overloaded("prefill_first", 1, rate)
        broken = overloaded("prefill_first", 1, rate, objective.missed_by)
        assert not broken.complete and 0 < (broken.last == whole.last).mean() < most


def test_spread():
    spread = Spread.of([1.0, 2.0, 3.0])
    assert spread.mean == 2 and spread.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert math.isnan(Spread.of([4.0]).half_width) and str(Spread.of([4.0])) == "4"
    assert ratio([2.0, 6.0], [1.0, 2.0]) == Spread.of([2.0, 3.0]) and ratio([1.0], [0.0]) is None


@pytest.mark.slow
def test_interval_covers_the_mean():
    """95% of the intervals from few normal values, and from more, hold the true mean."""
    rng = np.random.default_rng(0)
    for n in (4, 12):
        spreads = [Spread.of(values) for values in rng.standard_normal((20_000, n)).tolist()]
        held = sum(abs(s.mean) <= s.half_width for s in spreads) / len(spreads)
        assert abs(held - 0.95) < 3 * math.sqrt(0.95 * 0.05 / 20_000)
