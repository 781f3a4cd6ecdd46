"""How many drafts a step verifies: against simulated machines and texts whose best answer is known."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.schedule import Schedule
from jaxserve.speculative import draft_rests
from jaxserve.speculative.draft_lengths import FIRST_RATE, MEMORY, MEMORY_MADE, DraftLengths
from jaxserve.speculative.draft_rests import PROBE_EVERY, PROBE_STEPS, TRIAL_STEPS
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.speculative.recent_times import RecentTimes

PLAN = BucketPlan(decode=(1, 2, 4, 8), mixed=((64, 8),), head_rows=(8, 64), draft=((1, 2), (1, 4), (4, 2), (4, 4), (8, 2), (8, 4)))
K = 4


def schedule(rows: np.ndarray, num_drafts: np.ndarray, generation: int | np.ndarray = 0) -> Schedule:
    n, q_lens = len(rows), (1 + num_drafts).astype(np.int32)
    zeros, nobody = np.zeros(n, np.int32), [Request(str(i), [1], SamplingParams()) for i in range(n)]
    return Schedule(
        0, nobody, rows, q_lens, zeros, zeros, np.ones(n, bool), np.full(n, generation), np.zeros((0, 3), np.int32),
        n, int(q_lens.sum()), int(q_lens.max()), int(num_drafts.sum()),
    )  # fmt: skip


class Machine:
    """Sequences whose next draft is right at a rate of their own, on a device whose step takes a base and a time a token."""

    def __init__(
        self,
        rates: list[float],
        per_token: float,
        max_num_batched_tokens: int = 64,
        queued: bool = True,
        drafting: float = 0.0,
        slowed: Callable[[int, int, bool], float] = lambda step, num_drafts, proposes: 1.0,
        plan: BucketPlan = PLAN,
        **options,
    ):
        self.queued, self.drafting, self.slowed = queued, drafting, slowed  # drafting: what it adds to a step
        self.alone = True  # no prompts beside the decodes
        self.lengths = DraftLengths(plan, 8, max_num_batched_tokens, K, **options)
        self.rates, self.per_token, self.rng = np.array(rates), per_token, np.random.default_rng(0)
        self.rows: np.ndarray = np.arange(len(rates))
        self.generation: int | np.ndarray = 0  # of each row, or of all
        self.num_tokens, self.seconds, self.clock = 0, 0.0, 0.0
        self.lengths_seen: list[int] = []
        self.proposed: list[bool] = []
        self._row_tokens: list[np.ndarray] = []
        self.row_seconds: list[float] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            chosen = self.lengths.choose(self.rows, explore=self.alone, queued=self.queued)
            step = schedule(self.rows, chosen, self.generation)
            counts = np.array([1 + self._accepted(i, k) for i, k in enumerate(chosen)], np.int32)
            first_right = np.where(chosen > 0, counts > 1, self.rng.random(len(counts)) < self.rates)
            self.lengths.proposed[self.rows] = np.where(first_right, 7, 8)[:, None]
            tokens = np.full((len(counts), 1 + K), 7, np.int32)
            proposes = self.lengths.proposes
            if self.proposed and not self.proposed[-1]:
                assert not chosen.any(), "there are no drafts to verify"
                self.lengths.proposed[self.rows] = NO_DRAFT
            drafts = np.full((step.num_tokens, K), 0 if proposes else NO_DRAFT, np.int32)
            self.lengths.take_tokens(step, tokens, counts, drafts)
            bucket, _ = self.lengths.shape(step.num_tokens, step.num_seqs, step.max_q_len)
            seconds = 1 + self.per_token * bucket.tokens + self.drafting * proposes
            noisy = (
                seconds
                * self.slowed(len(self.proposed), int(chosen.max()), proposes)
                * (1 + (self.rng.random() < 0.1) * self.rng.random())
            )  # the machine does other things too
            self.clock += noisy
            if self.alone:
                self.lengths.take_time(step, self.clock - noisy - 0.5, self.clock, proposes)  # dispatched while the one before ran
            self.proposed.append(proposes)
            self.num_tokens, self.seconds = self.num_tokens + int(counts.sum()), self.seconds + seconds
            self.lengths_seen.append(int(chosen.max()))
            self._row_tokens.append(counts)
            self.row_seconds.append(seconds)

    @property
    def row_tokens(self) -> np.ndarray:  # [steps, rows]
        return np.stack(self._row_tokens)

    def _accepted(self, i: int, k: int) -> int:
        wrong = np.flatnonzero(self.rng.random(k) >= self.rates[i])
        return int(wrong[0]) if len(wrong) else int(k)

    @property
    def gain(self) -> float:
        """Tokens a second over those of plain steps."""
        n = len(self.rows)
        plain = 1 + self.per_token * PLAN.select(n, n, 1).tokens
        return self.num_tokens / self.seconds / (n / plain)


@pytest.mark.parametrize(
    "rates, per_token, least_gain",
    [
        ([0.95], 0.02, 3.3),  # a copy: 4.5 tokens a step that takes 1.08 times as long
        ([0.6], 0.02, 1.6),
        pytest.param([0.6] * 8, 0.02, 1.25, marks=pytest.mark.slow),
        ([0.05], 0.02, 0.98),  # chat: off
        pytest.param([0.3] * 8, 0.2, 0.98, marks=pytest.mark.slow),  # a device with enough to do
        ([0.95] * 8, 1.0, 0.95),  # a device on which tokens cost as much as steps
        ([0.95] + [0.02] * 3, 0.02, 1.35),  # one copies
    ],
)
def test_it_gains_where_there_is_something_to_gain_and_loses_nothing_elsewhere(rates, per_token, least_gain):
    machine = Machine(rates, per_token)
    machine.run(1500)
    assert machine.gain > least_gain, machine.gain


@pytest.mark.parametrize(
    "num_copies, per_token",
    [(1, 0.005), *(pytest.param(*x, marks=pytest.mark.slow) for x in [(2, 0.01), (4, 0.01), (7, 0.02), (8, 0.02)])],
)
def test_with_nobody_queueing_rows_that_copy_do_not_slow_down_the_others(num_copies, per_token):
    """The mean over rows of the time per token falls or stays; tokens a second may not be all that there is to gain."""
    rates = [0.95] * num_copies + [0.02] * (8 - num_copies)
    throughput = Machine(rates, per_token)
    throughput.run(1500)
    machine = Machine(rates, per_token, queued=False)
    machine.run(1500)
    tokens = machine.row_tokens[500:].mean(0)
    plain = 1 + per_token * PLAN.select(8, 8, 1).tokens
    assert (1 / tokens).mean() * np.mean(machine.row_seconds[500:]) < 1.03 * plain, "time per token, mean over rows"
    assert throughput.gain > machine.gain - 0.05 and throughput.gain > 1.1
    drafts = np.mean(machine.lengths_seen[500:])
    assert (drafts < 0.1 * K) if num_copies < 3 else (drafts > 0.4 * K)


@pytest.mark.parametrize("per_token, drafts", [(0.005, True), (0.03, False)])
def test_with_nobody_queueing_the_slowest_row_loses_no_more_than_the_rows_gain_on_average(per_token, drafts):
    machine = Machine([0.95] * 4 + [0.02] * 4, per_token, queued=False)
    machine.run(1500)
    plain = 1 + per_token * PLAN.select(8, 8, 1).tokens
    loss = np.mean(machine.row_seconds[500:]) / plain  # of a row without drafts
    gain = 8 / (4 * loss + (loss / machine.row_tokens[500:, :4].mean(0)).sum())  # mean over rows of the time per token
    assert (np.mean(machine.lengths_seen[500:]) > 0.4 * K) == drafts
    assert loss < (gain if drafts else 1.02)


def test_it_follows_a_text_that_begins_to_repeat_itself_and_ends():
    machine = Machine([0.02], 0.05)
    machine.run(300)
    assert not any(machine.lengths_seen[100:])
    machine.rates[:] = 0.97
    machine.run(40)
    assert machine.lengths_seen[-1] == K
    machine.rates[:] = 0.02
    machine.run(60)
    assert not any(machine.lengths_seen[-20:])


def test_rows_whose_drafts_are_wrong_bring_none():
    machine = Machine([0.9, 0.01, 0.9, 0.01], 0.01)
    machine.run(200)
    chosen = machine.lengths.choose(machine.rows, explore=True, queued=True)
    assert (chosen[[0, 2]] > 0).all() and not chosen[[1, 3]].any()
    machine.lengths.take_tokens(
        schedule(machine.rows[1:2], np.zeros(1, np.int32), generation=5), np.zeros((1, 1), np.int32), np.ones(1, np.int32),
        np.zeros((1, K), np.int32),
    )  # fmt: skip
    assert machine.lengths.rates[1] > machine.lengths.rates[3] + 0.1, "a new owner starts with what rows do in general"


@pytest.mark.parametrize("rates, spread", [([0.45] * 7, 0.0), ([0.95] * 3 + [0.02] * 4, 0.93)])
def test_a_row_that_was_wrong_by_chance_is_told_from_one_of_another_kind(rates, spread):
    """With nobody queueing a slow row can veto drafts. By chance the best and the worst of seven equal rows are 0.3 apart."""
    machine, seen = Machine(rates, 0.02, queued=False, by_model=True), list[float]()
    machine.run(300)
    for _ in range(100):
        machine.run(3)
        seen.append(float(np.ptp(machine.lengths._likely_rates(machine.rows))))
    assert np.median(seen) == pytest.approx(spread, abs=0.16)


def test_it_can_be_told_not_to_adapt():
    machine = Machine([0.01] * 3, 10.0, adaptive=False)
    machine.run(10)
    assert machine.lengths_seen == [K] * 10


def test_no_more_than_the_rows_and_tokens_of_a_step():
    for max_num_batched_tokens, most in ((20, 0), (24, 2), (40, 4)):
        machine = Machine([0.99] * 8, 0.0, max_num_batched_tokens=max_num_batched_tokens)
        machine.run(50)
        assert max(machine.lengths_seen) == most


def test_a_step_whose_time_is_not_seen_tries_nothing():
    """Beside prompts only lengths count whose time is known from steps of decodes alone."""
    machine = Machine([0.95] * 2, 0.02)
    machine.run(3)
    assert machine.lengths_seen == [0, 0, 0] and machine.lengths.times.get(machine.lengths.shape(2, 2, 1)) is not None
    assert not machine.lengths.choose(machine.rows, explore=False, queued=True).any()
    assert (machine.lengths.choose(machine.rows, explore=True, queued=True) == 2).all(), "the smallest first"
    machine.run(60)
    assert (machine.lengths.choose(machine.rows, explore=False, queued=True) == K).all(), "what was timed counts in every step"
    slow = Machine([0.95] * 2, 10.0)
    slow.run(60)
    assert not slow.lengths.choose(slow.rows, explore=False, queued=True).any()


def test_what_is_larger_than_a_step_that_lost_is_not_tried():
    machine = Machine([0.3] * 8, 1.0)  # with 2 drafts 1.4 tokens a step that takes 2.8 times as long, with 4 as many and longer
    machine.run(900)
    assert set(machine.lengths_seen) == {0, 2} and machine.lengths_seen.count(2) == 3


def test_drafts_that_cost_and_do_not_pay_are_not_made():
    machine = Machine([0.3] * 8, 0.1, drafting=0.5, by_model=True)
    machine.run(1500)
    assert np.mean(machine.proposed[100:]) < 0.04 and np.mean(machine.lengths_seen[100:]) < 0.04
    assert machine.gain > 0.97
    always = Machine([0.3] * 8, 0.1, drafting=0.5)
    always.run(1500)
    assert all(always.proposed) and always.gain < 0.85, "n-grams cost nothing and are made in every step"


def test_what_a_step_at_rest_takes_is_what_drafts_must_beat():
    """Over a plain step that makes drafts nevertheless, these would gain 1.1."""
    machine = Machine([0.3] * 8, 0.03, drafting=0.6, by_model=True)
    machine.run(1500)
    assert np.mean(machine.lengths_seen[300:]) < 0.1 and machine.gain > 0.96


def test_a_time_of_a_bad_moment_does_not_last():
    """The longest drafts are best, and are slow while they are tried for the first time."""
    machine = Machine([0.6], 0.02, slowed=lambda step, num_drafts, proposes: 1.5 if step < 60 and num_drafts == K else 1.0)
    machine.run(60)
    assert np.mean(machine.lengths_seen[30:]) < K - 1, "it was right to give them up"
    machine.run(140)
    assert np.mean(machine.lengths_seen[-60:]) > K - 0.6


def test_a_rest_that_was_slow_in_a_bad_moment_does_not_last():
    """Drafts gain less than steps that make none, of which the first trial falls into a bad moment."""
    machine = Machine(
        [0.4] * 8, 0.03, drafting=0.6, by_model=True, slowed=lambda step, _, proposes: 1.5 if step < 40 and not proposes else 1.0
    )
    machine.run(1500)
    assert np.mean(machine.lengths_seen[400:]) < 0.1 and machine.gain > 0.93


@pytest.mark.parametrize("rate", [0.9, 1.0])
def test_a_shorter_length_that_might_win_keeps_no_longer_one_from_being_tried(rate):
    plan = BucketPlan(decode=(1,), mixed=((64, 8),), head_rows=(8, 64), draft=((1, 1), (1, 2), (1, 3), (1, 4)))
    machine = Machine([rate], 0.02, plan=plan, slowed=lambda step, k, _: 1.5 if step < 60 and k == K else 1.0)
    machine.run(500)
    assert np.mean(machine.lengths_seen[20:60]) < K - 0.5 and np.mean(machine.lengths_seen[-100:]) > K - 0.5


def test_steps_beside_prompts_are_no_trials_of_a_rest():
    """What they take is not seen."""
    machine = Machine([0.95] * 2, 0.02, drafting=0.2, by_model=True)
    machine.run(100)
    assert 0 < machine.proposed.count(False) <= 2 * TRIAL_STEPS
    machine.lengths.rests.times, machine.alone = RecentTimes(0), False
    machine.run(600)
    assert all(machine.proposed[-600:])


def test_a_short_bad_moment_is_not_the_time_of_the_shape_that_ran_in_it():
    """Half a second of a small model's steps decides, not the last dozen; a machine that stays slow is believed."""
    times, shape = RecentTimes(), (PLAN.select(4, 1, 4), 8)
    for seconds in [0.010] * 40 + [0.014] * 20:
        times.add(shape, seconds)
    assert times.get(shape) == 0.010
    for _ in range(20):
        times.add(shape, 0.014)
    assert times.get(shape) == 0.014


