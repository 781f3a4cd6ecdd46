"""What a step holds, how requests end, who gives way: a test a behaviour, each against a device that samples from what it reads."""

import numpy as np
import pytest

from jaxserve.request import RequestStatus
from tests.scheduler_harness import EOS, Harness, next_token, solo
from tests.scheduler_state import has_unfinished


def ids(schedule):
    return [request.request_id for request in schedule.requests]


def q_lens(schedule):
    return schedule.q_lens.tolist()


# Scheduling


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_one_schedule_admits_all_that_fit(prefix_caching):
    """Requests are admitted in order of arrival, each with its full prompt; running order is arrival order."""
    harness = Harness(max_num_batched_tokens=64, prefix_caching=prefix_caching)
    requests = [harness.add(5 + i) for i in range(6)]
    assert harness.scheduler.waiting == requests and harness.scheduler.num_waiting == 6
    schedule = harness.schedule()
    assert schedule.requests == requests == harness.scheduler.running
    assert q_lens(schedule) == [5, 6, 7, 8, 9, 10] and schedule.num_tokens == 45 and schedule.max_q_len == 10
    assert schedule.samples.all() and not schedule.starts.any() and schedule.num_decodes == 0
    assert all(request.status is RequestStatus.RUNNING for request in requests)


@pytest.mark.parametrize("policy", ["sarathi", "orca", "prefill_first", "request_level"])
def test_budget_and_max_num_seqs_hold(policy):
    """No step exceeds the token budget or max_num_seqs, and both are reached."""
    harness = Harness(policy=policy, max_num_batched_tokens=12, max_num_seqs=5, num_pages=100)
    for i in range(20):
        harness.add(3 + i % 9, max_tokens=4 + i % 7)
    tokens, seqs, running = [], [], []
    while has_unfinished(harness.scheduler):
        schedule = harness.step()
        assert schedule.num_tokens == schedule.q_lens.sum() and schedule.num_seqs == len(set(schedule.rows.tolist()))
        tokens.append(schedule.num_tokens)
        seqs.append(schedule.num_seqs)
        running.append(harness.scheduler.num_running)
    assert max(tokens) <= 12 and max(running) == 5 and max(seqs) <= 5
    assert policy != "sarathi" or max(tokens) == 12


def test_a_prompt_over_the_budget_is_chunked_and_samples_at_its_end():
    """20 tokens meet a budget of 8; no token comes out before the last chunk, whatever stands in the others' places."""
    harness = Harness(max_num_batched_tokens=8)
    request = harness.add(20, max_tokens=2, ignore_eos=False, seed=5)
    for q_len, start, sampled in [(8, 0, False), (8, 8, False), (4, 16, True)]:
        schedule = harness.schedule()
        assert (q_lens(schedule), schedule.starts.tolist(), schedule.samples.tolist()) == ([q_len], [start], [sampled])
        assert request.num_computed_tokens == start + q_len
        result = harness.update()  # the places of what is not sampled hold the eos id
        assert result.tokens == ([next_token(5, request.prompt_token_ids)] if sampled else [])
        assert result.requests == ([request] if sampled else [])
    harness.drain()
    harness.assert_solo(request)


def test_the_eos_id_in_a_prompt_or_in_padding_is_not_a_stop():
    """A prompt of nothing but eos ids runs in chunks beside a decode."""
    harness = Harness(max_num_batched_tokens=4, max_num_seqs=4)
    requests = [harness.add(3, max_tokens=8, ignore_eos=False, seed=2), harness.add([EOS] * 11, 4, ignore_eos=False)]
    harness.drain()
    harness.assert_solo(*requests)


def test_without_chunking_a_long_prompt_blocks_the_short_behind_it():
    """The short prompts wait although the budget has room for them."""
    harness = Harness(chunked=False, max_num_batched_tokens=16, num_pages=100)
    for prompt in (10, 8, 2):
        harness.add(prompt)
    assert ids(harness.step()) == ["r1"]
    assert (ids(harness.step()), harness.scheduler.num_waiting) == (["r1", "r2", "r3"], 0)


