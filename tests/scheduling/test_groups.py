"""Requests of devices that attend in groups: which group one goes to, and that it stays there with its pages and its budget."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxserve.request import RequestStatus
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduler_harness import Harness

GROUPS: dict[str, Any] = {"num_groups": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64}


def group_of(harness, request):
    return request.row // harness.scheduler.rows.rows_per_group


def test_requests_are_shared_out_evenly_and_end_as_alone():
    harness = Harness(**GROUPS)
    requests = [harness.add(3) for _ in range(7)]
    schedule = harness.step()
    assert sorted(Counter(group_of(harness, r) for r in requests).values()) == [3, 4]
    assert schedule.num_seqs == 7
    harness.drain()
    harness.assert_solo(*requests)


def test_requests_count_before_their_pages():
    """A long prompt takes more pages of its group than two short ones of the other's."""
    harness = Harness(**GROUPS, num_pages=32)
    long, first = harness.add(40), harness.add(1)
    harness.step()
    second = harness.add(1)
    harness.step()
    third = harness.add(1)
    harness.step()
    assert group_of(harness, first) == group_of(harness, second) != group_of(harness, long) == group_of(harness, third)
    harness.drain()


def test_a_group_computes_no_more_than_its_part_of_the_budget():
    harness = Harness(**GROUPS, num_pages=128)
    long, short = harness.add(50), harness.add(4)
    schedule = harness.step()
    assert schedule.q_lens.tolist() == [32, 4] and group_of(harness, long) != group_of(harness, short)
    harness.drain()
    harness.assert_solo(long, short)


def test_a_request_goes_where_its_prefix_is_unless_that_group_is_fuller():
    """An eighth of a group's eight rows is one."""
    harness = Harness(**GROUPS, prefix_caching=True)
    prompt = list(range(100, 112))
    first = harness.add([*prompt, 1], max_tokens=40)
    harness.step()
    home = group_of(harness, first)
    second, third = harness.add([*prompt, 2], max_tokens=40), harness.add([*prompt, 3], max_tokens=40)
    harness.step()
    assert group_of(harness, second) == home and second.num_cached_tokens == 12
    assert group_of(harness, third) != home and third.num_cached_tokens == 0
    fourth = harness.add([*prompt, 4], max_tokens=40)
    harness.step()
    assert group_of(harness, fourth) != home and fourth.num_cached_tokens == 12, "both groups have the prefix now"
    harness.drain()
    harness.assert_solo(first, second, third, fourth)


def test_samples_share_their_prompt_in_its_group():
    harness = Harness(**GROUPS, prefix_caching=False)
    samples = [harness.request(list(range(100, 112)), request_id=f"a/{i}", ignore_eos=True) for i in range(2)]
    for sample in samples:
        sample.samples = samples
        harness.scheduler.add(sample)
    harness.step()
    harness.step()
    assert group_of(harness, samples[0]) == group_of(harness, samples[1])
    assert samples[1].pages[:2] == samples[0].pages[:2]
    harness.drain()


def test_only_the_group_that_lacks_pages_preempts():
    """Two requests a group. One group's grow past its pages; one of the other's ends at once, and the last admitted stays there."""
    harness = Harness(**{**GROUPS, "max_num_seqs": 4}, page_size=4, num_pages=5, prefix_caching=False, max_model_len=20)
    growing, steady = [], []
    for max_tokens in (2, 12):  # by turns to the emptier group
        growing.append(harness.add(4, max_tokens=16))
        steady.append(harness.add(4, max_tokens=max_tokens))
    harness.step()
    assert {group_of(harness, r) for r in growing} == {0} and {group_of(harness, r) for r in steady} == {1}
    while growing[1].status is RequestStatus.RUNNING:
        harness.step()
    assert not growing[0].num_preemptions and growing[1].num_preemptions == 1 and steady[1].status is RequestStatus.RUNNING
    harness.drain()
    assert not any(r.num_preemptions for r in (growing[0], *steady))
    harness.assert_solo(*growing, *steady)


