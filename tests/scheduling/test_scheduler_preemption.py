"""Who gives way when pages run out, what becomes of it, and what priorities change about that."""

import pytest

from jaxserve.request import RequestStatus
from tests.scheduler_harness import Harness
from tests.scheduler_state import has_unfinished


def ids(requests):
    return [request.request_id for request in requests]


def test_the_last_admitted_gives_way_and_the_older_proceeds():
    """The older request runs in the step that preempts the younger."""
    harness = Harness(num_pages=6)
    old, middle, last = (harness.add(8, max_tokens=9) for _ in range(3))
    harness.step()
    schedule = harness.step()
    assert (schedule.requests, last.status, last.num_preemptions) == ([old, middle], RequestStatus.PREEMPTED, 1)
    assert (last.pages, last.row, last.num_computed_tokens) == ([], -1, 0)
    assert harness.scheduler.waiting == [last] and harness.scheduler.stats().num_preemptions == 1
    harness.scheduler.check_invariants()
    harness.drain()
    harness.assert_solo(old, middle, last)


def test_the_last_admitted_can_be_its_own_victim():
    """The request that asks for a missing page is itself the last admitted."""
    harness = Harness(num_pages=4)
    old, young = harness.add(6, max_tokens=2), harness.add(8, max_tokens=3)
    harness.step()
    assert harness.step().requests == [old]
    assert harness.scheduler.waiting == [young]
    harness.drain()
    harness.assert_solo(old, young)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_in_flight_at_preemption_are_delivered_once(depth):
    """Tokens arrive in order, and the victim is not admitted again before all of them are known."""
    harness = Harness(num_pages=6, depth=depth)
    requests = [harness.add(7, max_tokens=9) for _ in range(3)]
    while not requests[2].num_preemptions:
        harness.schedule()
    victim = requests[2]
    assert victim.num_in_flight == victim.num_unfetched == 2 and victim.num_output_tokens == 0
    harness.scheduler.abort(["r1"])  # pages are free now, and still it waits
    while victim.num_unfetched:
        assert victim.status is RequestStatus.PREEMPTED
        schedule = harness.schedule_or_none()
        assert schedule is None or victim not in schedule.requests
        harness.update()
    assert len(harness.delivered["r3"]) == 2
    harness.drain()
    harness.assert_solo(*requests[1:])


@pytest.mark.parametrize("end", ["length", "stop"])
def test_a_token_in_flight_may_finish_a_preempted_request(end):
    """The request ends in the queue and is not admitted again; a token after the stop is dropped."""
    harness = Harness(num_pages=6, depth=2)
    requests = [harness.add(7, max_tokens=9), harness.add(7, max_tokens=9)]
    last = harness.add(7, max_tokens=2 if end == "length" else 9, stop_token_ids=[] if end == "length" else range(40))
    while not last.num_preemptions:
        harness.schedule()
    assert last.status is RequestStatus.PREEMPTED and last.num_unfetched == 2
    while harness.in_flight:
        harness.update()
    assert (last.finish_reason, last.num_output_tokens) == (end, 2 if end == "length" else 1)
    assert harness.finished == [last] and harness.scheduler.num_waiting == 0
    assert harness.scheduler.stats().num_discarded_rows == (end == "stop")
    harness.drain()
    harness.assert_solo(*requests, last)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_resumed_request_recomputes_prompt_and_output(prefix_caching):
    """It recomputes every token whose page is no longer cached, then samples the one that comes next."""
    harness = Harness(num_pages=6, prefix_caching=prefix_caching)
    old, young = harness.add(7, max_tokens=13), harness.add(7, max_tokens=13)
    while not young.num_preemptions:
        harness.step()
    num_known = len(young.token_ids)
    assert num_known > 8
    harness.scheduler.abort([old.request_id])
    schedule = harness.step()
    num_hit = 8 if prefix_caching else 0
    assert schedule.requests == [young] and schedule.num_decodes == 0
    assert (schedule.starts[0], schedule.q_lens[0], bool(schedule.samples[0])) == (num_hit, num_known - num_hit, True)
    assert young.num_cached_tokens == 0, "the user is told of the first admission"
    harness.drain()
    harness.assert_solo(young)


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_a_preemption_skips_nobody(order):
    """Five requests need a page at once and one page is free: each survivor is scheduled."""
    harness = Harness(num_pages=11, order=order)
    requests = [harness.add(8, max_tokens=4) for _ in range(5)]
    harness.step()
    schedule = harness.step()
    assert schedule.requests == harness.scheduler.running == requests[:3]
    assert harness.scheduler.waiting == requests[3:]
    harness.drain()
    harness.assert_solo(*requests)


def test_a_victim_that_has_its_page_already_is_taken_out():
    """The first to ask takes the last page; the second, of better priority, takes it from the first. Neither the plan
    nor the page-table updates mention the victim."""
    harness = Harness(num_pages=5, order="priority")
    worse, better = harness.add(8, max_tokens=4, priority=2), harness.add(8, max_tokens=4, priority=1)
    # Admitted by priority; a chunk-free way to make the worse one the first in running order: let it come first.
    harness.scheduler.abort([better.request_id])
    harness.step()
    better = harness.add(8, max_tokens=4, priority=1)
    first = harness.schedule()
    assert first.requests == [worse, better] and harness.pool.num_free_pages == 0
    harness.update()
    schedule = harness.schedule()
    assert schedule.requests == [better] and worse.status is RequestStatus.PREEMPTED
    assert set(schedule.page_updates[:, 0].tolist()) == {better.row} and schedule.num_tokens == 1
    harness.scheduler.check_invariants()
    harness.update()
    harness.drain()
    harness.assert_solo(worse, better)


