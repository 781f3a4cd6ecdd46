"""The search against all plans there are, on problems small enough to try them all."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.scheduling.demand import DemandLog, StepDemand
from jaxserve.simulation.bucket_search import BucketSearch, Caps, interchange, lagrangian_bound, padding_share, plan_seconds
from jaxserve.step_times.fitted import BucketTimes
from tests.simulation.machines import MODEL, SEQS, TOKENS, random_demands

SIZES = (2, 4, 8, 16, 24, 40, 64)  # few enough to try all sets of them


def seconds_of(plan: BucketPlan, demands: DemandLog) -> float:
    """Step by step, by the plan's own choice."""
    total = 0.0
    for tokens, seqs, _, max_q_len, samples, kv_tokens, pairs in zip(*vars(demands).values(), strict=True):
        bucket = plan.select(int(tokens), int(seqs), int(max_q_len))
        total += MODEL.seconds(bucket, plan.select_head_rows(int(samples)), int(kv_tokens), int(pairs))
    return total


def search(demands: DemandLog, sizes=SIZES) -> BucketSearch:
    return BucketSearch(demands, MODEL, max_num_seqs=SEQS, max_num_batched_tokens=TOKENS, multiple=2, sizes=sizes)


def all_plans(max_programs: int, mixed_pairs: list[tuple[int, int]]):
    """Every plan with the buckets that a plan must have."""
    small = [s for s in SIZES if s < SEQS]
    for d, h in itertools.product(range(len(small) + 1), repeat=2):
        room = max_programs - 2 - 2 * (h + 1) - (d + 1) - 1
        for m in range(room + 1):
            for decode in itertools.combinations(small, d):
                for heads in itertools.combinations(small, h):
                    for mixed in itertools.combinations(mixed_pairs, m):
                        yield BucketPlan((*decode, SEQS), (*mixed, (TOKENS, SEQS)), (*heads, SEQS))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_programs", [6, 9, 11])
def test_ladders_are_exact(seed, max_programs):
    demands = random_demands(40, seed)
    pairs = [(t, min(t, SEQS)) for t in SIZES if t < TOKENS]
    best = min(plan_seconds(plan, demands, MODEL) for plan in all_plans(max_programs, pairs))
    found = search(demands).solve(Caps(max_programs), pairs=False)
    assert found.plan.num_programs <= max_programs
    assert found.seconds == pytest.approx(best) == pytest.approx(found.bound)
    assert found.seconds == pytest.approx(seconds_of(found.plan, demands))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_lie_between_bound_and_ladder(seed):
    demands = random_demands(40, seed)
    pairs = [(t, s) for t in SIZES for s in (2, 4, 8) if s <= t and (t, s) != (TOKENS, SEQS)]
    found, max_programs = search(demands).solve(Caps(9)), 9
    best = min(plan_seconds(plan, demands, MODEL) for plan in all_plans(max_programs, pairs))
    assert found.bound <= best * (1 + 1e-9), "the bound is above an answer"
    assert best * 0.97 <= found.seconds <= found.ladder_cost * (1 + 1e-9)  # sequences may be sized more finely than in `pairs`
    assert found.seconds == pytest.approx(found.cost)
    assert found.seconds == pytest.approx(seconds_of(found.plan, demands))
    assert 0 <= found.gap < 0.2


