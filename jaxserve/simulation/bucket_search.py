"""The set of buckets that runs a log of demands in the least predicted time, within so many programs.

Owns the optimisation; a demand log and a StepTimeModel go in, a BucketPlan and a proven bound come out. Knows no clock, scheduler
or device. Steps are assigned as the engine assigns them: to the first bucket, in BucketPlan's order, that holds them.

Three sub-problems share the programs. Head rows are one-dimensional, and exact by dynamic programming; so are decode buckets, and
mixed buckets as long as all have room for max_num_seqs sequences. Pairs (T, S) are a p-median problem, which is NP-hard: an
interchange search (Teitz and Bart, 1968) starts from the dynamic program's answer, and a Lagrangian bound (Cornuejols, Fisher and
Nemhauser, 1977) says how far at most the answer lies above the best set of the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.buckets.plan import HEAD_VARIANTS, OTHER_PROGRAMS, Bucket, BucketPlan
from jaxserve.scheduling.demand import DemandLog
from jaxserve.step_times.fitted import StepTimeModel

MAX_CANDIDATE_TOKENS = 128  # sizes of T that pairs are made of; the dynamic program sees every size
MAX_CANDIDATE_SEQS = 8
BOUND_ITERATIONS = 200


@dataclass(frozen=True)
class Caps:
    """What a plan may cost. max_programs: bodies, heads in every variant and the others, as BucketPlan.num_programs.
    max_compile_seconds: of all bodies together; max_temp_bytes: of any body."""

    max_programs: int
    max_compile_seconds: float | None = None
    max_temp_bytes: int | None = None


@dataclass(frozen=True)
class SearchResult:
    """plan: the best found. seconds: predicted for the log. cost: what the search makes small, the seconds and the price of the
    padding. bound: no set of the candidates costs less. ladder_cost: of the best plan with as many programs whose mixed buckets all
    have max_num_seqs sequences, exact. num_candidates: mixed and decode buckets to choose from. capped: max_compile_seconds took
    programs away, and a plan with more of them that compile faster may be better; the bound holds for those too.
    """

    plan: BucketPlan
    seconds: float
    cost: float
    bound: float
    ladder_cost: float
    num_candidates: int
    capped: bool = False

    @property
    def gap(self) -> float:
        """How far at most the plan's cost lies above the best, as a share of the best."""
        return self.cost / self.bound - 1


def plan_seconds(plan: BucketPlan, demands: DemandLog, step_times: StepTimeModel) -> float:
    """Predicted time of the log's steps in a plan's buckets. ValueError if a step fits none."""
    left, total = np.ones(len(demands), bool), 0.0
    for bucket in plan.buckets:
        here = left & _held(bucket, demands)
        total += float(step_times.body_seconds(bucket, demands.kv_tokens[here], demands.pairs[here]).sum())
        left &= ~here
    if left.any():
        i = int(np.flatnonzero(left)[0])
        plan.select(int(demands.tokens[i]), int(demands.seqs[i]), int(demands.max_q_len[i]))  # raises
    for rows, count in zip(*np.unique(demands.samples, return_counts=True), strict=True):
        total += step_times.head_seconds(plan.select_head_rows(int(rows)) if rows else 0) * int(count)
    return total


def padding_share(plan: BucketPlan, demands: DemandLog) -> float:
    """Padding tokens over all tokens that the log's steps run in a plan's buckets."""
    left, padded = np.ones(len(demands), bool), 0
    for bucket in plan.buckets:
        here = left & _held(bucket, demands)
        padded += bucket.tokens * int(here.sum())
        left &= ~here
    return 1 - int(demands.tokens.sum()) / padded


def _held(bucket: Bucket, demands: DemandLog) -> np.ndarray:
    return (demands.tokens <= bucket.tokens) & (demands.seqs <= bucket.seqs) & (demands.max_q_len <= bucket.max_q_len)


