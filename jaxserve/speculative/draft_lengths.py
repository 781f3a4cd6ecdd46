"""How many drafts each sequence verifies in the next step, by what became of earlier drafts.

Owns the host's mirror of what the device proposed, and what is learnt from it: how often drafts are right, row by row, whether
they were verified or not (a plain step's token says whether the first draft would have stood), and how long steps take. The
scheduler asks while it composes a step. Knows nothing of models, and of tokens only whether they are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative.proposer import NO_DRAFT

MEMORY, MEMORY_MADE = 0.15, 0.1  # weight of the newest draft in a row's rate; of drafts that a model makes
MEMORY_OF_NEW = 0.02  # of the newest step in what is expected of a row's next owner
FIRST_RATE = 0.5  # of the first rows
LEAST_RATE, LEAST_RATE_MADE = 0.2, 0.1  # a row whose drafts are right less often brings none; of drafts that take time to make
LEAST_GAIN = 1.05  # by prediction, over a plain step, that makes drafts worth it, and over a step at rest their making
NUM_TIMES = 48  # last times of a shape that count: half a second of a small model, so that a short bad moment is not its time
ENOUGH_TIMES = 3  # fewer say nothing: the first may hold a compile
RETRY_STEPS = 1000  # a shape that did not run for so many steps is timed anew,
DUE_STEPS, MOST_DOUBLINGS = 64, 2  # and one that would win in HOPE of its time after so many, and up to four times as many while
HOPE, AGREEING = 0.6, 0.95  # it takes AGREEING of it or more: what was timed in a bad moment is mended soon, at little cost
PATIENCE = 8  # steps of decodes in a row for which no drafts pay, and more of few rows; behind those none are made,
PROBE_EVERY, PROBE_STEPS = 128, 3  # but in so many of every so many steps
RESTS_THAT_FOLLOW = 1  # in a row, in which what drafts still runs over the steps' tokens; in others it does not
MOST_HALVINGS = 2  # of patience, and doublings of the steps between probes, each time that no drafts had paid since the last rest
TRIAL_STEPS, REST_DUE_STEPS = 5, 256  # without drafts, so that it is known what these take; for DUE_STEPS, as more steps are tried

_STATUS, _NUM_FORCED = attrgetter("status"), attrgetter("num_forced_in_flight")

Shape = tuple[Bucket, int]  # of a step of decodes alone: its bucket, its head's rows


class RecentTimes:
    """How long steps of each shape took of late, in seconds. Their lower quartile: what else the machine did is not the shape's."""

    def __init__(self, due_steps: int = DUE_STEPS) -> None:
        self._due_at_first, self._due_at_most = due_steps, due_steps << MOST_DOUBLINGS
        self._times: dict[Shape, deque[float]] = {}
        self._quartiles: dict[Shape, float] = {}  # of these
        self._last: dict[Shape, int] = {}  # at which step each ran last
        self._due_steps: dict[Shape, int] = {}  # behind that, until it is due
        self._num_steps = 0

    def add(self, shape: Shape, seconds: float) -> None:
        if self._age(shape) > RETRY_STEPS:
            del self._times[shape]
        times = self._times.setdefault(shape, deque(maxlen=NUM_TIMES))
        if self.is_due(shape):
            before, due_steps = self._quartiles[shape], 2 * self._due_steps.get(shape, self._due_at_first)
            agrees = seconds >= AGREEING * before
            self._due_steps[shape] = min(due_steps, self._due_at_most) if agrees else self._due_at_first
            times.clear()
            times += [before if agrees else seconds] * (ENOUGH_TIMES - 1)
        times.append(seconds)
        self._quartiles[shape] = _lower_quartile(times)
        self.skip()
        self._last[shape] = self._num_steps

    def skip(self) -> None:
        """A step went by that is none of these."""
        self._num_steps += 1

    def _age(self, shape: Shape) -> int:
        return self._num_steps - self._last.get(shape, self._num_steps)

    def is_due(self, shape: Shape) -> bool:
        """Whether its time is known, and so old that it is worth a step to see whether that moment was a bad one."""
        return len(self._times.get(shape, ())) >= ENOUGH_TIMES and self._age(shape) > self._due_steps.get(shape, self._due_at_first)

    def get(self, shape: Shape) -> float | None:
        """None: not known, or not any more."""
        known = len(self._times.get(shape, ())) >= ENOUGH_TIMES and self._age(shape) <= RETRY_STEPS
        return self._quartiles[shape] if known else None

    def least(self, shape: Shape) -> float:
        """What a step of this shape takes at least, by those of no more tokens and rows that are known; 0 without."""
        (bucket, rows), known = shape, 0.0
        for other, of_rows in self._times:
            if other.tokens <= bucket.tokens and of_rows <= rows:
                known = max(known, self.get((other, of_rows)) or 0.0)
        return known


