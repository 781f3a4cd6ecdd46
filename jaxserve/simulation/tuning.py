"""Choosing a bucket plan and a token budget for a workload, with the scheduler and the step-time model in the loop.

Owns the loops around BucketSearch and replay: a plan changes how long steps take, which changes the batches that follow when
requests arrive over time, which changes the best plan. Pure numpy; knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.demand import DemandLog
from jaxserve.simulation.bucket_search import BucketSearch, Caps, SearchResult, plan_seconds
from jaxserve.simulation.replay import Replay, replay
from jaxserve.step_times.fitted import StepTimeModel
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.traffic import stretches
from jaxserve.workloads.workload import Workload

# What a padding token costs beside its predicted time, as a share of a token's time in the largest bucket. Least times of a noisy
# profile are too low where a bucket was measured in a lucky moment, and a search finds those buckets; padding has no such error.
PADDING_PRICE = 0.25
# Where requests arrive over time, a plan is fitted to machines so many times slower too. Fitted to the promised one alone its
# buckets hold just as many sequences as meet there; a machine that is a little slower meets more, falls to the next bucket, and is
# slower for it.
SLOWER = (1.2, 1.5)
# Of a longer workload whose requests arrive over time, so many, from all over it, are replayed to fit a plan.
MOST_FITTED = 2000


@dataclass(frozen=True)
class Machine:
    """Where a workload runs: step times, limits, pages, and the multiple that bucket sizes come in. objective: seconds that a step
    with decodes may take, by a dynamic budget; None: none. async_scheduling, prefix_caching: as `replay`'s."""

    step_times: StepTimeModel
    limits: SchedulerConfig
    num_pages: int
    multiple: int
    objective: float | None = None
    async_scheduling: bool = True
    prefix_caching: bool = True

    def run(
        self,
        workload: Workload,
        plan: BucketPlan,
        progress: Callable[[int], object] | None = None,
        give_up: Callable[[ServedTimes], bool] | None = None,
    ) -> Replay:
        """`replay` here; progress, give_up: as its."""
        return replay(
            workload,
            plan,
            self.step_times,
            self.limits,
            self.num_pages,
            async_scheduling=self.async_scheduling,
            prefix_caching=self.prefix_caching,
            objective=self.objective,
            give_up=give_up,
            progress=progress,
        )

    def slower(self, factor: float) -> Machine:
        """This machine where every step takes `factor` times as long."""
        return replace(self, step_times=replace(self.step_times, slowdown=factor * self.step_times.slowdown))

    def search(self, demands: DemandLog, sizes: Sequence[int] | None = None, *, padding_price: float = 0.0) -> BucketSearch:
        """padding_price: price of a padding token, as a share of a token's time in the largest bucket."""
        seqs, budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens
        base = float(self.step_times.coefficients(Bucket(budget, seqs, budget))[0])
        return BucketSearch(
            demands,
            self.step_times,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            multiple=self.multiple,
            sizes=sizes,
            padding_price=padding_price * base / budget,
        )


@dataclass(frozen=True)
class Tuned:
    """A plan fitted to a workload, beside two of powers of two with at most as many programs: the engine's default rule's, and
    the best that a search among powers of two finds. rounds: how many logs were searched.

    The replays are of the whole workload.

    fixed_log_gain, in_loop_gain: of the first round's plan, which may not be the one that is kept, the seconds that the device is
    busy with the default plan over those with it: by the default's demand log alone, and as the scheduler serves it. How far they
    lie apart is how far a fixed log mispredicts. What is won in the end is `gain`, in `cost`.
    """

    plan: BucketPlan
    search: SearchResult
    replay: Replay
    default_plan: BucketPlan
    default_replay: Replay
    powers_plan: BucketPlan
    powers_replay: Replay
    fixed_log_gain: float
    in_loop_gain: float
    rounds: int

    @property
    def at_once(self) -> bool:
        """Whether `cost` is the workload's duration."""
        return _at_once(self.replay)

    def gain(self, over: Replay) -> float:
        """`cost` of another plan over the tuned plan's."""
        return cost(over) / cost(self.replay)


