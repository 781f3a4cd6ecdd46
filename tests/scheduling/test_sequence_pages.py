"""Pages of running requests through the scheduler: prefix hits, growth at page boundaries, what the page table is told."""

import numpy as np
import pytest

from tests.scheduler_harness import Harness
from tests.scheduler_state import has_unfinished, hash_of, ref_count
from tests.scheduling.test_page_pool import take

PROMPT = list(range(1, 14))  # 13 tokens: three pages of 4 and one token


@pytest.mark.parametrize("num_tokens, num_cached", [(13, 12), (12, 8), (9, 8), (8, 4), (4, 0)])
@pytest.mark.parametrize("running", [False, True])
def test_a_hit_shares_pages_and_computes_the_rest(num_tokens, num_cached, running):
    """Pages of a running or a finished request are hit; a fully cached prompt computes its last page in a page of its own."""
    harness = Harness()
    first = harness.add(PROMPT, max_tokens=20 if running else 1)
    harness.step()
    held = first.pages if running else None
    second = harness.add(PROMPT[:num_tokens], max_tokens=3)
    schedule = harness.schedule()
    i = schedule.requests.index(second)
    assert (schedule.starts[i], schedule.q_lens[i]) == (num_cached, num_tokens - num_cached)
    assert second.num_cached_tokens == num_cached
    if held is not None:
        shared = num_cached // 4
        assert second.pages[:shared] == held[:shared] and not set(second.pages[shared:]) & set(first.pages)
        assert [ref_count(harness.pool, page) for page in second.pages[:shared]] == [2] * shared
    harness.update()
    harness.drain()
    harness.assert_solo(first, second)


def test_same_step_duplicates_share_prefill_pages():
    """The second of two equal prompts in one step computes its last token only."""
    harness = Harness()
    first, second = harness.add(PROMPT), harness.add(PROMPT)
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [13, 1] and first.pages[:3] == second.pages[:3]
    harness.update()
    harness.drain()
    harness.assert_solo(first, second)


def test_a_chunked_prompt_is_shared_as_far_as_it_is_scheduled():
    """Only pages of scheduled chunks are hit, not those of later chunks."""
    harness = Harness(max_num_batched_tokens=10, long_prefill_token_threshold=6)
    first, second = harness.add(PROMPT), harness.add(PROMPT)
    schedule = harness.schedule()
    assert schedule.q_lens.tolist() == [6, 4] and schedule.starts.tolist() == [0, 4]
    harness.update()
    harness.drain()
    harness.assert_solo(first, second)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_later_turn_hits_pages_of_generated_tokens(depth):
    """Prompt 13 + output 8; the last output token's KV need not be there: 20 tokens of KV, five pages."""
    harness = Harness(depth=depth)
    first = harness.add(PROMPT, max_tokens=8)
    harness.drain()
    second = harness.add([*first.token_ids, 99, 98], max_tokens=3)
    harness.drain()
    assert second.num_cached_tokens == 20
    harness.assert_solo(first, second)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_decoded_page_is_shareable_once_it_is_full_and_known(depth):
    """The first page fills when the token at its last place is computed, not when it is sampled."""
    harness = Harness(depth=depth)
    request = harness.add(2, max_tokens=9)
    while has_unfinished(harness.scheduler):
        harness.step_or_none()
        hashed = [hash_of(harness.pool, page) is not None for page in request.pages]
        num_full = min(len(request.token_ids), request.num_computed_tokens) // 4
        assert hashed == [i < num_full for i in range(len(hashed))]


def test_decode_takes_a_page_only_at_a_boundary():
    """The device is told of that one entry, by row and column."""
    harness = Harness()
    request = harness.add(6, max_tokens=8)
    updates = []
    while has_unfinished(harness.scheduler):
        schedule = harness.schedule()
        updates.append([(row == request.row, column) for row, column, _ in schedule.page_updates.tolist()])
        assert schedule.page_updates.dtype == np.int32 and schedule.page_updates.shape[1] == 3
        harness.update()
    entries = [[(True, 0), (True, 1)], [], [], [(True, 2)], [], [], [], [(True, 3)]]
    assert updates == entries, "positions 8 and 12 are the first of their pages"


def test_page_updates_carry_every_page_of_an_admission():
    """Those that were hit included, and nothing twice."""
    harness = Harness()
    harness.add(PROMPT, max_tokens=9)
    harness.step()
    second = harness.add(PROMPT, max_tokens=9)
    schedule = harness.schedule()
    entries = [[second.row, column, page] for column, page in enumerate(second.pages)]
    assert schedule.page_updates.tolist() == entries and len(entries) == 4
    assert not len(harness.schedule().page_updates)


def test_a_failed_admission_changes_nothing():
    """Queue, counts and request stay as they were; a later attempt succeeds."""
    harness = Harness(num_pages=8)
    first = harness.add(PROMPT, max_tokens=6)
    harness.step()
    second = harness.add(PROMPT + [50] * 12, max_tokens=2)  # hits 3 pages, needs 4 more; 4 are free, one of them soon the other's
    third = harness.add(2, max_tokens=2)
    take(harness.pool, 1)  # somebody else's
    before = [ref_count(harness.pool, page) for page in range(8)]
    schedule = harness.schedule()
    assert schedule.requests == [first] and harness.scheduler.waiting == [second, third]
    assert [ref_count(harness.pool, page) for page in range(8)] == before
    assert (second.row, second.num_cached_tokens, second.num_computed_tokens) == (-1, -1, 0)


def test_statistics_count_once_an_admission():
    """Tokens found and tokens looked up count once an admission, not once a retry."""
    harness = Harness(max_num_seqs=2, num_pages=9)
    harness.add(PROMPT, max_tokens=9)
    harness.step()
    second = harness.add(PROMPT + [50] * 11, max_tokens=2)
    third = harness.add(PROMPT, max_tokens=2)
    held = take(harness.pool, 3)
    for _ in range(3):
        harness.step()
        stats = harness.scheduler.stats()
        assert (stats.num_queried_tokens, stats.num_hit_tokens) == (13, 0) and second.row < 0
    harness.pool.free(held)
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (13 + 24, 12) and second.num_cached_tokens == 12
    harness.drain()
    assert (harness.pool.num_queried_tokens, harness.pool.num_hit_tokens) == (13 + 24 + 13, 24)
    harness.assert_solo(second, third)


def test_a_hit_own_pages_are_not_evicted_for_its_new_pages():
    """The cached prefix is all that is free; the longer prompt must wait rather than overwrite it."""
    harness = Harness(num_pages=8)
    first = harness.add(PROMPT, max_tokens=1)
    harness.drain()
    held = take(harness.pool, 4)  # what is left besides: the 4 of the first prompt
    running = harness.add(3, max_tokens=2)
    harness.step()
    second = harness.add(PROMPT + [60] * 4, max_tokens=2)  # hits what is left of 3 pages, needs 2 of its own
    schedule = harness.schedule()
    assert second.row < 0 and running in schedule.requests
    harness.update()
    harness.pool.free(held)
    harness.drain()
    assert second.num_cached_tokens >= 8
    harness.assert_solo(first, running, second)