def test_several_partial_prefills_coexist():
    """Three prompts of 800 tokens share budgets of 1024 under a threshold of 400."""
    harness = Harness(max_num_batched_tokens=1024, long_prefill_token_threshold=400, max_model_len=1000, num_pages=1000)
    for _ in range(3):
        harness.add(800)
    assert [q_lens(harness.step()) for _ in range(3)] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_the_long_prefill_threshold_applies_once_another_waits():
    """A lone prompt gets the whole budget; a second one caps it. Running decodes don't count as waiting prompts."""
    harness = Harness(max_num_batched_tokens=64, long_prefill_token_threshold=16, max_model_len=400, num_pages=200)
    harness.add(2, max_tokens=50)
    harness.step()
    harness.add(200)
    assert q_lens(harness.step()) == [1, 63]
    harness.add(40)
    assert [q_lens(harness.step()) for _ in range(2)] == [[1, 16, 16], [1, 16, 16]]
    assert q_lens(harness.step()) == [1, 16, 8]
    assert q_lens(harness.step()) == [1, 1, 62], "decodes come first, and alone it has the rest again"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_chunked_prompt_reaches_max_model_len(depth):
    """63 prompt tokens in chunks and one sampled token make 64, not 63, whatever max_tokens says; so does a longer output."""
    harness = Harness(max_num_batched_tokens=16, max_model_len=64, depth=depth)
    requests = [harness.add(63, max_tokens=None), harness.add(60, max_tokens=100)]
    harness.drain()
    assert [len(request.token_ids) for request in requests] == [64, 64]
    harness.assert_solo(*requests)


def test_a_second_step_is_scheduled_while_the_first_is_in_flight():
    """Each position is scheduled once: the prompt, then one decode a schedule, before any token has come back."""
    harness = Harness()
    request = harness.add(5, max_tokens=6)
    seen = []
    for _ in range(4):
        schedule = harness.schedule()
        seen.append((int(schedule.starts[0]), int(schedule.q_lens[0]), schedule.num_decodes))
    assert seen == [(0, 5, 0), (5, 1, 1), (6, 1, 1), (7, 1, 1)]
    assert (request.num_in_flight, request.num_tokens, request.num_output_tokens) == (4, 9, 0)
    assert harness.scheduler.num_steps_in_flight == 4
    while harness.in_flight:
        harness.update()
        harness.scheduler.check_invariants()
    assert request.output_token_ids == solo(request, 64)[0][:4]
    harness.drain()
    harness.assert_solo(request)


@pytest.mark.parametrize("config", [{}, {"mixed": False}, {"chunked": False}, {"policy": "prefill_first"}])
def test_holding_back_never_idles_the_model(config):
    """With nothing in flight and work left there is always a step, while preemptions hold prompts back."""
    harness = Harness(num_pages=9, max_num_batched_tokens=16, **config)
    requests = [harness.add(4 + i % 5, max_tokens=12) for i in range(10)]
    while has_unfinished(harness.scheduler):
        harness.schedule()
        harness.update()
    assert harness.scheduler.stats().num_preemptions > 2
    harness.assert_solo(*requests)


