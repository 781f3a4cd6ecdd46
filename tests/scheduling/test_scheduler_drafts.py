"""Speculation's arithmetic: drafts are scheduled, some are accepted, the rest is given back, at once or a step late."""

import itertools

import pytest

from jaxserve.scheduling.demand import step_demand
from tests.scheduler_harness import Harness, next_token
from tests.scheduler_state import has_unfinished

PATTERNS = [(True, True, True), (False, True, True), (True, False, True), (True, True, False)]


def drain(harness, patterns, max_steps=500):
    patterns = itertools.cycle(patterns)
    for _ in range(max_steps):
        if not has_unfinished(harness.scheduler) and not harness.in_flight:
            break
        harness.propose(next(patterns)[: harness.num_drafts])
        harness.step_or_none()
        harness.scheduler.check_invariants()
    harness.assert_empty()


def test_accepted_drafts_count_and_rejected_ones_are_given_back():
    harness = Harness(num_drafts=3)
    request = harness.add(5, max_tokens=20)
    harness.step()
    for pattern, num_accepted in zip(PATTERNS, [3, 0, 1, 2], strict=True):
        computed = request.num_computed_tokens
        harness.propose(pattern)
        schedule = harness.schedule()
        assert schedule.num_drafts == 3
        assert (schedule.q_lens[0], schedule.num_decodes, schedule.max_q_len, schedule.num_tokens) == (4, 1, 4, 4)
        assert step_demand(schedule, 4)[:5] == (4, 1, 1, 4, 4), "a logits row for every draft"
        assert request.num_computed_tokens == computed + 4 and request.num_in_flight == 4
        result = harness.update()
        assert len(result.tokens) == len(result.requests) == num_accepted + 1
        assert request.num_computed_tokens == computed + num_accepted + 1 and request.num_in_flight == 0
    harness.drain()
    harness.assert_solo(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("config", [{}, {"num_pages": 12}, {"mixed": False}, {"page_size": 1, "num_pages": 60}])
def test_requests_end_as_alone_whatever_is_accepted(config, depth):
    """A step's tokens past a stop are dropped and lengths are exact, with preemptions, whether results come at once or late."""
    harness = Harness(num_drafts=3, depth=depth, **config)
    requests = [harness.add(3 + i, max_tokens=6 + i, ignore_eos=bool(i % 2), stop_token_ids=[i]) for i in range(10)]
    drain(harness, PATTERNS)
    harness.assert_solo(*requests)
    assert "num_pages" not in config or harness.scheduler.stats().num_preemptions


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_past_a_stop_in_one_step_are_dropped(depth):
    """Three drafts are accepted; the first of them stops the request."""
    harness = Harness(num_drafts=3, depth=depth)
    prompt = [1, 2, 3, 4, 5]
    second = next_token(9, [*prompt, next_token(9, prompt)])
    request = harness.add(prompt, max_tokens=30, seed=9, stop_token_ids=[second])
    drain(harness, PATTERNS[:1])
    assert request.num_output_tokens == 2 and (request.finish_reason, request.stop_reason) == ("stop", second)
    harness.assert_solo(request)


def test_drafts_are_trimmed_to_the_budget_and_prompts_get_what_is_left():
    """Every decode has its token first; then drafts in running order, of half of what is left where a prompt waits."""
    harness = Harness(num_drafts=3, max_num_batched_tokens=8, max_num_seqs=4)
    for _ in range(3):
        harness.add(2, max_tokens=20)
    harness.step()
    harness.propose((True, True, True))
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [4, 3, 1] and schedule.num_tokens == 8 and harness.proposed.explored
    harness.update()
    harness.propose((True, True, True))
    harness.add(4)
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [3, 1, 1, 3] and schedule.num_decodes == 3 and not harness.proposed.explored
    harness.update()
    harness.drain()


@pytest.mark.parametrize("num_waiting, num_drafts", [(0, 5), (1, 2), (9, 1)])
def test_drafts_are_trimmed_to_the_logits_rows(num_waiting, num_drafts):
    """Seven rows, two of them the decodes' own; each prompt that may end in the step needs one, and drafts get half of the rest."""
    harness = Harness(num_drafts=3, max_rows=7, max_num_seqs=4)
    for _ in range(2):
        harness.add(2, max_tokens=20)
    harness.step()
    for _ in range(num_waiting):
        harness.add(3)
    harness.propose((True, True, True))
    schedule = harness.schedule()
    assert schedule.num_drafts == num_drafts
    assert schedule.num_decodes + schedule.num_drafts + (schedule.num_seqs - schedule.num_decodes) <= 7
    harness.update()
    harness.drain()


def test_samples_that_join_with_their_first_have_logits_rows():
    harness = Harness(num_drafts=3, max_rows=6, max_num_seqs=6)
    harness.add(2, max_tokens=20)
    harness.step()
    samples = [harness.request([7, 8, 9], sample_index=i, seed=9 + i, ignore_eos=True) for i in range(4)]
    for sample in samples:
        sample.samples = samples
        harness.scheduler.add(sample)
    harness.propose((True, True, True))
    schedule = harness.schedule()
    assert schedule.num_seqs == 5 and schedule.samples.all() and 5 + schedule.num_drafts <= 6
    harness.update()
    harness.drain()
    harness.assert_solo(*samples)


@pytest.mark.parametrize("max_tokens, max_model_len, num_drafts", [(3, 64, 1), (2, 64, 0), (9, 7, 0), (9, 8, 1)])
def test_drafts_are_trimmed_to_the_length_that_is_left(max_tokens, max_model_len, num_drafts):
    """One token is out; a decode with d drafts may bring d + 1 more."""
    harness = Harness(num_drafts=3, max_model_len=max_model_len)
    request = harness.add(5, max_tokens=max_tokens)
    harness.step()
    harness.propose((True, True, True))
    assert harness.schedule().q_lens.tolist() == [1 + num_drafts]
    harness.update()
    assert request.finish_reason == "length"
    harness.assert_solo(request)


def test_drafts_never_preempt():
    """They take pages only as far as some are free."""
    harness = Harness(num_drafts=3, page_size=2, num_pages=7)
    requests = [harness.add(5, max_tokens=5), harness.add(5, max_tokens=5)]
    harness.step()
    harness.propose((True, True, True))
    schedule = harness.schedule()  # positions 5 to 8: two pages more for the first, of one; none for the second
    assert schedule.q_lens.tolist() == [3, 1] and harness.scheduler.stats().num_preemptions == 0
    harness.update()
    harness.drain()
    harness.assert_solo(*requests)


def test_drafts_for_who_does_not_decode_are_dropped():
    harness = Harness(num_drafts=2, max_num_batched_tokens=4, max_num_seqs=2)
    harness.add(10)
    harness.step()
    harness.proposed.num_drafts[:] = 2
    schedule = harness.schedule()
    assert schedule.num_drafts == 0 and schedule.q_lens.tolist() == [4]
    harness.update()
    harness.drain()


@pytest.mark.parametrize("config", [{}, {"num_pages": 12}, {"page_size": 1, "num_pages": 60}])
@pytest.mark.parametrize("depth", [0, 1])
def test_forced_tokens_cut_the_drafts_in_flight(depth, config):
    """As with grammars: what is known when the next step is scheduled already, and not verified yet, is not verified any more."""
    harness = Harness(num_drafts=3, depth=depth, **config)
    requests = [harness.add(3 + i, max_tokens=12 + i, ignore_eos=bool(i % 2), stop_token_ids=[i]) for i in range(9)]
    patterns, counts, num_taken, num_cut = itertools.cycle(PATTERNS), itertools.cycle([0, 4, 0, 0, 9, 2]), 0, 0
    while has_unfinished(harness.scheduler) or harness.in_flight:
        while len(harness.in_flight) > depth:
            harness.update()
        harness.propose(next(patterns))
        schedule = harness.scheduler.schedule()  # its body runs; its head waits for what follows
        while schedule is None and harness.in_flight:
            harness.update()
            schedule = harness.scheduler.schedule()
        if schedule is None:
            break
        while harness.in_flight:
            harness.update()
        drafts = {r: int(q) - 1 for r, q in zip(schedule.requests[: schedule.num_decodes], schedule.q_lens, strict=False)}
        for request in harness.scheduler.running:
            if request.num_output_tokens and request in drafts:
                taken = len(harness.append_forced(request, next(counts), num_cut=drafts[request]).tokens)
                if taken:
                    harness.device.cut.add(request.row)
                    num_taken, num_cut = num_taken + taken, num_cut + drafts[request]
                harness.scheduler.check_invariants()
        harness.in_flight.append((schedule, *harness.device.run(schedule, 1 + harness.num_drafts)))
    harness.assert_empty()
    harness.assert_solo(*requests)
    assert num_taken > 20 and num_cut > 5
    assert config.get("num_pages") != 12 or harness.scheduler.stats().num_preemptions


class LeastBudget:
    """An objective that no step meets: as StepBudget's, the smallest size that holds the decodes and one token more."""

    every_step = False

    def choose(self, starts, chunk_start):
        return next(size for size in (4, 8, 32) if size > len(starts))


@pytest.mark.parametrize("num_decodes, q_lens", [(1, [2, 2]), (2, [2, 1, 1]), (3, [1, 1, 1, 1])])
def test_drafts_leave_prompts_a_part_of_a_dynamic_budget(num_decodes, q_lens):
    """Of four tokens, in this step and in all that follow it."""
    harness = Harness(num_drafts=3, step_budget=LeastBudget(), max_num_seqs=4)
    requests = [harness.add(2, max_tokens=40) for _ in range(num_decodes)]
    harness.step()
    while not all(harness.decodes(request) for request in requests):
        harness.step()
    requests.append(harness.add(12, max_tokens=3))
    for _ in range(3):
        harness.propose((True, True, True))
        schedule = harness.schedule()
        assert schedule.q_lens.tolist() == q_lens and schedule.num_decodes == num_decodes
        harness.update()
    drain(harness, PATTERNS)
    harness.assert_solo(*requests)
    harness.add(2, max_tokens=9)
    harness.step()
    harness.propose((True, True, True))
    assert harness.schedule().num_drafts == 3
    harness.update()
    harness.drain()