class BucketSearch:
    """The search over one log.

    Args:
      demands: the steps.
      step_times: their predicted times.
      max_num_seqs, max_num_batched_tokens: every step within them must fit the plan, whether the log has it or not.
      multiple: sizes are multiples of it (but for max_num_seqs and the budget themselves).
      sizes: sizes that buckets and heads may have; by default every multiple that some step of the log fits best.
      padding_price: seconds that a padding token costs beside what the model says. Between plans whose times the model, fitted to
        noisy measurements, can't tell apart, it takes the one with less padding: a plan found has at most
        padding_price * (padding tokens of the fastest plan) more predicted seconds than the fastest.
    """

    def __init__(
        self,
        demands: DemandLog,
        step_times: StepTimeModel,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        multiple: int,
        sizes: Sequence[int] | None = None,
        padding_price: float = 0.0,
    ):
        if not len(demands):
            raise ValueError("the demand log is empty: nothing to fit buckets to")
        self.demands = demands
        self.step_times = step_times
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.multiple = multiple
        self.sizes = sizes
        self.padding_price = padding_price
        self.is_decode: np.ndarray = demands.max_q_len == 1

    def solve(self, caps: Caps, *, pairs: bool = True) -> SearchResult:
        """The best plan found within `caps`.

        pairs: mixed buckets may have fewer than max_num_seqs sequences; without them the answer is exact, but where
          max_compile_seconds takes programs away.

        Raises:
          ValueError: too few programs, or a program that every plan needs exceeds the memory; the message says what to change.
        """
        self._check_memory(caps)
        heads, bound = self._head_ladders(caps), np.inf
        decode = self._size_ladders(self.is_decode, self.max_num_seqs, caps, decode=True)
        ladders = decode, self._size_ladders(~self.is_decode, self.budget, caps, decode=False)
        for num_programs in range(caps.max_programs, 0, -1):
            result = self._solve(num_programs, heads, ladders, caps, pairs)
            if result is None:
                break
            bound = min(bound, result.bound)  # of fewer programs alone it would be above what more of them may cost
            compile_seconds = sum(self.step_times.compile_seconds(b) for b in result.plan.buckets)
            if caps.max_compile_seconds is None or compile_seconds <= caps.max_compile_seconds:
                return replace(result, bound=bound, capped=num_programs < caps.max_programs)
        raise ValueError(
            f"no plan stays within max_programs={caps.max_programs} and max_compile_seconds={caps.max_compile_seconds}: "
            f"it needs a mixed bucket, a decode bucket, a head ({HEAD_VARIANTS} programs) and {OTHER_PROGRAMS} others; raise them"
        )

    def _check_memory(self, caps: Caps) -> None:
        for bucket in self._required:
            if not self._within_memory(bucket, caps):
                need = self.step_times.temp_bytes(bucket)
                name, size = ("max_num_seqs", bucket.seqs) if bucket.max_q_len == 1 else ("max_num_batched_tokens", bucket.tokens)
                raise ValueError(
                    f"a step of {name}={size} needs {need / 2**20:.0f} MiB of temporary memory, more than "
                    f"the {(caps.max_temp_bytes or 0) / 2**20:g} MiB allowed: lower {name} or allow more"
                )

    def _solve(self, num_programs: int, heads: dict, ladders: tuple[dict, dict], caps: Caps, pairs: bool) -> SearchResult | None:
        """The best over how many of the programs are heads."""
        best, bound, least = None, np.inf, np.inf
        real = self.padding_price * int(self.demands.tokens.sum())  # what the prices below take for tokens that are no padding
        for num_heads, (head_seconds, head_rows) in heads.items():
            num_bodies = num_programs - OTHER_PROGRAMS - HEAD_VARIANTS * num_heads
            if num_bodies < 2:
                continue
            ladder, ladder_cost = self._ladder(num_bodies, *ladders)
            least = min(least, ladder_cost + head_seconds - real)
            found = (ladder, ladder_cost, ladder_cost, len(ladder))
            if pairs:
                found = self._pairs(ladder, num_bodies, caps)
            buckets, body_cost, body_bound, num_candidates = found
            bound = min(bound, body_bound + head_seconds - real)
            cost = body_cost + head_seconds - real
            if best is None or cost < best[0]:
                best = cost, _plan(buckets, head_rows), num_candidates
        if best is None:
            return None
        cost, plan, num_candidates = best
        return SearchResult(plan, plan_seconds(plan, self.demands, self.step_times), cost, min(bound, cost), least, num_candidates)

    def _rates(self, bucket: Bucket) -> np.ndarray:
        """f64[3]: cost of a step, of a KV position and of a pair in this bucket."""
        return self.step_times.coefficients(bucket) + np.array([self.padding_price * bucket.tokens, 0.0, 0.0])

    def _round_up(self, values: np.ndarray, most: int) -> np.ndarray:
        """Each value's smallest allowed size, at most `most`."""
        if self.sizes is None:
            return np.minimum(-(-values // self.multiple) * self.multiple, most)
        sizes = np.array(sorted({s for s in self.sizes if s < most} | {most}))
        return sizes[np.searchsorted(sizes, values)]

    def _head_ladders(self, caps: Caps) -> dict[int, tuple[float, list[int]]]:
        """number of head sizes -> (seconds, sizes), exact."""
        samples = self.demands.samples[self.demands.samples > 0]
        sizes, counts = np.unique(np.append(self._round_up(samples, self.max_num_seqs), self.max_num_seqs), return_counts=True)
        counts[-1] -= 1  # the appended one
        before = np.concatenate([[0], np.cumsum(counts)])
        seconds = np.array([self.step_times.head_seconds(int(s)) for s in sizes])
        cost = (before[1:][None, :] - before[:-1][:, None]) * seconds[None, :]
        ladders = _ladders(cost, max(1, (caps.max_programs - OTHER_PROGRAMS - 2) // HEAD_VARIANTS))
        return {k: (total, [int(sizes[j]) for j in chosen]) for k, (total, chosen) in ladders.items()}

    def _ladder(self, num_bodies: int, decode: dict, mixed: dict) -> tuple[list[Bucket], float]:
        """The best decode sizes and mixed sizes with max_num_seqs sequences, `num_bodies` together, exact; and their cost."""
        splits = []
        for k in range(1, num_bodies):
            (d, decode_sizes), (m, mixed_sizes) = _at_most(decode, k), _at_most(mixed, num_bodies - k)
            splits.append((d + m, len(decode_sizes) + len(mixed_sizes), k))
        seconds, _, k = min(splits)
        buckets = [Bucket(s, s, 1) for s in _at_most(decode, k)[1]]
        buckets += [Bucket(t, min(t, self.max_num_seqs), t) for t in _at_most(mixed, num_bodies - k)[1]]
        return buckets, seconds

    def _size_ladders(self, which: np.ndarray, largest: int, caps: Caps, *, decode: bool, most: int = 64) -> dict:
        """number of sizes -> (cost, sizes) for the steps `which`, exact. The largest size is always among them."""
        d = self.demands
        # A mixed bucket below max_num_seqs tokens has as many sequences as tokens, so that tokens alone decide whether it holds.
        sized = self._round_up(d.tokens[which], largest)
        sizes, where = np.unique(np.append(sized, largest), return_inverse=True)
        where = where[:-1]
        sums = np.stack([np.bincount(where, w, len(sizes)) for w in (None, d.kv_tokens[which], d.pairs[which])])
        before = np.concatenate([np.zeros((3, 1)), np.cumsum(sums, axis=1)], axis=1)
        buckets = [Bucket(int(s), int(s), 1) if decode else Bucket(int(s), min(int(s), self.max_num_seqs), int(s)) for s in sizes]
        rates = np.stack([self._rates(b) for b in buckets])  # [m, 3]
        # [i, j]: steps above size i - 1 and up to size j, run in size j
        cost = sum(rates[None, :, c] * (before[c, 1:][None, :] - before[c, :-1][:, None]) for c in range(3))
        held = np.array([self._within_memory(b, caps) for b in buckets])
        ladders = _ladders(np.where(held, np.asarray(cost), np.inf), most)
        return {k: (total, [int(sizes[j]) for j in chosen]) for k, (total, chosen) in ladders.items()}

    def _within_memory(self, bucket: Bucket, caps: Caps) -> bool:
        return caps.max_temp_bytes is None or self.step_times.temp_bytes(bucket) <= caps.max_temp_bytes

    # Pairs

    def _pairs(self, start: list[Bucket], num_bodies: int, caps: Caps) -> tuple[list[Bucket], float, float, int]:
        """(buckets, cost, bound, number of candidates): interchange from `start`, and the Lagrangian bound."""
        candidates = self._candidates(start, caps)
        cost = self._costs(candidates)  # [types, candidates], inf where a bucket doesn't hold
        column = {b: j for j, b in enumerate(candidates)}
        fixed = [column[b] for b in self._required]
        chosen = interchange(cost, [column[b] for b in start], num_bodies, fixed)
        seconds = float(_first_costs(cost, chosen)[1].sum())
        bound = lagrangian_bound(cost, num_bodies, fixed, seconds)
        return [candidates[j] for j in chosen], seconds, bound, len(candidates)

    @property
    def _required(self) -> list[Bucket]:
        """What every plan has: a bucket for any step within the limits, and one for as many decodes as may run."""
        return [Bucket(self.budget, self.max_num_seqs, self.budget), Bucket(self.max_num_seqs, self.max_num_seqs, 1)]

    def _candidates(self, start: list[Bucket], caps: Caps) -> list[Bucket]:
        """Buckets to choose from, in BucketPlan's order: sizes that the log wants, `start` among them."""
        mixed, d = ~self.is_decode, self.demands
        tokens = {b.tokens for b in start if b.max_q_len > 1} | set(
            self._quantiles(d.tokens[mixed], MAX_CANDIDATE_TOKENS, self.budget)
        )
        seqs = self._quantiles(d.seqs[mixed], MAX_CANDIDATE_SEQS, self.max_num_seqs)
        decode = {b.tokens for b in start if b.max_q_len == 1}
        decode |= set(self._quantiles(d.seqs[self.is_decode], MAX_CANDIDATE_TOKENS // 2, self.max_num_seqs))
        found = {*start, *self._required, *(Bucket(s, s, 1) for s in decode)}
        found |= {Bucket(t, min(s, t), t) for t in tokens for s in seqs}
        found = [b for b in found if self._within_memory(b, caps)]
        return sorted(found, key=lambda b: (b.tokens, b.max_q_len > 1, b.seqs))

    def _quantiles(self, values: np.ndarray, count: int, most: int) -> list[int]:
        """At most `count` sizes that split the values evenly; the largest value's is one, and `most`."""
        sizes = np.unique(self._round_up(values, most))
        if len(sizes) > count - 1:
            ordered = np.sort(self._round_up(values, most))
            sizes = np.unique(ordered[np.linspace(0, len(ordered) - 1, count - 1).round().astype(int)])
        return sorted({int(s) for s in sizes} | {most})

    def _costs(self, candidates: list[Bucket]) -> np.ndarray:
        """f64[types, candidates]: cost of all steps of a type in a bucket, inf where it can't hold them. A type is the steps
        that the same candidates hold."""
        d = self.demands
        token_edges = np.unique([b.tokens for b in candidates])
        seq_edges = np.unique([b.seqs for b in candidates])
        key = np.stack([np.searchsorted(token_edges, d.tokens), np.searchsorted(seq_edges, d.seqs), ~self.is_decode])
        types, where = np.unique(key, axis=1, return_inverse=True)
        where = where.ravel()
        sums = np.stack([np.bincount(where, w, types.shape[1]) for w in (None, d.kv_tokens, d.pairs)], axis=1)  # [types, 3]
        rates = np.stack([self._rates(b) for b in candidates], axis=1)  # [3, candidates]
        size = np.array([(b.tokens, b.seqs, b.max_q_len > 1) for b in candidates]).T
        fits = (
            (token_edges[types[0]][:, None] <= size[0]) & (seq_edges[types[1]][:, None] <= size[1]) & (types[2][:, None] <= size[2])
        )
        return np.where(fits, sums @ rates, np.inf)


def _plan(buckets: Sequence[Bucket], head_rows: Sequence[int]) -> BucketPlan:
    decode = tuple(b.seqs for b in buckets if b.max_q_len == 1)
    return BucketPlan(
        decode=decode, mixed=tuple((b.tokens, b.seqs) for b in buckets if b.max_q_len > 1), head_rows=tuple(head_rows)
    )


def _at_most(ladders: dict[int, tuple[float, list[int]]], k: int) -> tuple[float, list[int]]:
    """The best ladder of at most k sizes."""
    return ladders[min(k, max(ladders))]


def _ladders(
    cost: np.ndarray,  # f64[m, m]: [i, j] is the cost of items i..j at size j
    most: int,
) -> dict[int, tuple[float, list[int]]]:
    """k -> (least cost, sizes chosen) with at most k of the m sizes, the last always chosen: exact, in O(k m^2)."""
    m = len(cost)
    cost = np.where(np.tri(m, m, -1, dtype=bool), np.inf, cost)  # i > j means nothing
    best, back, result = cost[0].copy(), [], {}
    result[1] = (float(best[-1]), [m - 1])
    for k in range(2, min(most, m) + 1):
        # sums[i, j]: sizes up to i - 1 solved with k - 1, items i..j at j
        sums = best[:-1, None] + cost[1:]
        at = sums.argmin(axis=0)
        fewer = best
        best = np.minimum(fewer, sums[at, np.arange(m)])
        back.append(np.where(best < fewer, at, -1))
        chosen, j = [m - 1], m - 1
        for level in reversed(back):
            if level[j] >= 0:
                j = int(level[j])
                chosen.append(j)
        result[k] = (float(best[-1]), chosen[::-1])
        if len(chosen) < k:
            break  # one more size does not help
    return result


def _first_costs(
    cost: np.ndarray,  # f64[types, candidates]
    chosen: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """(column that runs each type, its cost): the first of the chosen that holds it."""
    columns = np.sort(np.array(chosen))
    first = np.isfinite(cost[:, columns]).argmax(axis=1)
    where = columns[first]
    return where, cost[np.arange(len(cost)), where]


def interchange(
    cost: np.ndarray,  # f64[types, candidates], inf where a candidate can't hold a type; columns in the order of choice
    start: Sequence[int],
    count: int,
    fixed: Sequence[int],  # columns that stay
) -> list[int]:
    """At most `count` columns: adds the best one while there is room, then swaps the best pair, until nothing gains."""
    num_types, num_columns = cost.shape
    holds = np.isfinite(cost)
    filled = np.where(holds, cost, 0.0)
    chosen = sorted({*start, *fixed})
    index = np.arange(num_columns)
    while True:
        now = _first_costs(cost, chosen)[1].sum()
        best, move = now * (1 - 1e-9), None
        outs = [None] if len(chosen) < count else []
        outs += [c for c in chosen if c not in fixed]
        for out in outs:
            rest = [c for c in chosen if c != out]
            where, costs = _first_costs(cost, rest)
            if not np.isfinite(costs).all():
                continue
            earlier = holds & (index[None, :] < where[:, None])  # types that a new column would take over
            gain = np.where(earlier, filled - costs[:, None], 0.0).sum(axis=0)
            j = int(gain.argmin())
            if costs.sum() + gain[j] < best:
                best, move = costs.sum() + gain[j], (rest, j)
        if move is None:
            return chosen
        chosen = sorted({*move[0], move[1]})


def lagrangian_bound(
    cost: np.ndarray,  # f64[types, candidates]
    count: int,
    fixed: Sequence[int],
    upper: float,  # the cost of some answer
    iterations: int = BOUND_ITERATIONS,
) -> float:
    """A lower bound on the cost of `count` columns, `fixed` among them, each type run by whichever chosen column is cheapest.

    Each type's duty to be run is priced with a multiplier u; what is left falls apart by column. Subgradient steps raise the bound.
    """
    num_types, num_columns = cost.shape
    free = np.ones(num_columns, bool)
    free[list(fixed)] = False
    take = max(0, count - len(fixed))
    u = np.where(np.isfinite(cost), cost, np.inf).min(axis=1)
    best, scale, stale = -np.inf, 1.0, 0
    for _ in range(iterations):
        reduced = np.minimum(cost - u[:, None], 0.0)
        rho = reduced.sum(axis=0)
        order = np.argsort(np.where(free, rho, np.inf))[:take]
        chosen = np.concatenate([np.array(list(fixed), int), order])
        value = float(u.sum() + rho[chosen].sum())
        stale = 0 if value > best * (1 + 1e-6) else stale + 1
        best = max(best, value)
        if stale > 8:
            scale, stale = scale / 2, 0
        gradient = 1.0 - (reduced[:, chosen] < 0).sum(axis=1)
        norm = float((gradient**2).sum())
        if not norm or upper - best <= 1e-6 * upper:
            break
        u = u + scale * max(upper - value, 0.0) / norm * gradient
    return best