# Stopping and lifetime


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "kwargs, tokens, expected",
    [
        ({}, [7, EOS, 8], ("stop", None, 2)),
        ({"stop_token_ids": [8]}, [7, 8, 9], ("stop", 8, 2)),
        ({"stop_token_ids": [EOS]}, [7, EOS, 9], ("stop", None, 2)),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS, 9], ("stop", EOS, 1)),
        ({"ignore_eos": True}, [EOS, EOS, EOS, EOS, 7], ("length", None, 5)),
        ({}, [1, 2, 3, 4, EOS], ("stop", None, 5)),
        ({"min_tokens": 3}, [EOS, EOS, EOS, EOS, 9], ("stop", None, 4)),
        ({"min_tokens": 2, "stop_token_ids": [8]}, [8, 8, 8], ("stop", 8, 3)),
        ({"min_tokens": 5}, [EOS, EOS, EOS, EOS, EOS], ("length", None, 5)),
        ({"max_tokens": 2}, [1, 2, 3], ("length", None, 2)),
        ({"max_tokens": None}, [7] * 60, ("length", None, 59)),
    ],
)
def test_requests_end_for_the_right_reason(kwargs, tokens, expected, depth):
    """A request ends by eos, a stop id or a length, exactly there, though later tokens may be in flight."""
    harness = Harness(depth=depth)
    request = harness.request(5, **kwargs)
    harness.scheduler.add(request)
    feed, num_scheduled = iter(tokens), 0
    while not request.finished:
        num_scheduled += harness.schedule_or_none() is not None
        if harness.in_flight and (len(harness.in_flight) > depth or num_scheduled == request.max_total_tokens - 5):
            harness.update(first_token=next(feed))
    reason, stop_reason, length = expected
    assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == (reason, stop_reason, length)
    assert harness.delivered[request.request_id] == tokens[:length]
    while harness.in_flight:
        assert harness.update(first_token=7).tokens == []
    assert harness.scheduler.stats().num_discarded_rows == num_scheduled - length
    harness.assert_empty()


def test_a_stop_string_ends_a_request_from_outside():
    """The engine finds the string in the text; tokens in flight are dropped and counted."""
    harness = Harness(depth=1)
    request, other = harness.add(5, max_tokens=9), harness.add(6, max_tokens=9)
    for _ in range(3):
        harness.step()
    harness.scheduler.finish(request, "stop", "###")
    assert (request.finish_reason, request.stop_reason, request.finished, request.pages) == ("stop", "###", True, [])
    length = request.num_output_tokens
    harness.drain()
    assert request.num_output_tokens == length == len(harness.delivered["r1"])
    assert harness.scheduler.stats().num_discarded_rows == 1
    harness.assert_solo(other)


def test_an_error_leaves_nothing_to_hit():
    """A request whose KV is bad ends, and the pages it hashed are never hit, although they were free already."""
    harness = Harness()
    request = harness.add(9, max_tokens=9)
    harness.step()
    harness.scheduler.finish(request, "error", "NaN")
    again = harness.add(request.prompt_token_ids, max_tokens=2)
    harness.drain()
    assert (again.num_cached_tokens, request.finish_reason, request.stop_reason) == (0, "error", "NaN")


def test_abort_ends_waiting_and_running_at_once():
    """Unknown, finished and repeated ids do no harm; pages and rows are free at once."""
    harness = Harness(max_num_seqs=2, depth=1)
    requests = [harness.add(5) for _ in range(3)]
    grammar = harness.request(5)
    grammar.status = RequestStatus.WAITING_FOR_GRAMMAR
    harness.scheduler.add(grammar)
    harness.step()
    aborted = harness.scheduler.abort(["r1", "nobody", "r3", "r1", "r4"])
    assert aborted == [requests[0], requests[2], grammar]
    assert all(request.finish_reason == "abort" and request.finished for request in aborted)
    assert harness.scheduler.running == requests[1:2] and harness.scheduler.num_waiting == 0
    harness.scheduler.check_invariants()
    assert harness.scheduler.abort(["r1", "r3"]) == []
    harness.drain()
    assert harness.scheduler.abort(["r2"]) == []
    harness.assert_solo(requests[1])