def test_drafts_that_are_there_are_verified_where_only_their_making_does_not_pay():
    """A row that is right by turns: what was made for a step is not thrown away because it would not be made for it alone."""
    machine = Machine([0.4], 0.02, drafting=0.3, by_model=True)
    machine.run(1500)
    assert machine.gain > 1.12, machine.gain


def test_drafts_are_made_again_when_they_would_stand_or_other_rows_decode():
    machine = Machine([0.05] * 2, 0.05, drafting=0.2, by_model=True)
    machine.run(200)
    assert not any(machine.proposed[-20:]) and 0 < sum(machine.proposed[50:]) < 10
    machine.rates[:] = 0.97
    machine.run(300)
    assert machine.lengths_seen[-1] == K and all(machine.proposed[-20:])
    machine.rates[:] = 0.02
    machine.run(100)
    assert not any(machine.proposed[-20:])
    machine.rows = np.array([1])
    machine.rates = machine.rates[:1]
    machine.run(2)
    assert machine.proposed[-2:] == [True, True]


def test_drafts_are_made_again_when_a_row_has_another_owner():
    """The last row that was given back is the next one to be taken."""
    machine = Machine([0.05], 0.05, drafting=0.2, by_model=True)
    machine.run(200)
    assert not any(machine.proposed[-20:])
    machine.generation += 1
    machine.run(4)
    assert machine.proposed[-2:] == [True, True]


