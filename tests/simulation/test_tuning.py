"""Tuning with the scheduler in the loop, and the two kinds of token budget."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.scheduling.demand import DemandLog
from jaxserve.scheduling.step_budget import StepBudget
from jaxserve.simulation import tuning
from jaxserve.simulation.bucket_search import Caps, plan_seconds
from jaxserve.simulation.tuning import PADDING_PRICE, SLOWER, cost, padded_budget, step_seconds, tune_budget, tune_plan, with_budget
from jaxserve.workloads.traffic import at_once
from tests.simulation.machines import MACHINE, MODEL, PAGE, SEQS, TOKENS, random_workload

PLAN = BucketPlan((4, 8), ((16, 8), (24, 8), (32, 8), (48, 8), (64, 8)), (8,))


def test_at_once_one_round_tells_all():
    """Nobody waits for a time, so the first log is the last and what the log promises is what is replayed."""
    tuned = tune_plan(random_workload(80, 1), MACHINE, Caps(12))
    assert tuned.rounds == 1 and tuned.at_once
    assert (tuned.replay.demands.tokens == tuned.default_replay.demands.tokens).all()
    assert tuned.search.seconds == pytest.approx(tuned.replay.seconds.sum()) == pytest.approx(tuned.replay.duration)
    assert tuned.fixed_log_gain == pytest.approx(tuned.in_loop_gain) == pytest.approx(tuned.gain(tuned.default_replay))
    assert tuned.gain(tuned.default_replay) >= tuned.gain(tuned.powers_replay) >= 1
    assert all((t & (t - 1)) == 0 for t, _ in tuned.powers_plan.mixed)
    assert tuned.plan.num_programs <= 12 >= tuned.powers_plan.num_programs


def test_over_time_the_loop_counts():
    """A faster step changes the batches that follow: the log of one plan mispredicts another."""
    work = random_workload(120, 5, rate=12.0)
    tuned = tune_plan(work, MACHINE, Caps(12))
    assert not tuned.at_once and tuned.rounds > 1
    assert cost(tuned.replay) == pytest.approx(np.mean(tuned.replay.times.last - tuned.replay.times.arrivals))
    gain = tuned.gain(tuned.default_replay)
    assert gain > 1.05
    machines = [MACHINE, *map(MACHINE.slower, SLOWER)]
    logs = DemandLog.concatenate([machine.run(work, tuned.default_plan).demands for machine in machines])
    first = MACHINE.search(logs, padding_price=PADDING_PRICE).solve(Caps(12)).plan
    served, log = MACHINE.run(work, first), tuned.default_replay.demands
    assert tuned.fixed_log_gain == pytest.approx(plan_seconds(tuned.default_plan, log, MODEL) / plan_seconds(first, log, MODEL))
    assert tuned.in_loop_gain == pytest.approx(tuned.default_replay.seconds.sum() / served.seconds.sum())
    assert abs(tuned.fixed_log_gain / tuned.in_loop_gain - 1) > 0.01


@pytest.mark.parametrize("factor", [1.0, 1.2, 1.4])
def test_over_time_a_slower_machine_gains_too(factor):
    """More sequences meet there than on the machine that was promised, and find buckets."""
    work, machine = random_workload(120, 5, rate=12.0), MACHINE.slower(factor)
    tuned = tune_plan(work, MACHINE, Caps(12))
    assert cost(machine.run(work, tuned.default_plan)) > 1.05 * cost(machine.run(work, tuned.plan))


@pytest.mark.slow
def test_a_long_workload_is_fitted_by_parts_and_replayed_whole(monkeypatch):
    work = random_workload(1000, 5, rate=12.0)
    monkeypatch.setattr(tuning, "MOST_FITTED", 500)
    replayed = []
    tuned = tune_plan(work, MACHINE, Caps(12), progress=replayed.append)
    replays = (tuned.replay, tuned.default_replay, tuned.powers_replay)
    assert all(len(run.times.arrivals) == 1000 for run in replays)
    num_rounds_replays = 3 * (tuned.rounds + 1) + 1
    assert sum(replayed) <= 500 * num_rounds_replays + 3 * 1000
    assert cost(tuned.replay) == cost(MACHINE.run(work, tuned.plan))
    whole = tuning._tune_plan(work, MACHINE, Caps(12), 4, None)
    assert cost(tuned.replay) == pytest.approx(cost(whole.replay), rel=0.03)


def test_largest_budget_within_the_objective():
    work, quantile = random_workload(100, 3, rate=6.0), 0.95
    limits = [with_budget(MACHINE, PLAN, t) for t, _ in PLAN.mixed]
    gaps = [machine.run(work, plan).times.gap_quantile(quantile) for machine, plan in limits]
    objective = sorted(gaps)[2] * 1.001
    best, tried = tune_budget(work, MACHINE, PLAN, objective, quantile)
    assert [c.gap for c in tried] == pytest.approx(gaps)
    assert best.budget == max(t for (t, _), gap in zip(PLAN.mixed, gaps, strict=True) if gap <= objective)
    with pytest.raises(ValueError, match="no token budget keeps P95.*lower max_num_seqs=8 or the request rate"):
        tune_budget(work, MACHINE, PLAN, 1e-6, quantile)
    with pytest.raises(ValueError, match="no budget to try: no mixed bucket of the plan holds max_num_seqs=8 sequences and more"):
        tune_budget(work, MACHINE, BucketPlan((8,), ((8, 8),), (8,)), objective, quantile)


def test_the_machine_decides_what_is_waited_for():
    """Without a step in flight every step waits for the host."""
    work, slow = random_workload(50, 3), replace(MACHINE, step_times=replace(MODEL, host_seconds=0.01))
    ahead, one_by_one = (replace(slow, async_scheduling=on).run(work, PLAN) for on in (True, False))
    assert one_by_one.duration == pytest.approx(one_by_one.seconds.sum() + 0.01 * len(one_by_one.seconds))
    assert ahead.duration < ahead.seconds.sum() + 0.009 * len(ahead.seconds)


def test_a_budget_between_sizes_pays_for_the_larger():
    assert padded_budget(PLAN, 17, SEQS) == 24 == padded_budget(PLAN, 24, SEQS)
    at, above, full = (step_seconds(MACHINE, PLAN, tokens, 4, 64) for tokens in (16, 17, 24))
    assert above > at + 0.5 * (full - at)
    machine, plan = with_budget(MACHINE, PLAN, 17)
    assert plan.mixed == ((16, 8), (24, 8)) and machine.limits.max_num_batched_tokens == 17
    with pytest.raises(ValueError, match="beyond the plan's largest bucket"):
        with_budget(MACHINE, PLAN, 100)


@pytest.mark.parametrize("objective", [1e-3, 20e-3, 40e-3, 60e-3, 1.0])
def test_dynamic_budget_is_the_largest_that_meets_the_objective(objective):
    budget = StepBudget(MODEL, PLAN, objective, SEQS, TOKENS)
    for n, start, kv in itertools.product((1, 4, 7), (0, 2000), (1, 900)):
        good = []
        for tokens, _ in PLAN.mixed:
            chunk = tokens - n
            pairs = sum(start + i + 1 for i in range(chunk))
            kv_tokens = n * -(-(kv + 1) // PAGE) * PAGE
            if MODEL.seconds(PLAN.select(tokens, SEQS, chunk), 8, kv_tokens, pairs) <= objective:
                good.append(tokens)
        assert budget.choose(np.full(n, kv), start) == max(good, default=16)


def test_dynamic_budget_in_the_loop():
    """Gaps stay within what a fixed budget breaks, prompts still end, and every token comes."""
    work, objective = random_workload(100, 4, rate=6.0), 45e-3
    free = MACHINE.run(work, PLAN)
    held = replace(MACHINE, objective=objective).run(work, PLAN)
    assert free.times.gap_quantile(1.0) > 1.2 * objective >= held.times.gap_quantile(1.0)
    assert held.demands.samples.sum() == work.num_output_tokens
    alone = replace(MACHINE, objective=1e-6).run(at_once(random_workload(1, 0)), PLAN)
    assert alone.demands.tokens[0] > 16, "without decodes nobody waits between tokens"


def test_bad_objective():
    with pytest.raises(ValueError, match="tbt_slo_ms=0 must be above 0"):
        StepBudget(MODEL, PLAN, 0.0, SEQS, TOKENS)
