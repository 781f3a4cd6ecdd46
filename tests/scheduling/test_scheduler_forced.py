"""Tokens that are known without a step each: delivered once, computed as a chunk, and what is in flight does not count twice."""

import itertools

import pytest

from tests.scheduler_harness import Harness
from tests.scheduler_state import has_unfinished


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_forced_tokens_take_one_step(depth):
    harness = Harness(depth=depth)
    request = harness.add(5, max_tokens=20)
    for _ in range(depth + 1):
        harness.step()
    assert request.num_output_tokens == 1 and request.num_in_flight == depth
    taken = harness.append_forced(request, 6)
    assert len(taken.tokens) == 6 and request.num_output_tokens == 7 and request.num_in_flight == 0
    assert request.num_forced_in_flight == depth
    schedule = harness.schedule()
    assert schedule.num_decodes == 0 and schedule.samples.all()
    assert schedule.q_lens.tolist() == [7 - depth], "what was in flight has computed its input already"
    harness.drain()
    harness.assert_solo(request)
    assert harness.scheduler.stats().num_steps == 1 + depth + 1 + 12


@pytest.mark.parametrize("depth", [0, 1])
def test_what_gains_nothing_is_not_taken(depth):
    harness = Harness(depth=depth)
    request = harness.add(5, max_tokens=20)
    for _ in range(depth + 1):
        harness.step()
    assert harness.append_forced(request, 1).tokens == [] and harness.append_forced(request, 0).tokens == []
    assert request.num_output_tokens == 1
    harness.drain()
    harness.assert_solo(request)


def test_a_request_ends_among_its_forced_tokens():
    harness = Harness(depth=1)
    long, short = harness.add(5, max_tokens=12), harness.add(5, max_tokens=4)
    harness.step()
    harness.step()
    taken = harness.append_forced(short, 9)
    assert len(taken.tokens) == 3 and taken.finished == [short] and short.finish_reason == "length"
    harness.drain()
    harness.assert_solo(long, short)
    assert harness.scheduler.stats().num_discarded_rows == 1, "the one in flight"


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_pages": 12},
        {"page_size": 1, "num_pages": 60},
        {"max_num_batched_tokens": 9},
        {"policy": "prefill_first", "num_pages": 14},
        {"policy": "orca"},
        {"policy": "request_level"},
    ],
)
def test_requests_end_as_alone_whatever_is_forced(config, depth):
    harness = Harness(depth=depth, **config)
    requests = [harness.add(3 + i, max_tokens=8 + i, ignore_eos=bool(i % 2), stop_token_ids=[i]) for i in range(9)]
    counts, taken = itertools.cycle([2, 0, 5, 1, 3, 0, 0, 9]), 0
    while has_unfinished(harness.scheduler) or harness.in_flight:
        harness.step_or_none()
        harness.scheduler.check_invariants()
        for request in harness.scheduler.running:
            if request.num_output_tokens:
                taken += len(harness.append_forced(request, next(counts)).tokens)
                harness.scheduler.check_invariants()
    harness.assert_empty()
    harness.assert_solo(*requests)
    assert taken > 20
    assert config.get("num_pages") not in (12, 14) or harness.scheduler.stats().num_preemptions


def test_a_step_is_disturbed_by_a_forced_token_an_abort_and_a_new_owner_of_a_row():
    """What learns from a step asks each request only where this is not known to be needless."""
    harness = Harness(depth=1)
    forced, aborted = harness.add(5, max_tokens=20), harness.add(5, max_tokens=20)
    for _ in range(2):
        harness.step()
    in_flight = harness.schedule()
    assert harness.scheduler.is_undisturbed(in_flight)
    harness.append_forced(forced, 6)
    assert forced.num_forced_in_flight and not harness.scheduler.is_undisturbed(in_flight)
    for _ in range(2):
        harness.update()
    assert not forced.num_forced_in_flight
    in_flight = harness.schedule()
    assert harness.scheduler.is_undisturbed(in_flight)
    harness.scheduler.abort([aborted.request_id])
    assert not harness.scheduler.is_undisturbed(in_flight)
    harness.add(5, max_tokens=20)
    harness.schedule()
    assert not harness.scheduler.is_undisturbed(in_flight), "its row has an owner again, another one"