@pytest.mark.parametrize("why", ["forced", "finished"])
def test_cut_drafts_are_not_refused_ones(why):
    """Neither a rate nor an outcome comes of a request whose token was known before the step; the mirror follows the device."""
    lengths, rows = DraftLengths(PLAN, 8, 64, K), np.array([3, 5])
    lengths.proposed[:] = 7
    step = schedule(rows, np.array([2, 2]))
    if why == "forced":
        step.requests[0].num_forced_in_flight = 1
    else:
        step.requests[0].status = RequestStatus.FINISHED
    tokens, drafts = np.full((2, 1 + K), 8, np.int32), np.arange(6 * K, dtype=np.int32).reshape(6, K)
    before = lengths.rates.copy()
    outcomes = lengths.take_tokens(step, tokens, np.ones(2, np.int32), drafts)
    assert outcomes is not None and [x.tolist() for x in outcomes] == [[1], [2], [0]]
    assert lengths.rates[3] == before[3] and lengths.rates[5] < before[5]
    assert (lengths.proposed[rows] == drafts[[0, 3]]).all()


def test_of_a_step_that_nothing_disturbed_no_request_is_asked():
    """The same is learnt of it, and here of a request that would have been left out, had it been asked."""
    found = []
    for undisturbed in (False, True):
        lengths, rows = DraftLengths(PLAN, 8, 64, K), np.array([3, 5])
        lengths.proposed[:] = 7
        step = schedule(rows, np.array([2, 2]))
        tokens, drafts = np.full((2, 1 + K), 8, np.int32), np.arange(6 * K, dtype=np.int32).reshape(6, K)
        outcomes = lengths.take_tokens(step, tokens, np.ones(2, np.int32), drafts, undisturbed)
        found.append([lengths.rates.tolist(), *(x.tolist() for x in outcomes or ())])
        step.requests[0].num_forced_in_flight = 1
        again = DraftLengths(PLAN, 8, 64, K)
        again.proposed[:] = 7
        outcomes = again.take_tokens(step, tokens, np.ones(2, np.int32), drafts, undisturbed)
        assert outcomes is not None and outcomes.entries.tolist() == ([0, 1] if undisturbed else [1])
    assert found[0] == found[1]


