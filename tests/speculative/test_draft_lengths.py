"""How many drafts a step verifies: against simulated machines and texts whose best answer is known."""

import numpy as np
import pytest

from jaxserve.buckets.plan import BucketPlan
from jaxserve.request import RequestStatus
from jaxserve.speculative.draft_lengths import FIRST_RATE, MEMORY, MEMORY_MADE, DraftLengths
from jaxserve.speculative.proposer import NO_DRAFT
from jaxserve.speculative.recent_times import RecentTimes
from tests.speculative.draft_machine import PLAN, K, Machine, schedule


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


def test_a_time_of_a_bad_moment_does_not_last():
    """The longest drafts are best, and are slow while they are tried for the first time."""
    machine = Machine([0.6], 0.02, slowed=lambda step, num_drafts, proposes: 1.5 if step < 60 and num_drafts == K else 1.0)
    machine.run(60)
    assert np.mean(machine.lengths_seen[30:]) < K - 1, "it was right to give them up"
    machine.run(140)
    assert np.mean(machine.lengths_seen[-60:]) > K - 0.6


@pytest.mark.parametrize("rate", [0.9, 1.0])
def test_a_shorter_length_that_might_win_keeps_no_longer_one_from_being_tried(rate):
    plan = BucketPlan(decode=(1,), mixed=((64, 8),), head_rows=(8, 64), draft=((1, 1), (1, 2), (1, 3), (1, 4)))
    machine = Machine([rate], 0.02, plan=plan, slowed=lambda step, k, _: 1.5 if step < 60 and k == K else 1.0)
    machine.run(500)
    assert np.mean(machine.lengths_seen[20:60]) < K - 0.5 and np.mean(machine.lengths_seen[-100:]) > K - 0.5


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
