"""When heads make drafts and when they rest: against simulated machines on which it is known whether drafts pay."""

import numpy as np
import pytest

from jaxserve.speculative import draft_rests
from jaxserve.speculative.draft_rests import PROBE_EVERY, PROBE_STEPS, TRIAL_STEPS
from jaxserve.speculative.recent_times import RecentTimes
from tests.speculative.draft_machine import K, Machine


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


def test_a_rest_that_was_slow_in_a_bad_moment_does_not_last():
    """Drafts gain less than steps that make none, of which the first trial falls into a bad moment."""
    machine = Machine(
        [0.4] * 8, 0.03, drafting=0.6, by_model=True, slowed=lambda step, _, proposes: 1.5 if step < 40 and not proposes else 1.0
    )
    machine.run(1500)
    assert np.mean(machine.lengths_seen[400:]) < 0.1 and machine.gain > 0.93


def test_steps_beside_prompts_are_no_trials_of_a_rest():
    """What they take is not seen."""
    machine = Machine([0.95] * 2, 0.02, drafting=0.2, by_model=True)
    machine.run(100)
    assert 0 < machine.proposed.count(False) <= 2 * TRIAL_STEPS
    machine.lengths.rests.times, machine.alone = RecentTimes(0), False
    machine.run(600)
    assert all(machine.proposed[-600:])


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