def test_a_preempted_request_may_go_on_in_another_group():
    harness = Harness(**{**GROUPS, "max_num_seqs": 4}, page_size=4, num_pages=5, prefix_caching=False, max_model_len=20)
    requests = [harness.add(4, max_tokens=n) for n in (16, 2, 16, 2)]
    harness.step()
    assert group_of(harness, requests[0]) == group_of(harness, requests[2]) == 0
    while not requests[2].num_preemptions:
        harness.step()
    while requests[2].row < 0:
        harness.step()
    assert group_of(harness, requests[2]) == 1 and group_of(harness, requests[0]) == 0
    harness.drain()
    harness.assert_solo(*requests)


def test_weights_that_change_and_errors_forget_the_pages_of_every_group():
    harness = Harness(**GROUPS)
    requests = [harness.add([*range(100, 112), i]) for i in range(4)]
    harness.drain()
    assert all(pool._page_of for pool in harness.pools)
    harness.scheduler.change_weights(1, "1", recompute=False)
    assert not any(pool._page_of for pool in harness.pools)
    harness.assert_solo(*requests)


def test_what_groups_can_not_have():
    pools = [PagePool(8, 4) for _ in range(2)]
    config = SchedulerConfig(max_model_len=16, num_groups=2, max_num_batched_tokens=32, max_num_seqs=8)
    with pytest.raises(ValueError, match="1 pools of pages for 2 groups: each needs one"):
        Scheduler(config, pools[0])
    with pytest.raises(NotImplementedError, match="in groups is for chunked prompts"):
        whole = SchedulerConfig(max_model_len=16, num_groups=2, max_num_batched_tokens=32, max_num_seqs=8, chunked=False)
        Scheduler(whole, pools[0], other_pools=pools[1:])
    with pytest.raises(ValueError, match="max_num_seqs=9 must be a multiple of attention_groups=2"):
        SchedulerConfig(max_model_len=16, num_groups=2, max_num_batched_tokens=32, max_num_seqs=9)


def test_a_page_for_several_rows_is_taken_in_all_groups_or_in_none():
    harness = Harness(**{**GROUPS, "max_num_seqs": 4}, page_size=4, num_pages=5, prefix_caching=False, max_model_len=20)
    a, b = harness.add(4, max_tokens=16), harness.add(16, max_tokens=4)
    harness.step()
    harness.pools[group_of(harness, b)].allocate(1)
    free = [pool.num_free_pages for pool in harness.pools]
    assert sorted(free) == [0, 4]
    assert not harness.scheduler.requests.pages.grow(np.array([a.row, b.row]))
    assert [pool.num_free_pages for pool in harness.pools] == free


class Loads:
    """`KVLoads` whose pages never come: for prompts longer than ten tokens. into: the group of each request that waits."""

    def __init__(self):
        self.into = []

    def begin(self, request, hits, max_pages, group):
        if request.num_prompt_tokens > 10:
            self.into.append(group)
        return request.num_prompt_tokens > 10

    def num_waiting(self, group):
        return self.into.count(group)

    def preempting(self, request):
        raise AssertionError("there are pages enough")


def test_requests_that_load_leave_their_own_group_a_row_each_and_the_others_all():
    """Eight groups of two rows. As many loads as there are rows in a group hold up no other group."""
    harness = Harness(num_groups=8, max_num_seqs=16, max_num_batched_tokens=64, num_pages=32)
    loads = harness.scheduler.composer.kv_loads = Loads()
    waiting = [harness.add(12) for _ in range(8)]
    harness.step_or_none()
    assert sorted(loads.into) == list(range(8)), "they are shared out as those that run"
    short = [harness.add(3, max_tokens=30) for _ in range(16)]
    harness.step_or_none()
    assert {r.status for r in waiting} == {RequestStatus.WAITING_FOR_KV}
    running = [r for r in short if r.row >= 0]
    assert sorted(group_of(harness, r) for r in running) == list(range(8)), "one row of each group is kept"
    loads.into = [0, 0, 1, 1, 1]  # in some groups wait as many as they have rows, or more
    harness.step_or_none()
    assert Counter(group_of(harness, r) for r in short if r.row >= 0) == {0: 1, 1: 1} | dict.fromkeys(range(2, 8), 2)