def test_more_programs_never_hurt():
    demands = random_demands(300, 5)
    seconds = [search(demands, None).solve(Caps(n)).seconds for n in (6, 9, 13, 21)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.9 * seconds[0]


def test_a_plan_holds_what_the_log_lacks():
    rows = [StepDemand(4, 4, 4, 1, 4, 16, 0)] * 5  # decodes of four, nothing else
    found = search(DemandLog.from_rows(rows)).solve(Caps(12))
    found.plan.check(SEQS, TOKENS)
    assert found.plan.decode == (4, SEQS) and found.plan.mixed == ((TOKENS, SEQS),) and found.plan.head_rows == (4, SEQS)


def test_padding_is_counted_as_the_engine_does():
    demands, plan = random_demands(50, 1), BucketPlan((8,), ((16, 8), (64, 8)), (8,))
    ran = [
        plan.select(int(t), int(s), int(q)).tokens for t, s, q in zip(demands.tokens, demands.seqs, demands.max_q_len, strict=True)
    ]
    assert padding_share(plan, demands) == pytest.approx(1 - demands.tokens.sum() / sum(ran))
    assert plan_seconds(plan, demands, MODEL) == pytest.approx(seconds_of(plan, demands))


def test_a_price_of_padding_picks_among_plans_that_are_as_fast():
    """A size measured too fast, in a lucky moment, is not taken for steps far below it; and the search is exact still."""
    lucky = [BucketTimes(size, 8, size, seconds, 2e-6, 1e-6) for size, seconds in ((24, 30e-3), (40, 30.2e-3))]
    demands, model, price = random_demands(40, 4), replace(MODEL, times=(*MODEL.times, *lucky)), 5e-4
    pairs = [(t, min(t, SEQS)) for t in SIZES if t < TOKENS]

    def num_padding(plan: BucketPlan) -> float:
        return int(demands.tokens.sum()) * (1 / (1 - padding_share(plan, demands)) - 1)

    def cost(plan: BucketPlan) -> float:
        return plan_seconds(plan, demands, model) + price * num_padding(plan)

    limits = {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, "multiple": 2, "sizes": SIZES}
    fast = BucketSearch(demands, model, **limits).solve(Caps(10), pairs=False)
    priced = BucketSearch(demands, model, padding_price=price, **limits).solve(Caps(10), pairs=False)
    assert priced.cost == pytest.approx(min(map(cost, all_plans(10, pairs)))) == pytest.approx(priced.bound)
    assert priced.cost == pytest.approx(cost(priced.plan)) and priced.seconds == pytest.approx(
        plan_seconds(priced.plan, demands, model)
    )
    assert num_padding(priced.plan) < 0.9 * num_padding(fast.plan)
    assert priced.seconds <= fast.seconds + price * (num_padding(fast.plan) - num_padding(priced.plan))


def test_caps():
    demands = random_demands(100, 2)
    free = search(demands).solve(Caps(14))
    capped = search(demands).solve(Caps(14, max_compile_seconds=8.0))
    assert (
        sum(MODEL.compile_seconds(b) for b in capped.plan.buckets) <= 8 < sum(MODEL.compile_seconds(b) for b in free.plan.buckets)
    )
    with pytest.raises(ValueError, match="max_programs=3.*raise them"):
        search(demands).solve(Caps(3))
    with pytest.raises(ValueError, match="max_compile_seconds=1"):
        search(demands).solve(Caps(14, max_compile_seconds=1.0))
    with pytest.raises(ValueError, match="lower max_num_batched_tokens"):
        search(demands).solve(Caps(14, max_temp_bytes=1000))
    with pytest.raises(ValueError, match="log is empty"):
        search(DemandLog.from_rows([]))
    with pytest.raises(ValueError, match="no bucket holds"):
        plan_seconds(BucketPlan((), ((8, 8),), (8,)), demands, MODEL)
    assert np.isfinite(free.seconds)


@pytest.mark.parametrize("seed", range(5))
def test_lagrangian_bound_on_random_costs(seed):
    """Never above the cheapest set, and close below it; the search among columns in order never ends below it."""
    rng = np.random.default_rng(seed)
    size = np.arange(1, 13)
    cost = np.where(size[:, None] <= size[None, :], rng.integers(1, 20, (12, 1)) * (size + rng.random((12, 12))), np.inf)
    sets = [c for c in itertools.combinations(range(12), 4) if 11 in c]
    best = min(cost[:, list(c)].min(axis=1).sum() for c in sets)
    bound = lagrangian_bound(cost, 4, [11], upper=1.3 * best)
    assert 0.9 * best <= bound <= best * (1 + 1e-9)
    found = interchange(cost, [11], 4, [11])
    columns = np.array(found)
    assert cost[np.arange(12), columns[np.isfinite(cost[:, columns]).argmax(axis=1)]].sum() >= best * (1 - 1e-9) and len(found) == 4


@pytest.mark.parametrize("seed", range(3))
def test_fewer_programs_for_compile_seconds_promise_no_more(seed):
    """Decode buckets compile in half the time of mixed ones: the best plan of fewer programs is no bound for one of more."""
    demands, caps = random_demands(40, seed), Caps(10, max_compile_seconds=7.0)
    found = search(demands).solve(caps, pairs=False)
    pairs = [(t, min(t, SEQS)) for t in SIZES if t < TOKENS]
    plans = [p for p in all_plans(10, pairs) if sum(map(MODEL.compile_seconds, p.buckets)) <= 7]
    best = min(plan_seconds(plan, demands, MODEL) for plan in plans)
    assert found.capped and found.bound <= best * (1 + 1e-9) and found.seconds >= best * (1 - 1e-9)
    free = search(demands).solve(Caps(10), pairs=False)
    assert not free.capped and found.bound == pytest.approx(free.bound)


def test_no_program_exceeds_the_memory():
    """Every bucket of the plan, sizes on a ladder among them; those that each plan needs are named where they can't be held."""
    demands, large = random_demands(100, 2), [BucketTimes(24, 8, 24, 22e-3, 2e-6, 1e-6, 2.0, 9000)]
    hungry = replace(MODEL, times=(*MODEL.times, *large))
    limits: dict[str, Any] = {"max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, "multiple": 2}
    for pairs in (True, False):
        found = BucketSearch(demands, hungry, **limits).solve(Caps(14, max_temp_bytes=2000), pairs=pairs)
        assert max(map(hungry.temp_bytes, found.plan.buckets)) <= 2000
        free = BucketSearch(demands, hungry, **limits).solve(Caps(14), pairs=pairs)
        assert max(map(hungry.temp_bytes, free.plan.buckets)) > 2000
    decodes = replace(MODEL, times=tuple(replace(t, temp_bytes=5000) if t.max_q_len == 1 else t for t in MODEL.times))
    with pytest.raises(ValueError, match="a step of max_num_seqs=8 needs .* MiB allowed: lower max_num_seqs or allow more"):
        BucketSearch(demands, decodes, **limits).solve(Caps(14, max_temp_bytes=2000))