def test_a_preempted_request_returns_to_the_front():
    """Victims of one step and of different steps queue in their order, ahead of what never ran."""
    harness = Harness(num_pages=8, max_num_seqs=4)
    requests = [harness.add(8, max_tokens=6) for _ in range(4)]
    never_ran = harness.add(2)
    harness.step()
    harness.step()
    assert harness.scheduler.running == requests[:2]
    assert harness.scheduler.waiting == [*requests[2:], never_ran]
    harness.drain()
    harness.assert_solo(*requests, never_ran)


def test_a_preempted_request_returns_to_its_priority_place():
    """The victim queues behind a waiting request of better priority and ahead of an equal one that came later."""
    harness = Harness(num_pages=4, order="priority")
    kept, victim = harness.add(8, max_tokens=6, priority=0), harness.add(8, max_tokens=6, priority=5)
    harness.step()
    better, equal = harness.add(2, priority=4), harness.add(2, priority=5)
    harness.step()
    assert harness.scheduler.running == [kept] and harness.scheduler.waiting == [better, victim, equal]
    harness.drain()
    harness.assert_solo(kept, victim, better, equal)


def test_nobody_is_admitted_in_a_step_that_preempted():
    """The newcomer waits one step although a row and a page are free and it comes before the victim."""
    harness = Harness(num_pages=4, order="priority")
    kept, victim = harness.add(8, max_tokens=6, priority=0), harness.add(8, max_tokens=6, priority=5)
    harness.step()
    newcomer = harness.add(2, priority=4)
    assert harness.step().requests == [kept] and victim.num_preemptions == 1
    assert harness.pool.num_free_pages == 1
    assert harness.step().requests == [kept, newcomer]
    harness.drain()


def test_a_step_that_preempted_admits_rather_than_stand_idle():
    """One request has its last token in flight, the other preempted itself: a newcomer of better priority may start."""
    harness = Harness(num_pages=4, order="priority", depth=2)
    ending, victim = harness.add(7, max_tokens=2, priority=0), harness.add(7, max_tokens=9, priority=5)
    harness.schedule()
    harness.schedule()
    newcomer = harness.add(2, priority=1)
    schedule = harness.schedule()
    assert victim.num_preemptions == 1 and schedule.requests == [newcomer]
    harness.drain()
    harness.assert_solo(ending, victim, newcomer)


# Priority


def test_lower_value_first_then_earlier_arrival():
    """Requests run by priority, then arrival, whatever the order of adding."""
    harness = Harness(order="priority", max_num_seqs=1)
    by_key = [(1, 5.0), (0, 9.0), (1, 2.0), (0, 3.0), (-1, 7.0)]
    requests = [harness.add(3, max_tokens=1, priority=p, arrival=a) for p, a in by_key]
    harness.drain()
    assert harness.finished == [requests[i] for i in (4, 3, 1, 2, 0)]


def test_equal_priorities_are_first_come_first_served():
    """Equal priorities give the same schedules as fcfs, preemptions included."""

    def run(order):
        harness = Harness(order=order, num_pages=10, depth=1)
        for i in range(10):
            harness.add(4 + i % 5, max_tokens=8)
        steps = []
        while has_unfinished(harness.scheduler):
            schedule = harness.step_or_none()
            steps.append(schedule and (ids(schedule.requests), schedule.q_lens.tolist()))
        return steps, harness.scheduler.stats()

    assert run("priority") == run("fcfs")
    assert run("fcfs")[1].num_preemptions


def test_the_victim_has_the_worst_priority_then_the_latest_arrival():
    """The victim is neither the last admitted nor the one that asks."""
    harness = Harness(order="priority", num_pages=8, max_num_seqs=4)
    kwargs = [(0, 1.0), (7, 2.0), (7, 3.0), (1, 4.0)]
    first, tied_earlier, tied_later, last = (harness.add(8, max_tokens=6, priority=p, arrival=a) for p, a in kwargs)
    harness.step()
    assert harness.scheduler.running == [first, last, tied_earlier, tied_later]
    harness.step()
    assert harness.scheduler.running == [first, last]
    assert harness.scheduler.waiting == [tied_earlier, tied_later]
    harness.drain()


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_nobody_is_preempted_while_space_exists(order):
    """With as many pages as all need at their longest there is no preemption; with one fewer there are some."""
    for num_pages, preempts in [(12, False), (11, True)]:
        harness = Harness(order=order, num_pages=num_pages)
        requests = [harness.add(5, max_tokens=8, priority=i) for i in range(4)]  # 12 tokens of KV: 3 pages
        harness.drain()
        assert bool(harness.scheduler.stats().num_preemptions) == preempts
        harness.assert_solo(*requests)
