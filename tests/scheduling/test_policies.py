"""Each policy composes steps as its paper does, and the switches change only what they name."""

import dataclasses

import pytest

from jaxserve.scheduling.config import SchedulerConfig, resolve_policy
from jaxserve.scheduling.policies import BATCHING_POLICIES
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduler_harness import Harness
from tests.scheduler_state import has_unfinished


def kinds(harness, max_steps=200):
    """'p' for a step of prompt tokens, 'd' of decodes, 'm' of both, until drained."""
    out = ""
    for _ in range(max_steps):
        schedule = harness.step_or_none()
        if schedule is None:
            break
        has_prompt = schedule.num_seqs > schedule.num_decodes
        out += "m" if has_prompt and schedule.num_decodes else "p" if has_prompt else "d"
    assert not has_unfinished(harness.scheduler)
    return out


def q_lens(schedule):
    return dict(zip([request.request_id for request in schedule.requests], schedule.q_lens.tolist(), strict=True))


def test_sarathi_gives_decodes_then_partial_prefills_then_new_requests():
    harness = Harness(max_num_batched_tokens=8, num_pages=100)
    harness.add(4, max_tokens=20)
    harness.step()
    harness.add(10)
    harness.add(3)
    assert q_lens(harness.step()) == {"r1": 1, "r2": 7}
    assert q_lens(harness.step()) == {"r1": 1, "r2": 3, "r3": 3}


@pytest.mark.parametrize("depth", [0, 1])
def test_sarathi_never_leaves_a_decode_out_of_a_step_with_prompt_tokens(depth):
    """All running requests past their prompt that may sample are in every mixed step, under page pressure too."""
    harness = Harness(max_num_batched_tokens=8, num_pages=14, depth=depth, max_num_seqs=6)
    requests = [harness.add(3 + 2 * i, max_tokens=12) for i in range(9)]
    num_mixed = 0
    while has_unfinished(harness.scheduler) or harness.in_flight:
        before = {
            request.request_id
            for request in harness.scheduler.running
            if harness.decodes(request) and request.num_tokens < request.max_total_tokens
        }
        schedule = harness.step_or_none()
        if schedule is not None and schedule.num_seqs > schedule.num_decodes:
            scheduled = {request.request_id for request in schedule.requests[: schedule.num_decodes]}
            victims = {request.request_id for request in harness.scheduler.waiting}
            assert before - victims <= scheduled
            num_mixed += bool(scheduled)
    assert num_mixed > 5 and harness.scheduler.stats().num_preemptions
    harness.assert_solo(*requests)


def test_orca_mixes_whole_prompts_and_stops_at_the_first_that_does_not_fit():
    """The second needs 12 of the 10 pages left; the third, which would fit, waits behind it."""
    harness = Harness(policy="orca", num_pages=16, max_num_batched_tokens=32)
    harness.add(4, max_tokens=20)  # 23 tokens of KV: 6 pages
    harness.add(20, max_tokens=28)  # 47: 12
    harness.add(4, max_tokens=4)
    assert q_lens(harness.step()) == {"r1": 4}
    assert len(harness.scheduler.running[0].pages) == 6, "reserved at admission"
    assert harness.pool.num_free_pages == 10
    while harness.scheduler.running[0].request_id == "r1":
        assert q_lens(harness.step()) == {"r1": 1}
        if not harness.scheduler.running:
            break
    assert q_lens(harness.step()) == {"r2": 20, "r3": 4}
    harness.drain()


def test_orca_never_preempts_and_never_grows():
    harness = Harness(policy="orca", num_pages=16)
    requests = [harness.add(5, max_tokens=15) for _ in range(8)]
    while has_unfinished(harness.scheduler):
        schedule = harness.step()
        assert schedule.num_decodes == schedule.num_seqs or schedule.num_tokens <= 32
        new = {schedule.requests[i].row for i in range(schedule.num_decodes, schedule.num_seqs)}
        assert set(schedule.page_updates[:, 0].tolist()) <= new or not len(schedule.page_updates)
    assert harness.scheduler.stats().num_preemptions == 0
    harness.assert_solo(*requests)


def test_prefill_first_steps_are_pure_and_prefill_goes_first():
    harness = Harness(policy="prefill_first", max_num_batched_tokens=8)
    harness.add(6, max_tokens=3)
    harness.add(6, max_tokens=3)
    assert kinds(harness) == "ppdd"
    harness.add(6, max_tokens=4)
    harness.step()
    harness.step()
    harness.add(6, max_tokens=2)
    assert kinds(harness) == "pdd", "a newcomer interrupts the decodes"


