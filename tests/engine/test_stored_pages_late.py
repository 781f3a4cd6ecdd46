"""Loads and saves of a slow store: nobody waits for it longer than he must, and what is given up is done with."""

import threading

import pytest

from jaxserve.engine import stored_pages
from jaxserve.kv_store.host import HostTier
from jaxserve.request import RequestStatus
from tests.dummy import add, assert_empty, serve
from tests.engine.storing import asks, counts, engine_with, hold_loads, run, served, stored, wait_for


def test_loads_may_overlap(closed):
    """The pool forgets first pages whose followers are on their way: the next request loads all of them, and both loads end."""
    engine, wanted = engine_with(pool_pages=60), asks(0)
    closed.append(engine)
    served(engine, wanted)
    engine.reset_prefix_cache()
    served(engine, asks(0, n=13, max_tokens=1))  # three of its pages are cached again
    load, jobs = stored(engine).store.load, hold_loads(engine)
    (first,) = add(engine, "first", wanted[0])
    engine.step()
    pool = engine.pool
    pool.forget(pool.find(first.hash_chain[1:4]))
    add(engine, "second", wanted[0])
    engine.step()
    assert [len(hashes) for hashes, _ in jobs] == [6, 9], "the second's hashes hold the first's"
    for job, asked in zip(list(stored(engine)._loads), jobs, strict=True):
        stored(engine)._loads[load(*asked)] = stored(engine)._loads.pop(job)
    run(engine)
    assert_empty(engine)


class Gated(HostTier):
    """A tier whose reads behind the first `num_free` wait for `gate`."""

    def __init__(self, tier, num_free):
        self.__dict__.update(tier.__dict__)
        self.num_free, self.gate, self.num_begun = num_free, threading.Event(), 0

    def read(self, hash_, out):
        self.num_begun += 1
        if self.num_begun > self.num_free:
            assert self.gate.wait(120)
        return super().read(hash_, out)


def expire(engine):
    """The time of the loads under way is over."""
    for load in stored(engine)._loads.values():
        object.__setattr__(load, "deadline", 0.0)


@pytest.fixture
def slow(closed):
    """An engine whose store gives three pages of a load at once and the others when its gate opens, and that gate's tier."""
    engine = engine_with(pool_pages=60)
    closed.append(engine)
    for ask in asks(0, 1):
        served(engine, [ask])
    engine.reset_prefix_cache()
    store = stored(engine).store
    tier = Gated(store._tiers[0], 3)
    store._tiers = (tier,)
    yield engine, tier
    tier.gate.set()


def test_what_has_come_of_a_late_load_is_used_and_the_rest_is_not_read(slow):
    engine, tier = slow
    (request,) = add(engine, "a", asks(0)[0])
    engine.step()
    wait_for(lambda: tier.num_begun == 4)
    expire(engine)
    run(engine)
    assert request.num_cached_tokens == 3 * 4 and counts(engine).num_hit_tokens == 3 * 4
    assert counts(engine).num_failed_loads == 1
    (late,) = stored(engine)._late
    tier.gate.set()
    wait_for(lambda: stored(engine).poll() or not stored(engine)._late)
    assert late.num_done == 4 and tier.num_begun == 4, "the page under way, and none behind it"
    assert_empty(engine)


def test_nobody_waits_behind_a_late_load(slow):
    """Neither those who waited for it nor those who come while the store hangs begin another."""
    engine, tier = slow
    waiting = [*add(engine, "a", asks(0)[0]), *add(engine, "b", asks(0)[0])]
    engine.step()
    assert {request.status for request in waiting} == {RequestStatus.WAITING_FOR_KV}
    expire(engine)
    stored(engine).poll()
    assert stored(engine)._late
    assert all(request.kv_sought for request in waiting)
    hold_loads(engine)  # would hang
    add(engine, "c", asks(1)[0])
    engine.step()
    assert not stored(engine).is_awaited
    run(engine)
    del stored(engine).store.load
    tier.gate.set()
    wait_for(lambda: stored(engine).poll() or not stored(engine)._late)
    engine.reset_prefix_cache()
    num_loaded = counts(engine).num_hit_tokens
    add(engine, "d", asks(1)[0])
    run(engine)
    assert counts(engine).num_hit_tokens == num_loaded + 36, "the store does its work again"


def test_pages_that_wait_to_be_saved_are_bounded(closed):
    engine = engine_with()
    closed.append(engine)
    pages = stored(engine)
    bound = 8 * engine.pool.num_pages
    engine.pool.journal = [(0, b"%d" % i) for i in range(bound + 3)]
    pages._drain_journal()
    (unsaved,) = pages._unsaved
    assert len(unsaved) == pages.num_unsaved == bound and unsaved[-1] == (0, b"%d" % (bound + 2))


def test_what_is_not_saved_at_the_end_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(stored_pages, "CLOSE_SECONDS", 0.2)
    engine, gate = engine_with(), threading.Event()
    pages = stored(engine)
    write = pages.store._tiers[0].write
    pages.store._tiers[0].write = lambda hash_, page: gate.wait(120) and write(hash_, page)
    serve(engine, asks(0, 1))
    engine.close()
    assert "not saved within 0.2 s" in caplog.text
    caplog.clear()
    engine.close()
    assert not caplog.text
    gate.set()
    pages.store._thread.join(120)
    assert not pages.store._thread.is_alive()
