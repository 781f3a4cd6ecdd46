"""Pages: who holds them, what they are known by, in which order they are given up."""

import hashlib
import struct

import pytest

from jaxserve.scheduling.page_pool import PagePool, extend_hash_chain, page_hash, root_hash
from tests.scheduler_harness import Harness
from tests.scheduler_state import hash_of, ref_count

ROOT = root_hash(0, None)


def chain_of(tokens, page_size=2, root=ROOT):
    chain = [root]
    extend_hash_chain(chain, tokens, page_size, len(tokens) // page_size)
    return chain


def take(pool, num_new_pages, hit_pages=()):
    """As `allocate`, where it must succeed."""
    pages = pool.allocate(num_new_pages, hit_pages)
    assert pages is not None
    return pages


def cached(pool, tokens, root=ROOT):
    """Pages that hold `tokens`, registered, in use."""
    chain = chain_of(tokens, pool.page_size, root)
    pages = take(pool, len(chain) - 1)
    for page, hash_ in zip(pages, chain[1:], strict=True):
        pool.register(page, hash_)
    return pages


def free_all_but(pool, num_free):
    return take(pool, pool.num_free_pages - num_free)


def test_only_full_pages_are_hashed_and_hashes_chain():
    """A page's hash is sha256(parent, int32 token ids), computed here by hand; a partial page has none."""
    by_hand = [ROOT]
    for pair in [(1, 2), (3, 4)]:
        by_hand.append(hashlib.sha256(by_hand[-1] + struct.pack("<2i", *pair)).digest())
    assert chain_of([1, 2, 3, 4, 5]) == by_hand
    assert page_hash(by_hand[1], [1, 2]) != by_hand[1], "the same tokens elsewhere are another page"
    harness = Harness(page_size=4)
    request = harness.add(7, max_tokens=1)
    harness.schedule()
    assert [hash_of(harness.pool, page) is not None for page in request.pages] == [True, False]


def test_a_hit_shares_pages_in_use_or_free():
    """Each page hit gains one reference; a free page leaves the free list."""
    pool = PagePool(4, 2)
    pages = cached(pool, [1, 2, 3, 4])
    hits = pool.match([ROOT], [1, 2, 3, 4, 5])
    assert hits == pages and pool.allocate(0, hits) == pages
    assert [ref_count(pool, page) for page in pages] == [2, 2]
    pool.check_invariants(pages + pages)
    pool.free(pages)
    pool.free(pages)
    assert pool.num_free_pages == 4
    again = take(pool, 1, pool.match([ROOT], [1, 2, 3, 4, 5]))
    assert again[:2] == pages and pool.num_free_pages == 1
    pool.check_invariants(again)


@pytest.mark.parametrize("num_tokens, num_hits", [(4, 1), (5, 2), (6, 2), (2, 0), (3, 1), (1, 0)])
def test_a_full_hit_leaves_a_token_to_compute(num_tokens, num_hits):
    """At most the pages before the last token's are hit."""
    pool = PagePool(4, 2)
    pages = cached(pool, [1, 2, 3, 4, 5, 6])
    assert pool.match([ROOT], [1, 2, 3, 4, 5, 6][:num_tokens]) == pages[:num_hits]


def test_a_miss_ends_the_match_and_the_chain_is_kept():
    """Nothing behind an unknown page can be hit; hashes computed on the way are not computed again."""
    pool = PagePool(4, 2)
    pages = cached(pool, [1, 2, 3, 4])
    pool.forget(pages[:1])
    chain = [ROOT]
    assert pool.match(chain, [1, 2, 3, 4, 5]) == []
    assert chain == chain_of([1, 2])


def test_free_order():
    """Pages without a hash are reused first, then cached ones: least recently freed first, a sequence's tail before its head."""
    pool = PagePool(7, 2)
    old, new, plain = cached(pool, [1, 2, 3, 4]), cached(pool, [5, 6, 7, 8, 9, 9]), take(pool, 2)
    pool.free(old)
    pool.free(new)
    pool.free(plain)
    assert pool.free_pages() == [*plain, *old[::-1], *new[::-1]]
    take(pool, 0, old)
    pool.free(old)
    assert pool.free_pages() == [*plain, *new[::-1], *old[::-1]]
    pool.check_invariants([])


def test_a_sequence_with_a_partial_page_frees_it_first():
    """The order of reuse holds within one sequence: its partial page has no hash."""
    pool = PagePool(3, 2)
    pages = cached(pool, [1, 2, 3, 4]) + take(pool, 1)
    pool.free(pages)
    assert pool.free_pages() == [pages[2], pages[1], pages[0]]


def test_reuse_clears_the_hash_and_duplicates_survive():
    """Three pages have one hash; whichever is evicted, each of the others is found in turn."""
    pool = PagePool(3, 2)
    pages = [cached(pool, [1, 2])[0] for _ in range(3)]
    pool.check_invariants(pages)
    assert sorted(pool.find(chain_of([1, 2])[1:])) == sorted(pages)
    for i, page in enumerate(pages):
        assert pool.match([ROOT], [1, 2, 3]) != []
        pool.free([page])
        (reused,) = take(pool, 1)
        assert reused == page and hash_of(pool, page) is None
        pool.check_invariants(pages)
        assert (pool.match([ROOT], [1, 2, 3]) == []) == (i == 2)


def test_a_duplicate_that_is_not_first_can_go():
    """The page that the map holds stays when its duplicate is reused."""
    pool = PagePool(2, 2)
    first, second = cached(pool, [1, 2])[0], cached(pool, [1, 2])[0]
    pool.forget([second])
    assert pool.match([ROOT], [1, 2, 3]) == [first]
    pool.check_invariants([first, second])


def test_hits_are_not_evicted_for_the_same_request():
    """The hit's pages are the only free ones and first in line; the new page must come from elsewhere or not at all."""
    pool = PagePool(4, 2)
    pages = cached(pool, [1, 2, 3, 4])
    held = free_all_but(pool, 0)
    pool.free(pages)
    hits = pool.match([ROOT], [1, 2, 3, 4, 5])
    before = pool.free_pages()
    assert pool.allocate(1, hits) is None
    assert pool.free_pages() == before and pool.match([ROOT], [1, 2, 3, 4, 5]) == hits
    pool.free(held[:1])
    assert pool.allocate(1, hits) == [*hits, held[0]]
    pool.check_invariants([*hits, *held])


def test_a_failed_allocation_changes_nothing():
    """Counts, free list and hashes stay as they were, with hits among pages in use and free ones."""
    pool = PagePool(5, 2)
    in_use, idle = cached(pool, [1, 2]), cached(pool, [3, 4])
    pool.free(idle)
    before = (pool.free_pages(), [ref_count(pool, page) for page in range(5)], [hash_of(pool, page) for page in range(5)])
    assert pool.allocate(4, [*in_use, *idle]) is None and pool.allocate(5) is None
    after = (pool.free_pages(), [ref_count(pool, page) for page in range(5)], [hash_of(pool, page) for page in range(5)])
    assert before == after
    assert len(take(pool, 3, [*in_use, *idle])) == 5, "one page fewer does fit"


def test_a_full_pool_refuses():
    """The pool hands out not one page more than it has."""
    pool = PagePool(2, 2)
    assert pool.allocate(3) is None
    assert sorted(take(pool, 2)) == [0, 1]
    assert pool.allocate(1) is None and pool.allocate(0) == []


def test_caching_disabled_never_hits():
    """The same prompt comes twice, one after the other and at once."""
    harness = Harness(prefix_caching=False)
    prompt = list(range(1, 14))
    first = harness.add(prompt)
    twin = harness.add(prompt, seed=first.seed)
    harness.drain()
    second = harness.add(prompt)
    harness.drain()
    assert [r.num_cached_tokens for r in (first, twin, second)] == [0, 0, 0]
    assert harness.pool.num_queried_tokens == harness.pool.num_hit_tokens == 0
    harness.assert_solo(first, twin, second)


def test_reset_fails_while_pages_are_in_use():
    """A reset empties the cache once no page is in use."""
    pool = PagePool(4, 2)
    pages = cached(pool, [1, 2, 3, 4])
    pool.free(pages[:1])
    assert not pool.reset() and pool.match([ROOT], [1, 2, 3]) == pages[:1]
    pool.free(pages[1:])
    assert pool.reset() and pool.match([ROOT], [1, 2, 3]) == []
    pool.check_invariants([])


def test_reset_drops_duplicates():
    """A reset also forgets pages that were duplicates of another."""
    pool = PagePool(2, 2)
    for page in [cached(pool, [1, 2])[0] for _ in range(2)]:
        pool.free([page])
    assert pool.reset()
    pool.check_invariants([])


@pytest.mark.parametrize("field, other", [("cache_salt", "b"), ("num_weight_updates", 1)])
def test_the_root_isolates_caches(field, other):
    """Another salt or version of the weights misses; the same hits."""
    harness = Harness(num_pages=20)
    prompt = list(range(1, 14))
    base = {"cache_salt": "a"}
    hits = []
    for kwargs in (base, base, {**base, field: other}, {**base, field: other}, base):
        hits.append(harness.add(prompt, **kwargs))
        harness.drain()
    assert [request.num_cached_tokens for request in hits] == [0, 12, 0, 12, 12]


def test_roots_are_unambiguous():
    """No salt is not an empty salt, nor one that spells None; versions differ."""
    roots = [(0, "a"), (0, ""), (0, None), (0, "None"), (1, "a"), (1, None)]
    assert len({root_hash(*root) for root in roots}) == len(roots)


def test_the_free_list_removes_from_the_middle():
    """Pop, append and removal from anywhere (head, tail, middle, the only one) keep links and count right."""
    pool = PagePool(6, 2)
    pages = cached(pool, list(range(12)))
    pool.free(pages)
    order = pages[::-1]
    for page in (order[2], order[0], order[5], order[3], order[4], order[1]):
        take(pool, 0, [page])
        order.remove(page)
        assert pool.free_pages() == order and pool.num_free_pages == len(order)
        pool.check_invariants([p for p in pages if p not in order])
    for page in pages:
        pool.free([page])
    assert pool.free_pages() == pages
    assert pool.allocate(6) == pages and pool.free_pages() == []
    pool.free(pages)
    pool.check_invariants([])


def test_the_free_list_costs_the_same_however_long():
    """Each operation is O(1): it traces as many calls and lines at 100,000 pages as at 100."""
    import sys

    def num_lines(num_pages):
        pool = PagePool(num_pages, 2)
        pages = cached(pool, list(range(20)))
        pool.free(pages)
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            taken = take(pool, 1, pages[3:5])
            pool.free(taken)
        finally:
            sys.settrace(before)
        return count

    assert num_lines(100_000) == num_lines(100)


def test_forget_drops_hashes_in_use_or_not():
    """What a bad request wrote is never hit again; its free pages are the first to go."""
    pool = PagePool(5, 2)
    used, idle, other = cached(pool, [1, 2]), cached(pool, [3, 4]), cached(pool, [5, 6])
    pool.free(other)
    pool.free(idle)
    pool.forget([*used, *idle])
    assert pool.match([ROOT], [1, 2, 0]) == pool.match([ROOT], [3, 4, 0]) == []
    assert pool.match([ROOT], [5, 6, 0]) == other
    assert pool.free_pages()[0] == idle[0]
    pool.check_invariants(used)
    pool.forget(used)  # again: harmless


def test_freeing_twice_is_our_own_bug():
    pool = PagePool(2, 2)
    pages = take(pool, 1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(pages)


@pytest.mark.parametrize("num_pages, page_size", [(0, 2), (2, 0)])
def test_an_empty_pool_is_refused(num_pages, page_size):
    with pytest.raises(ValueError, match="must be >= 1"):
        PagePool(num_pages, page_size)
