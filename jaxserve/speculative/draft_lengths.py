"""How many drafts each sequence verifies in the next step, by what became of earlier drafts.

Owns the host's mirror of what the device proposed, and what is learnt from it: how often drafts are right, row by row, whether
they were verified or not (a plain step's token says whether the first draft would have stood), and how long steps take. The
scheduler asks while it composes a step. Knows nothing of models, and of tokens only whether they are equal.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np

from jaxserve.buckets.plan import BucketPlan
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative.draft_rests import DraftRests
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.speculative.recent_times import RecentTimes, Shape

MEMORY, MEMORY_MADE = 0.15, 0.1  # weight of the newest draft in a row's rate; of drafts that a model makes
MEMORY_OF_NEW = 0.01  # of each row's share in a step, in what is expected of a row's next owner
FIRST_RATE = 0.5  # of the first rows
LEAST_RATE, LEAST_RATE_MADE = 0.2, 0.1  # a row whose drafts are right less often brings none; of drafts that take time to make
LEAST_GAIN = 1.05  # by prediction, over a plain step, that makes drafts worth it, and over a step at rest their making
HOPE = 0.6  # of its time, in which a shape that is due would have to win to be tried
HOLD_STEPS = 4  # for which a choice among drafts that a model makes stands where they pay, with the same rows and owners

_STATUS, _NUM_FORCED = attrgetter("status"), attrgetter("num_forced_in_flight")


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
    are there are verified where that pays beside a step that made them for nothing. Whether a step's head shall make drafts, which
    must pay beside one that makes none, `rests` says.

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
        self.rests: DraftRests = DraftRests()
        self._by_model = by_model
        self._pays: bool | None = False  # whether drafts chosen last pay for their making too; None: nobody can say
        self._tries = False  # whether the last choice was one to learn what a shape takes
        self._held, self._held_steps = np.zeros(0, np.int32), 0  # the last choice, and for how many steps more it stands
        self._held_for = (False, False)  # explore, queued
        self._last_rows: np.ndarray = np.zeros(0, np.intp)
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
            chosen = np.full(len(rows), self.num_drafts, np.int32)
        elif not self._by_model:
            chosen = self._choose(rows, explore, queued)
        else:
            proposed = self.rests.proposes  # by the step before
            if proposed:
                chosen, pays = self._hold(rows, explore, queued), self._pays
            else:
                chosen, pays, self._held_steps = np.zeros(len(rows), np.int32), None, 0
            self.rests.decide(self.shape(len(rows), len(rows), 1), len(rows), pays, timed=explore)
        return np.minimum(chosen, self._num_known(rows)) if self.on_host else chosen

    @property
    def proposes(self) -> bool:
        """Whether the head of the step that was scheduled last shall make drafts."""
        return self.rests.proposes or not self.adaptive

    @property
    def follows(self) -> bool:
        """Whether what drafts shall run over that step's tokens."""
        return self.rests.follows or not self.adaptive

    def _hold(self, rows: np.ndarray, explore: bool, queued: bool) -> np.ndarray:  # i32[n]
        """`_choose`, or what it chose a few steps ago: rates change little from step to step."""
        same = np.array_equal(rows, self._last_rows)
        if same and self._held_steps and self._held_for == (explore, queued):
            self._held_steps -= 1
            return self._held
        chosen = self._choose(rows, explore, queued)
        chosen.setflags(write=False)
        self._held, self._held_for = chosen, (explore, queued)
        self._held_steps = HOLD_STEPS - 1 if self._pays and not self._tries else 0
        self._last_rows = rows.copy()
        return chosen

    def _num_known(self, rows: np.ndarray) -> np.ndarray:  # i32[n]
        return (self.proposed.take(rows, 0) != NO_DRAFT) @ self._ones  # sooner than `sum`, of rows that are short

    def _choose(self, rows: np.ndarray, explore: bool, queued: bool) -> np.ndarray:
        n, rates = len(rows), self._likely_rates(rows)
        worth = rates >= (LEAST_RATE_MADE if self._by_model else LEAST_RATE)
        if self.on_host:
            worth &= self._num_known(rows) > 0
        num_worth, best, length, likely = int(worth.sum()), LEAST_GAIN, 0, 0.0
        alone = self.shape(n, n, 1)
        at_rest, plain = self.rests.times.get(alone), self.times.get(alone)
        self._tries = explore and (plain is None or self.times.is_due(alone))
        self._pays = None if plain is None or self._tries else False
        if plain is None or self._tries or not num_worth:
            return np.zeros(n, np.int32)
        p, might, may_try = np.minimum(rates[worth], 0.999), False, explore
        for k in self.lengths:
            num_tokens = n + num_worth * k
            if num_tokens > self.max_tokens:
                break
            shape = self.shape(num_tokens, n, 1 + k)
            known = self.times.get(shape)
            seconds = max(plain, self.times.least(shape)) if known is None else known
            tries = may_try and (known is None or self.times.is_due(shape))
            hope = 1.0 if known is None or not tries else HOPE
            may_try &= known is not None  # one that was not timed at a time
            tokens, speed = np.ones(n), plain / (hope * seconds)
            tokens[worth] = (1 - p ** (k + 1)) / (1 - p)
            gain = speed * float(tokens.mean() if queued else 1 / (1 / tokens).mean())
            fair = queued or gain * speed * float(tokens.min()) >= 1
            if known is None and not tries:
                might |= fair and gain > best
                continue
            if fair:
                likely = max(likely, hope * gain)
            if fair and gain > best:
                best, length, self._tries = gain, k, tries
        self._pays = length > 0 and likely * (1.0 if at_rest is None else at_rest / plain) > LEAST_GAIN
        if might and not length and not explore:
            self._pays = None
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
            shape = self.shape(schedule.num_tokens, schedule.num_seqs, schedule.max_q_len)
            if proposes:
                self.times.add(shape, seconds)
                self.rests.times.skip()
            else:
                self.rests.add_time(shape, seconds)

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
        ended = right < np.maximum(planned, 1)  # with a wrong one
        rates = 1 - (1 - before) * self._keeps[right]
        rates = np.where(ended, rates * (1 - self._memory), rates)
        self.rates[rows] = np.where(tried, rates, before)
        if num_tried := int(tried.sum()):
            share = float(tried @ (right / (right + ended))) / num_tried
            self._of_new += (1 - (1 - MEMORY_OF_NEW) ** num_tried) * (share - self._of_new)

    def _meet_new_owners(self, schedule: Schedule) -> None:
        """Of rows from the step on that ends their prompt, before which they have no drafts."""
        rows, samples = schedule.rows, schedule.samples
        new = samples & (self._generations[rows] != schedule.generations)
        if new.any():
            self._generations[rows[new]] = schedule.generations[new]
            self.rates[rows[new]] = self._of_new
            self.rests.meet(int(new.sum()))
            self._held_steps = 0


def _counted(requests: list[Request]) -> np.ndarray:  # bool[n]
    """Of whose drafts something is learnt: neither finished nor with a forced token in flight. Seldom anybody is either."""
    if RequestStatus.FINISHED in map(_STATUS, requests) or any(map(_NUM_FORCED, requests)):
        return np.array([not (request.finished or request.num_forced_in_flight) for request in requests], bool)
    return np.ones(len(requests), bool)