def _lower_quartile(times: Collection[float]) -> float:
    return sorted(times)[len(times) // 4]


class DraftOutcomes(NamedTuple):
    """What became of the drafts of one step, by sequences that had some."""

    entries: np.ndarray  # i64[n]: of the schedule
    num_drafts: np.ndarray  # i64[n]: that were tokens
    num_accepted: np.ndarray  # i32[n]: what stood; a stop may lie before the last of them


class DraftLengths:
    """Chooses, of the plan's draft lengths, none included, what serves the requests best.

    A row whose drafts are right at the rate p brings 1 + p + p^2 + ... + p^k tokens where it verifies k (Leviathan et al., ICML
    2023, section 3.1). While requests queue for a row, most tokens a second are best: whoever ends sooner makes room. With nobody
    queueing that would let a few rows that copy slow down all others for nothing, as a batch ends with its slowest: then the least
    time per token is best, averaged over the rows, as long as it slows down no row by more than that average gains. The times are
    those of the engine's own steps. adaptive=False: always `num_drafts`.

    by_model: whether what drafts takes time, though nothing is verified. Rates change more slowly then (MEMORY_MADE). Drafts that
    are there are verified where that pays beside a step that made them for nothing. `proposes` says of each step whether its head
    shall make drafts, which must pay beside one that makes none: a few such steps are tried. Where none paid for a while it does
    not, but in a few steps from time to time, and again when other rows decode or so few that they have another bucket. `follows`
    says whether what drafts shall run over the step's tokens at least, so that it can draft well as soon as it is asked. Where no
    drafts have paid from one rest to the next, it does not: of the tokens of those steps it knows nothing then, and drafts well
    again for requests that come.

    on_host: whether the host writes `proposed` before it schedules, so that no row brings a draft that is none. Otherwise the
    device has newer drafts than `proposed`, which is a step behind.
    """

    def __init__(
        self,
        plan: BucketPlan,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_drafts: int,
        adaptive: bool = True,
        on_host: bool = False,
        by_model: bool = False,
    ):
        self.plan = plan
        self.on_host = on_host
        self.num_drafts = num_drafts
        self.adaptive = adaptive
        self.max_rows: int = plan.max_head_rows  # logits rows that a step may have
        self.max_tokens: int = min(max_num_batched_tokens, self.max_rows)
        self.lengths: list[int] = sorted({num_drafts, *(k for _, k in plan.draft if k < num_drafts)})
        self.proposed: np.ndarray = np.full((max_num_seqs, num_drafts), NO_DRAFT, np.int32)  # after each row's last token
        self.rates: np.ndarray = np.full(max_num_seqs, FIRST_RATE)  # how often a row's next draft is right
        self.times: RecentTimes = RecentTimes()
        self.times_at_rest: RecentTimes = RecentTimes(REST_DUE_STEPS)  # of steps whose heads made no drafts
        self.proposes: bool = True  # whether the head of the step that was scheduled last shall make drafts
        self.follows: bool = True  # whether what drafts shall run over that step's tokens
        self._by_model = by_model
        self._pays = False  # whether drafts chosen last pay for their making too
        self._unpaid = 0  # steps of decodes in a row in which they did not
        self._num_rests: dict[Shape, int] = {}  # of plain steps of each shape, since drafts paid there
        self._last_rows: np.ndarray = np.zeros(0, np.intp)
        self._last_shape: Shape | None = None
        self._num_steps = 0
        self._trial = 0  # steps of a trial without drafts that are left
        self._next_trials: dict[Shape, int] = {}  # at which step one may begin
        self._last_finished = 0.0
        self._generations = np.full(max_num_seqs, -1, np.int64)
        self._of_new = FIRST_RATE  # what to expect of a row's next owner
        self._memory = MEMORY_MADE if by_model else MEMORY
        self._keeps, self._ones = (1 - self._memory) ** np.arange(num_drafts + 1), np.ones(num_drafts, np.int32)
        self._first = np.tri(num_drafts + 1, num_drafts, -1, bool)  # of so many drafts the first n, for each n

    def choose(
        self,
        rows: np.ndarray,  # intp[n]: those that decode
        *,
        explore: bool,
        queued: bool,
    ) -> np.ndarray:  # i32[n]: drafts of each, as far as there is room
        """explore: whether the step will hold decodes alone, so that `take_time` learns what it took: of the shapes that were not
        timed the smallest is then tried, as if it took no longer than smaller ones, and of those that are due one that would win
        in HOPE of its time. Otherwise the former are left out. queued: whether requests wait for a row."""
        if not self.adaptive:
            self.proposes, chosen = True, np.full(len(rows), self.num_drafts, np.int32)
        elif self.proposes:
            chosen = self._choose(rows, explore, queued)
        else:
            chosen = np.zeros(len(rows), np.int32)  # the step before makes none
        if self._by_model and self.adaptive:
            self._rest(rows, bool(chosen.any()) and self._pays, timed=explore)
        return np.minimum(chosen, self._num_known(rows)) if self.on_host else chosen

    def _rest(self, rows: np.ndarray, pays: bool, timed: bool) -> None:
        """Decides whether the step in hand makes drafts. timed: `take_time` will learn what the step took. Rows that leave change
        nothing until a smaller bucket holds the rest."""
        shape = self.shape(len(rows), len(rows), 1)
        if not np.array_equal(rows, self._last_rows):
            alike = shape == self._last_shape and bool(np.isin(rows, self._last_rows).all())
            self._last_rows, self._last_shape = rows.copy(), shape
        else:
            alike = True
        self._unpaid = 0 if pays or not alike else self._unpaid + 1
        if pays:
            self._num_rests[shape] = 0
        self._num_steps += 1
        unsure = self.times_at_rest.get(shape) is None or self.times_at_rest.is_due(shape)
        if timed and pays and unsure and self._num_steps >= self._next_trials.get(shape, 0):
            self._trial = TRIAL_STEPS
            self._next_trials[shape] = self._num_steps + RETRY_STEPS  # unless this one is timed
        num_rests = self._num_rests.get(shape, 0)
        patience = PATIENCE * (1 + 2 // max(1, len(rows))) >> min(num_rests, MOST_HALVINGS)  # what few rows say is noisy
        if self._unpaid == patience:
            self._num_rests[shape] = num_rests = num_rests + 1
        probe_every = PROBE_EVERY << min(max(0, num_rests - 1), MOST_HALVINGS)
        probes = self._unpaid >= probe_every and self._unpaid % probe_every < PROBE_STEPS
        self.proposes = self._unpaid < patience or probes
        if self._trial and timed:
            self._trial, self.proposes = self._trial - 1, False
        self.follows = self.proposes or num_rests <= RESTS_THAT_FOLLOW

    def _num_known(self, rows: np.ndarray) -> np.ndarray:  # i32[n]
        return (self.proposed.take(rows, 0) != NO_DRAFT) @ self._ones  # sooner than `sum`, of rows that are short

    def _choose(self, rows: np.ndarray, explore: bool, queued: bool) -> np.ndarray:
        n, rates = len(rows), self._likely_rates(rows)
        worth = rates >= (LEAST_RATE_MADE if self._by_model else LEAST_RATE)
        if self.on_host:
            worth &= self._num_known(rows) > 0
        num_worth, best, length = int(worth.sum()), LEAST_GAIN, 0
        alone = self.shape(n, n, 1)
        at_rest, plain = self.times_at_rest.get(alone), self.times.get(alone)
        self._pays = False
        if plain is None or not num_worth or (explore and self.times.is_due(alone)):
            return np.zeros(n, np.int32)
        p = np.minimum(rates[worth], 0.999)
        for k in self.lengths:
            num_tokens = n + num_worth * k
            if num_tokens > self.max_tokens:
                break
            shape = self.shape(num_tokens, n, 1 + k)
            seconds = self.times.get(shape)
            if seconds is None:
                if not explore:
                    continue
                seconds, explore = max(plain, self.times.least(shape)), False
            elif explore and self.times.is_due(shape):
                seconds *= HOPE
            tokens, speed = np.ones(n), plain / seconds
            tokens[worth] = (1 - p ** (k + 1)) / (1 - p)
            gain = speed * float(tokens.mean() if queued else 1 / (1 / tokens).mean())
            fair = queued or gain * speed * float(tokens.min()) >= 1
            if gain > best and fair:
                best, length = gain, k
        self._pays = length > 0 and (at_rest is None or best * at_rest / plain > LEAST_GAIN)
        return np.where(worth, length, 0).astype(np.int32)

    def _likely_rates(self, rows: np.ndarray) -> np.ndarray:  # f64[n]
        """Of each row, drawn to the mean of all as far as they differ by no more than chance: a few wrong drafts of one row are not
        yet a row whose drafts are wrong (Efron and Morris, JASA 1975: Stein's estimator with the mean unknown). A moving average
        of what is right at a rate p has the variance p (1 - p) memory / (2 - memory)."""
        rates, n = self.rates[rows], len(rows)
        if n < 4:
            return rates
        mean = rates.sum() / n
        apart = rates - mean
        chance = float(rates @ (1 - rates)) / n * self._memory / (2 - self._memory)
        return mean + apart * max(0.0, 1 - (n - 3) * chance / max(float(apart @ apart), 1e-9))

    def shape(self, num_tokens: int, num_seqs: int, max_q_len: int) -> Shape:
        """Of a step of decodes alone."""
        return self.plan.select(num_tokens, num_seqs, max_q_len), self.plan.select_head_rows(num_tokens)

    def take_time(self, schedule: Schedule, begun: float, finished: float, proposes: bool = True) -> None:
        """When a step was dispatched and when its tokens were there, in seconds: it took what lies between, but for what the step
        before had of it. Counts if it held decodes alone. proposes: whether its head made drafts."""
        seconds, self._last_finished = finished - max(begun, self._last_finished), finished
        if self.adaptive and schedule.num_decodes == schedule.num_seqs:
            times = self.times if proposes else self.times_at_rest
            shape = self.shape(schedule.num_tokens, schedule.num_seqs, schedule.max_q_len)
            times.add(shape, seconds)
            if proposes:
                self.times_at_rest.skip()
            elif self.times_at_rest.get(shape) is not None:
                self._next_trials.pop(shape, None)

    def take_tokens(
        self,
        schedule: Schedule,
        tokens: np.ndarray,  # i32[n] or i32[n, 1 + k]: sampled by each entry
        counts: np.ndarray | None,  # i32[n]: how many of them are output; None: one each
        drafts: np.ndarray | None,  # i32[r, K]: proposed after each logits row; None: the head makes none, or the host does
        undisturbed: bool = False,
    ) -> DraftOutcomes | None:
        """Learns from a step, in the order of the steps and before the scheduler's `update`. Nothing is learnt of requests that
        have finished, nor of those with a forced token in flight: their drafts were cut, not refused. None: there were none.
        undisturbed: it is known that there are no such requests; otherwise each is asked."""
        d, rows, samples = schedule.num_decodes, schedule.rows, schedule.samples
        self._meet_new_owners(schedule)
        before = self.proposed.take(rows[:d], 0)
        firsts = before[:, 0]
        if drafts is None and not self.on_host and (self.proposed[rows, 0] == NO_DRAFT).all():
            return None  # a rest goes on: nothing was said that could be right
        counts = samples.astype(np.int32) if counts is None else counts
        counted = np.ones(d, bool) if undisturbed else _counted(schedule.requests[:d])
        planned, accepted = schedule.q_lens[:d] - 1, counts[:d] - 1
        right = np.where(planned > 0, accepted, firsts == (tokens[:d] if tokens.ndim == 1 else tokens[:d, 0]))
        tried = counted & (firsts != NO_DRAFT) if self.on_host or self._by_model else counted
        self._learn_rates(rows[:d], right, planned, tried)
        outcomes = None
        if schedule.num_drafts:
            live = planned  # the host knows that all are tokens
            if not self.on_host:
                live = ((before != NO_DRAFT) & self._first.take(planned, 0)) @ self._ones
            (entries,) = (live * counted).nonzero()
            outcomes = DraftOutcomes(entries, live[entries], accepted[entries]) if len(entries) else None
        if not self.on_host:
            new_drafts = NO_DRAFT if drafts is None else drafts.take(schedule.logits_rows.firsts + counts[samples] - 1, 0)
            self.proposed[rows[samples]] = new_drafts
        return outcomes

    def _learn_rates(self, rows: np.ndarray, right: np.ndarray, planned: np.ndarray, tried: np.ndarray) -> None:
        """Of rows that decode: how many of their drafts were right one after the other, of so many that were verified."""
        if not len(rows):
            return
        before = self.rates[rows]
        rates = 1 - (1 - before) * self._keeps[right]
        rates = np.where(right < np.maximum(planned, 1), rates * (1 - self._memory), rates)
        self.rates[rows] = rates = np.where(tried, rates, before)
        self._of_new += MEMORY_OF_NEW * (float(rates.sum()) / len(rates) - self._of_new)

    def _meet_new_owners(self, schedule: Schedule) -> None:
        rows = schedule.rows
        new = self._generations[rows] != schedule.generations
        if new.any():
            self._generations[rows] = schedule.generations
            self.rates[rows[new]] = self._of_new
            self._unpaid = 0  # of whoever decodes from now on nothing is known


def _counted(requests: list[Request]) -> np.ndarray:  # bool[n]
    """Of whose drafts something is learnt: neither finished nor with a forced token in flight. Seldom anybody is either."""
    if RequestStatus.FINISHED in map(_STATUS, requests) or any(map(_NUM_FORCED, requests)):
        return np.array([not (request.finished or request.num_forced_in_flight) for request in requests], bool)
    return np.ones(len(requests), bool)