def cost(run: Replay) -> float:
    """What tuning makes small, in seconds: the duration of a workload that arrives at once, else the mean time of a request from
    arrival to last token."""
    return run.duration if _at_once(run) else float(run.times.seconds("e2el").mean())


def _at_once(run: Replay) -> bool:
    return bool((run.times.arrivals == run.times.arrivals[0]).all())


def default_plan(machine: Machine, max_programs: int) -> BucketPlan:
    """The powers of two that the engine would take by itself."""
    limits = machine.limits
    return BucketPlan.default(
        limits.max_num_seqs, limits.max_num_batched_tokens, min_tokens=machine.multiple, max_programs=max_programs
    )


def tune_plan(
    workload: Workload, machine: Machine, caps: Caps, max_rounds: int = 4, progress: Callable[[int], object] | None = None
) -> Tuned:
    """The plan that serves `workload` best in virtual time.

    Each round searches the demand log of the last plan's replay and replays the plan found, until the log stays the same or no
    round improves; the best plan seen is kept. Where all requests arrive at once no step waits for a time, so that the log does
    not depend on the plan and the first round is the last. Where they arrive over time the log is of this machine and of
    SLOWER ones, and the best plan is so by its mean share of the default plan's cost on them; of more than MOST_FITTED requests
    the rounds replay so many (traffic.stretches). progress: told how many requests a replay ended, whenever some do.

    Raises:
      ValueError: as `replay` and `BucketSearch.solve`.
    """
    if len(workload.requests) <= MOST_FITTED or len({r.arrived_at for r in workload.requests}) == 1:
        return _tune_plan(workload, machine, caps, max_rounds, progress)
    tuned = _tune_plan(stretches(workload, MOST_FITTED), machine, caps, max_rounds, progress)
    default, powers, best = (machine.run(workload, plan, progress) for plan in (tuned.default_plan, tuned.powers_plan, tuned.plan))
    return replace(tuned, replay=best, default_replay=default, powers_replay=powers)


def _tune_plan(
    workload: Workload, machine: Machine, caps: Caps, max_rounds: int, progress: Callable[[int], object] | None
) -> Tuned:
    """`tune_plan`, every replay of all requests."""
    default = default_plan(machine, caps.max_programs)
    base = [machine.run(workload, default, progress)]
    machines = [machine] if _at_once(base[0]) else [machine, *map(machine.slower, SLOWER)]
    base += [slower.run(workload, default, progress) for slower in machines[1:]]
    log = DemandLog.concatenate([run.demands for run in base])
    powers = [1 << i for i in range(machine.limits.max_num_batched_tokens.bit_length() + 1)]
    powers = [size for size in powers if size % machine.multiple == 0]
    powers_plan = machine.search(log, powers).solve(Caps(caps.max_programs), pairs=False).plan
    best, least, seen, rounds, fixed_log_gain, in_loop_gain = None, np.inf, set(), 0, 1.0, 1.0
    while rounds < max_rounds:
        rounds += 1
        search = machine.search(log, padding_price=PADDING_PRICE).solve(caps)
        if search.plan in seen:
            break
        seen.add(search.plan)
        runs = [each.run(workload, search.plan, progress) for each in machines]
        if rounds == 1:
            fixed = base[0].demands
            before = plan_seconds(default, fixed, machine.step_times)
            fixed_log_gain = before / plan_seconds(search.plan, fixed, machine.step_times)
            in_loop_gain = float(base[0].seconds.sum() / runs[0].seconds.sum())
        last, log = log, DemandLog.concatenate([run.demands for run in runs])
        same = len(last) == len(log) and bool((last.tokens == log.tokens).all())
        share = float(np.mean([cost(run) / cost(of) for run, of in zip(runs, base, strict=True)]))
        if share < least:
            best, least = (search, runs[0]), share
        elif not same:
            break
        if same:
            break
    assert best is not None
    search, run = best
    powers_run = machine.run(workload, powers_plan, progress)
    return Tuned(search.plan, search, run, default, base[0], powers_plan, powers_run, fixed_log_gain, in_loop_gain, rounds)


