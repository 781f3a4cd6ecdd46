"""Speculation's arithmetic: drafts are scheduled, some are accepted, the rest is given back, at once or a step late."""

import itertools

import pytest

from tests.scheduler_harness import EOS, Harness, next_token

PATTERNS = [(True, True, True), (False, True, True), (True, False, True), (True, True, False)]


def drain(harness, patterns, max_steps=500):
    patterns = itertools.cycle(patterns)
    for _ in range(max_steps):
        if not harness.scheduler.has_unfinished and not harness.in_flight:
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
        drafts = request.draft_token_ids
        schedule = harness.schedule()
        assert schedule.draft_token_ids == {0: drafts} and len(drafts) == 3
        assert (schedule.q_lens[0], schedule.num_decodes, schedule.max_q_len, schedule.num_tokens) == (4, 1, 4, 4)
        assert request.num_computed_tokens == computed + 4 and request.num_in_flight == 4
        assert request.draft_token_ids == []
        result = harness.update()
        assert len(result.tokens) == len(result.requests) == num_accepted + 1
        assert request.num_computed_tokens == computed + num_accepted + 1 and request.num_in_flight == 0
    assert harness.schedule().draft_token_ids == {}, "used once"
    harness.update()
    harness.drain()
    harness.assert_solo(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("config", [{}, {"num_pages": 12}, {"mixed": False}, {"page_size": 1, "num_pages": 60}])
def test_requests_end_as_alone_whatever_is_accepted(config, depth):
    """12, 16 and 18: a step's tokens past a stop are dropped, lengths are exact, with preemptions, at once and late."""
    harness = Harness(num_drafts=3, depth=depth, **config)
    requests = [harness.add(3 + i, max_tokens=6 + i, ignore_eos=bool(i % 2), stop_token_ids=[i]) for i in range(10)]
    drain(harness, PATTERNS)
    harness.assert_solo(*requests)
    assert "num_pages" not in config or harness.scheduler.stats().num_preemptions


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_past_a_stop_in_one_step_are_dropped(depth):
    """12: three drafts are accepted, the first of which stops the request."""
    harness = Harness(num_drafts=3, depth=depth)
    prompt = [1, 2, 3, 4, 5]
    second = next_token(9, [*prompt, next_token(9, prompt)])
    request = harness.add(prompt, max_tokens=30, seed=9, stop_token_ids=[second])
    drain(harness, PATTERNS[:1])
    assert request.num_output_tokens == 2 and (request.finish_reason, request.stop_reason) == ("stop", second)
    harness.assert_solo(request)


def test_drafts_are_trimmed_to_the_budget_and_prompts_get_what_is_left():
    """Every decode has its token first; then drafts in running order."""
    harness = Harness(num_drafts=3, max_num_batched_tokens=8, max_num_seqs=4)
    for _ in range(3):
        harness.add(2, max_tokens=9)
    harness.step()
    harness.propose((True, True, True))
    harness.add(4)
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [4, 3, 1] and schedule.num_tokens == 8
    harness.update()
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [1, 1, 1, 4] and schedule.num_decodes == 3
    harness.update()
    harness.drain()


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
    """Waiting, mid-prompt, or finished meanwhile."""
    harness = Harness(num_drafts=2, max_num_batched_tokens=4, max_num_seqs=2)
    chunked, waiting = harness.add(10), harness.add(3)
    harness.step()
    for request in (chunked, waiting):
        harness.scheduler.set_drafts(request, [EOS, EOS])
    schedule = harness.schedule()
    assert schedule.draft_token_ids == {} and schedule.q_lens.tolist() == [4]
    assert chunked.draft_token_ids == waiting.draft_token_ids == []
    harness.update()
    harness.scheduler.set_drafts(chunked, [1])
    harness.scheduler.abort([chunked.request_id])
    harness.drain()