def test_an_aborted_id_and_row_are_reused_while_its_step_is_in_flight():
    """The late token goes to neither the old nor the new owner of the row."""
    harness = Harness(max_num_seqs=1, depth=1)
    harness.add(5, request_id="x")
    harness.schedule()
    harness.schedule()
    harness.scheduler.abort(["x"])
    new = harness.add(6, request_id="x", max_tokens=3)
    harness.drain()
    assert harness.scheduler.stats().num_discarded_rows == 2
    harness.assert_solo(new)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_nothing_remains_after_draining(prefix_caching):
    """No request, page, reference or map entry is left after stops, lengths, aborts and preemptions."""
    harness = Harness(num_pages=12, depth=1, prefix_caching=prefix_caching)
    requests = [harness.add(5 + i % 4, max_tokens=12, ignore_eos=bool(i % 2), stop_token_ids=[i]) for i in range(12)]
    for _ in range(6):
        harness.step()
    harness.scheduler.abort([requests[1].request_id, requests[11].request_id])
    harness.drain()  # ends in assert_empty
    assert harness.scheduler.stats().num_preemptions
    assert harness.pool.reset()


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens, depth):
    """Not one decode too many is scheduled."""
    harness = Harness(depth=depth)
    requests = [harness.add(5, max_tokens=max_tokens), harness.add(7, max_tokens=max_tokens + 1)]
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.num_scheduled_tokens == 5 + 7 + 2 * max_tokens - 1 and stats.num_discarded_rows == 0
    harness.assert_solo(*requests)


@pytest.mark.parametrize(
    "config, prompt, max_tokens, message",
    [
        ({}, [], 5, "empty prompt"),
        ({}, 64, 5, "prompt of 64 tokens, but max_model_len=64"),
        ({"num_pages": 7}, 20, 10, "may reach 30 tokens .* take 8 pages of 4, but the pool has 7"),
        ({"num_pages": 15}, 20, None, "may reach 64 tokens .* take 16 pages"),
        ({"chunked": False, "max_num_batched_tokens": 16}, 17, 5, "max_num_batched_tokens=16"),
        ({"policy": "orca", "num_pages": 7}, 20, 10, "lower max_tokens or raise num_pages"),
    ],
)
def test_impossible_requests_are_refused(config, prompt, max_tokens, message):
    """Before anything changes, and what is just possible is served."""
    harness = Harness(**config)
    with pytest.raises(ValueError, match=message):
        harness.add(prompt, max_tokens)
    assert harness.scheduler.schedule() is None
    harness.assert_empty()


@pytest.mark.parametrize("policy", ["sarathi", "orca", "prefill_first", "request_level"])
def test_a_request_that_fills_the_pool_is_served(policy):
    """Prompt 20 + output 9 are 28 tokens of KV: all 7 pages. Another one beside it, and it is preempted and resumes."""
    harness = Harness(num_pages=7, policy=policy)
    requests = [harness.add(6, max_tokens=6), harness.add(20, max_tokens=9)]
    harness.drain()
    harness.assert_solo(*requests)


def test_a_duplicate_id_is_refused():
    """Until the first has finished; the first is not disturbed."""
    harness = Harness()
    request = harness.add(5, request_id="x")
    with pytest.raises(ValueError, match="request_id='x' is in use"):
        harness.add(6, request_id="x")
    assert harness.scheduler.get("x") is request and harness.scheduler.num_waiting == 1
    harness.drain()
    assert harness.scheduler.get("x") is None
    harness.add(6, request_id="x")


def test_others_pass_a_request_that_waits_for_its_grammar():
    """And once ready it stands at its place of arrival."""
    harness = Harness(max_num_seqs=1)
    first = harness.request(5)
    first.status = RequestStatus.WAITING_FOR_GRAMMAR
    harness.scheduler.add(first)
    second, third = harness.add(5, max_tokens=2), harness.add(5, max_tokens=2)
    assert harness.step().requests == [second] and harness.scheduler.num_waiting == 2
    harness.scheduler.set_ready(first)
    assert harness.scheduler.waiting == [first, third] and first.status is RequestStatus.WAITING
    harness.step()
    assert harness.step().requests == [first]
    harness.scheduler.abort([first.request_id])
    harness.scheduler.set_ready(first)  # aborted while its grammar was compiled: harmless
    harness.drain()


def test_updates_come_in_the_order_of_schedules():
    harness = Harness()
    harness.add(5)
    harness.schedule()
    second = harness.schedule()
    with pytest.raises(AssertionError, match="step 0 comes before 1"):
        harness.scheduler.update(second, np.zeros(1, np.int32))