@dataclass(frozen=True)
class BudgetChoice:
    """One token budget, served in virtual time: its quantile of the time between tokens, and what it gives."""

    budget: int
    gap: float  # seconds between tokens, at the quantile asked for
    replay: Replay


def with_budget(machine: Machine, plan: BucketPlan, budget: int) -> tuple[Machine, BucketPlan]:
    """The machine and the plan with a smaller token budget; buckets above it are dropped but for the smallest that holds it."""
    seqs = machine.limits.max_num_seqs
    large = [pair for pair in plan.mixed if pair[0] >= budget and pair[1] >= min(pair[0], seqs)]
    if not large:
        raise ValueError(f"{budget=} is beyond the plan's largest bucket {plan.mixed[-1]}")
    top = min(large)
    mixed = tuple(pair for pair in plan.mixed if pair[0] < top[0]) + (top,)
    limits = replace(machine.limits, max_num_batched_tokens=budget)
    return replace(machine, limits=limits), BucketPlan(plan.decode, mixed, plan.head_rows)


def tune_budget(
    workload: Workload,
    machine: Machine,
    plan: BucketPlan,
    objective: float,
    quantile: float,
    budgets: Sequence[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[BudgetChoice, list[BudgetChoice]]:
    """(the largest budget whose time between tokens stays within `objective` seconds at `quantile`, all that were tried).

    budgets: by default the plan's mixed buckets that hold max_num_seqs decodes and more: any other budget pays for a larger bucket
    than it fills. progress: told how many requests a replay ended, whenever some do.

    Raises:
      ValueError: no budget to try, or none holds the objective; the message says what the smallest would give.
    """
    seqs = machine.limits.max_num_seqs
    if budgets is None:
        budgets = [t for t, s in plan.mixed if t > seqs and s >= seqs]
    if not budgets:
        raise ValueError(
            f"no budget to try: no mixed bucket of the plan holds max_num_seqs={seqs} sequences and more tokens than those "
            f"({plan}); name budgets, lower max_num_seqs, or give a plan with larger buckets"
        )
    tried = []
    for budget in sorted(budgets):
        limited, small = with_budget(machine, plan, budget)
        run = limited.run(workload, small, progress)
        tried.append(BudgetChoice(budget, run.times.gap_quantile(quantile), run))
    good = [choice for choice in tried if choice.gap <= objective]
    if not good:
        least = min(tried, key=lambda choice: choice.gap)
        raise ValueError(
            f"no token budget keeps P{100 * quantile:g} of the time between tokens within {1e3 * objective:g} ms: budget "
            f"{least.budget} gives {1e3 * least.gap:.1f} ms; lower max_num_seqs={seqs} or the request rate, or relax the objective"
        )
    return max(good, key=lambda choice: choice.budget), tried


def padded_budget(plan: BucketPlan, budget: int, max_num_seqs: int) -> int:
    """The tokens of the bucket that a full step of this budget runs in."""
    return plan.select(budget, max_num_seqs, budget).tokens


def step_seconds(machine: Machine, plan: BucketPlan, tokens: int, decodes: int, kv_tokens: int) -> float:
    """Predicted time of a step of `decodes` decodes over `kv_tokens` of KV and one chunk that fills it up to `tokens`."""
    chunk = tokens - decodes
    bucket = plan.select(tokens, decodes + (chunk > 0), max(1, chunk))
    rows = plan.select_head_rows(max(1, decodes))
    return machine.step_times.seconds(bucket, rows, kv_tokens, chunk * (chunk + 1) / 2)


def mean_kv_tokens(run: Replay) -> float:
    """KV positions that an average decode of the run reads."""
    return float(run.demands.kv_tokens.sum() / np.maximum(1, run.demands.decodes.sum()))