def test_rows_that_leave_do_not_end_a_rest_before_they_have_another_bucket():
    """A batch ends row by row: heads that have found that drafts don't pay need not find it again at each."""
    machine = Machine([0.02] * 8, 0.02, drafting=0.2, by_model=True)
    machine.run(40)
    assert not any(machine.proposed[20:])
    for gone in (1, 2, 3):
        machine.rows, machine.rates = machine.rows[:-1], machine.rates[:-1]
        machine.run(5)
        assert not any(machine.proposed[-5:]), f"{gone} of eight have left"
    machine.rows, machine.rates = machine.rows[:-1], machine.rates[:-1]
    machine.run(3)
    assert all(machine.proposed[-3:]), "four have a bucket of their own: their drafts may pay"
    machine.run(40)
    assert not any(machine.proposed[-20:])
    machine.rows, machine.generation = np.array([0, 1, 2, 7]), np.array([0, 0, 0, 1])
    machine.run(4)
    assert all(machine.proposed[-3:]), "another row has come"


def test_each_rest_that_follows_one_comes_sooner_and_is_probed_less_until_drafts_pay():
    machine = Machine([0.02] * 8, 0.1, drafting=0.2, by_model=True)

    def of_new_rows(num_steps: int) -> list[bool]:
        machine.generation += 1
        machine.run(num_steps)
        return machine.proposed[-num_steps:]

    made = [sum(of_new_rows(100)) for _ in range(8)]
    assert made[0] > made[1] > 2 == max(made[2:]) and sum(made[2:]) <= 2 * (600 // PROBE_EVERY + 1), made
    assert sum(of_new_rows(500)) <= PROBE_STEPS + 1, "a probe in four times as many steps"
    machine.rates[:], machine.per_token = 0.97, 0.001
    for _ in range(30):
        of_new_rows(100)
    assert machine.lengths_seen[-1] == K and sum(machine.proposed[-50:]) >= 50 - TRIAL_STEPS
    machine.rates[:], machine.per_token = 0.02, 0.1
    of_new_rows(60)
    assert sum(of_new_rows(60)) > 2, "patience is there again"


def test_requests_that_come_often_end_no_rest_each_until_drafts_pay():
    machine = Machine([0.02] * 8, 0.1, drafting=0.2, by_model=True)
    for _ in range(60):
        machine.generation += 1
        machine.run(8)
    assert 0 < sum(machine.proposed[-256:]) <= 2 * 256 / PROBE_EVERY + 2, "of 32 that came"
    machine.rates[:], machine.per_token = 0.97, 0.001
    for _ in range(400):
        machine.generation += 1
        machine.run(8)
    assert machine.lengths_seen[-1] == K and sum(machine.proposed[-50:]) >= 50 - TRIAL_STEPS


def test_heads_come_to_rest_though_one_request_follows_the_other():
    machine = Machine([0.02] * 8, 0.1, drafting=0.2, by_model=True)
    machine.generation = np.zeros(8, np.int64)
    for i in range(200):
        machine.generation[i % 8] += 1
        machine.run(1)
    assert sum(machine.proposed[:100]) < 40 and sum(machine.proposed[-100:]) < 10


def steps_until_made(machine: Machine, num_steps: int) -> int:
    """Of the next so many, those before drafts are made in 20 steps in a row."""
    begin = len(machine.proposed)
    machine.run(num_steps)
    made = "".join("+" if proposes else "-" for proposes in machine.proposed[begin:])
    assert "+" * 20 in made, "drafts pay"
    return made.index("+" * 20)


@pytest.mark.parametrize("period", [3, 10, 150])
def test_steps_beside_prompts_of_unknown_times_are_no_reason_to_give_up(period):
    """Long prompts come one after the other; what steps take is not known before they are done."""
    machine = Machine([0.8], 0.02, drafting=0.1, by_model=True)
    machine.alone = False
    for n in range(1, 9):
        machine.rows, machine.rates, machine.generation = np.arange(n), np.full(n, 0.8), np.zeros(n, np.int64)
        machine.run(period)
    assert machine.proposed.count(True) <= 300, "nor do heads draft in vain for ever"
    machine.alone = True
    assert steps_until_made(machine, 100) < 20


def test_prompts_that_come_before_drafts_were_timed_are_no_reason_to_give_up():
    machine = Machine([0.8] * 8, 0.02, drafting=0.1, by_model=True)
    machine.run(5)
    assert not any(k > 2 for k in machine.lengths_seen), "longer drafts are not timed yet"
    machine.alone = False
    machine.run(30)
    machine.alone = True
    assert steps_until_made(machine, 100) < 20


def test_rows_that_pass_a_buckets_bound_again_and_again_come_to_rest():
    machine = Machine([0.02] * 5, 0.1, drafting=0.2, by_model=True)
    for i in range(400):
        machine.rows = np.arange(4 + i // 3 % 2)
        machine.rates = np.full(len(machine.rows), 0.02)
        machine.run(1)
    assert sum(machine.proposed[-200:]) < 20


def test_a_bucket_in_which_drafts_pay_again_is_tried_with_new_rows():
    machine = Machine([0.9] * 8, 0.02, drafting=0.2, by_model=True)

    def of_new_rows(n: int, rate: float, num_steps: int) -> None:
        machine.rows, machine.rates = np.arange(n), np.full(n, rate)
        machine.generation += 1
        machine.run(num_steps)

    for n, rate, num_steps in ((8, 0.9, 60), (4, 0.02, 60), (4, 0.02, 12), (8, 0.9, 150)):
        of_new_rows(n, rate, num_steps)
    assert sum(machine.proposed[-20:]) >= 20 - TRIAL_STEPS
    of_new_rows(4, 0.9, 1)
    assert steps_until_made(machine, 100) < 30, "though four had two rests in a row"


def test_what_a_probe_finds_ends_a_rest():
    machine = Machine([0.02] * 8, 0.02, drafting=0.2, by_model=True)
    machine.run(200)
    machine.rates[:] = 0.7
    assert steps_until_made(machine, 600) < 450


@pytest.mark.parametrize(
    ("rates", "least", "most"), [([0.95] * 4, 0.8, 1.0), ([0.95] + [0.02] * 7, 0.05, 0.22), ([0.02] * 4, 0, 0.1)]
)
def test_of_a_new_request_the_mean_of_the_rows_before_is_expected(rates, least, most):
    machine = Machine(rates, 0.01)
    machine.run(300)
    machine.generation += 1
    machine.run(1)
    assert least <= machine.lengths.rates[machine.rows].mean() <= most, "one that copies counts as one of eight"


def test_a_choice_that_pays_stands_for_a_few_steps(monkeypatch):
    machine, num_choices = Machine([0.9] * 4, 0.02, drafting=0.1, by_model=True), 0
    machine.run(100)
    choose = machine.lengths._choose

    def counted(*args):
        nonlocal num_choices
        num_choices += 1
        return choose(*args)

    monkeypatch.setattr(machine.lengths, "_choose", counted)
    machine.run(80)
    assert 20 <= num_choices < 35, "a shape that is due is tried between"
    num_choices = 0
    while not num_choices:
        machine.run(1)
    machine.generation, num_choices = 1, 0
    machine.run(2)
    assert num_choices == 1, "others are asked about as soon as they are known"


def test_a_shape_that_is_tried_in_hope_is_no_proof_that_drafts_pay(monkeypatch):
    machine, said = Machine([0.4] * 8, 0.15, drafting=0.3, by_model=True), []
    decide = machine.lengths.rests.decide

    def noted(shape, num_rows, pays, timed):
        said.append(pays)
        decide(shape, num_rows, pays, timed)

    monkeypatch.setattr(machine.lengths.rests, "decide", noted)
    monkeypatch.setattr(draft_rests, "PATIENCE", 1000)
    machine.run(400)
    tried = [i for i, k in enumerate(machine.lengths_seen) if k and i > 100]
    assert tried and not any(said[i] for i in tried)


def test_a_step_at_rest_teaches_nothing_but_whether_the_drafts_before_it_were_right():
    lengths, rows = DraftLengths(PLAN, 8, 64, K, by_model=True), np.array([3, 5])
    step, tokens = schedule(rows, np.zeros(2, np.int32)), np.array([7, 7], np.int32)
    lengths.take_tokens(step, tokens, None, np.full((2, K), 7, np.int32))  # from here on the rows are known
    before = lengths.rates.copy()
    assert lengths.take_tokens(step, np.array([7, 8], np.int32), None, None) is None
    assert lengths.rates[3] > before[3] and lengths.rates[5] < before[5] and (lengths.proposed[rows] == NO_DRAFT).all()
    before = lengths.rates.copy()
    assert lengths.take_tokens(step, tokens, None, None) is None and (lengths.rates == before).all()


@pytest.mark.parametrize("by_model, memory", [(False, MEMORY), (True, MEMORY_MADE)])
def test_what_a_model_drafts_is_forgotten_more_slowly(by_model, memory):
    assert MEMORY_MADE < MEMORY
    lengths, step = DraftLengths(PLAN, 8, 64, K, by_model=by_model), schedule(np.array([3]), np.array([2]))
    lengths.proposed[:] = 7
    tokens, drafts = np.full((1, 1 + K), 7, np.int32), np.full((3, K), 7, np.int32)
    lengths.take_tokens(step, tokens, np.ones(1, np.int32), drafts)  # the first of two is wrong
    rate = FIRST_RATE * (1 - memory)
    assert lengths.rates[3] == pytest.approx(rate)
    lengths.take_tokens(step, tokens, np.full(1, 3, np.int32), drafts)  # both are right
    assert lengths.rates[3] == pytest.approx(1 - (1 - rate) * (1 - memory) ** 2)