def test_prefill_first_decodes_when_no_prompt_fits():
    harness = Harness(policy="prefill_first", num_pages=4, max_num_seqs=4)
    harness.add(8, max_tokens=5)
    harness.add(12, max_tokens=2)
    assert kinds(harness) == "pddddpd"


def test_prefill_first_chunked_prefills_a_long_prompt_in_a_row():
    harness = Harness(policy="prefill_first", chunked=True, max_num_batched_tokens=8)
    harness.add(4, max_tokens=4)
    harness.step()
    harness.add(20, max_tokens=2)
    assert kinds(harness) == "pppddd"


def test_request_level_admits_only_an_idle_engine_and_ends_with_its_longest():
    harness = Harness(policy="request_level", max_num_batched_tokens=8, max_num_seqs=8)
    harness.add(6, max_tokens=2)
    harness.add(6, max_tokens=5)
    harness.add(6, max_tokens=3)
    assert [sorted(q_lens(harness.step())) for _ in range(3)] == [["r1"], ["r2"], ["r3"]], "one batch, three prefills"
    late = harness.add(2, max_tokens=2)
    assert kinds(harness) == "dddd" + "pd"
    assert late.num_preemptions == 0


def test_request_level_with_mixed_steps_closes_the_batch_at_its_first_decode():
    harness = Harness(policy="request_level", mixed=True, max_num_batched_tokens=8)
    harness.add(6, max_tokens=3)
    harness.add(6, max_tokens=3)
    assert kinds(harness) == "pddpdd"


def test_chunked_prefills_only_alternates():
    """sarathi with mixed=False: neither the chunks nor the decodes starve."""
    harness = Harness(mixed=False, max_num_batched_tokens=8)
    harness.add(4, max_tokens=5)
    harness.step()
    harness.add(24, max_tokens=2)
    assert kinds(harness) == "dpdpdpd"


def test_hybrid_batching_only_mixes_whole_prompts():
    """sarathi with chunked=False: a prompt waits until the budget beside the decodes holds all of it."""
    harness = Harness(chunked=False, max_num_batched_tokens=8, num_pages=100)
    harness.add(4, max_tokens=3)
    harness.step()
    harness.add(8, max_tokens=2)
    harness.add(7, max_tokens=2)
    steps = [q_lens(harness.step()) for _ in range(4)]
    assert steps == [{"r1": 1}, {"r1": 1}, {"r2": 8}, {"r2": 1, "r3": 7}]


def test_orca_chunked_splits_prompts():
    harness = Harness(policy="orca", chunked=True, max_num_batched_tokens=8)
    harness.add(20, max_tokens=2)
    assert [q_lens(harness.step()) for _ in range(3)] == [{"r1": 8}, {"r1": 8}, {"r1": 4}]


def test_a_recompute_over_the_budget_is_chunked_even_where_prompts_are_not():
    """Prompt + output outgrew the budget, so no step holds it whole: without chunks it would wait forever."""
    harness = Harness(policy="prefill_first", max_num_batched_tokens=8, num_pages=8, page_size=2, max_num_seqs=4)
    requests = [harness.add(4, max_tokens=10), harness.add(4, max_tokens=11)]
    resumed = []
    while has_unfinished(harness.scheduler):
        preempted = {request.request_id for request in harness.scheduler.waiting if request.num_preemptions}
        schedule = harness.step()
        for i in range(schedule.num_decodes, schedule.num_seqs):
            if schedule.requests[i].request_id in preempted:
                resumed.append(harness.scheduler.rows.prefill_end[schedule.rows[i]])
    assert max(resumed) > 8
    harness.assert_solo(*requests)


@pytest.mark.parametrize("policy", BATCHING_POLICIES)
@pytest.mark.parametrize("chunked", [None, False, True])
@pytest.mark.parametrize("mixed", [None, False, True])
def test_switches_change_only_what_they_name(policy, chunked, mixed):
    config = SchedulerConfig(max_model_len=64, policy=policy, chunked=chunked, mixed=mixed)
    if policy == "prefill_first" and mixed:
        with pytest.raises(ValueError, match="prefill_first.*mixed=True"):
            resolve_policy(config)
        return
    resolved = dataclasses.asdict(resolve_policy(config))
    expected = dataclasses.asdict(BATCHING_POLICIES[policy])
    expected |= {} if chunked is None else {"chunked": chunked}
    expected |= {} if mixed is None else {"mixed": mixed}
    assert resolved == expected


@pytest.mark.parametrize("policy, chunked", [("orca", None), ("sarathi", False)])
def test_a_threshold_without_chunks_is_refused(policy, chunked):
    config = SchedulerConfig(max_model_len=64, policy=policy, chunked=chunked, long_prefill_token_threshold=8)
    with pytest.raises(ValueError, match="long_prefill_token_threshold=8"):
        Scheduler(config, Harness().pool)
