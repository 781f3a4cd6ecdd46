"""Preemption with a store of KV: what a request loses is saved before its pages are used again, and loaded if that is faster."""

import time

import pytest

from jaxserve.engine.swap_pace import TRY_EVERY, SwapPace
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.store import TieredStore
from jaxserve.request import RequestStatus
from tests.dummy import add, assert_empty, poison
from tests.engine.storing import asks, counts, engine_with, expected, run, settle, stored

POOL = 14  # pages
GROWING = {"n": 20, "max_tokens": 26}  # three of them want 36 pages in the end


def preempted_at(engine, wanted):
    """Runs until a request is preempted. Returns it, and the hashes that its pages had."""
    lost, preempt = [], engine.scheduler.requests.preempt

    def watch(request):
        lost.append((request, [h for h in request.hash_chain[1:] if engine.pool.find([h])]))
        preempt(request)

    engine.scheduler.requests.preempt = watch
    for i, ask in enumerate(wanted):
        add(engine, str(i), ask)
    deadline = time.monotonic() + 120
    while not lost:
        assert time.monotonic() < deadline and engine.has_unfinished_requests()
        engine.step()
    return lost[0]


def hold_saves(engine):
    """Pages wait to be saved from now on. Returns what ends that."""
    pages, save = stored(engine), stored(engine).save
    pages.save = lambda *, rest=False: None

    def go_on():
        pages.save = save

    return go_on


@pytest.mark.slow
def test_all_that_a_preempted_request_loses_is_saved_first(closed):
    """Though no page was saved until then."""
    engine, wanted = engine_with(pool_pages=POOL), asks(*range(3), **GROWING)
    closed.append(engine)
    go_on, preempting = hold_saves(engine), stored(engine).preempting

    def preempt(request):
        go_on()
        preempting(request)

    stored(engine).preempting = preempt
    request, hashes = preempted_at(engine, wanted)
    assert len(hashes) > 4 and request.num_preemptions == 1
    pages = stored(engine)
    assert all(hash_ in pages._saving or pages.store.lookup([hash_]) for hash_ in hashes)
    poison(engine)
    run(engine)
    settle(engine)
    assert stored(engine).store.lookup(hashes) == len(hashes)
    assert_empty(engine)


@pytest.mark.slow
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_preempted_request_loads_if_that_is_faster(closed, is_fast, monkeypatch):
    engine, wanted = engine_with(pool_pages=POOL), asks(*range(3), **GROWING)
    closed.append(engine)
    pace = SwapPace(4)
    pace.loaded(1, 1e-9 if is_fast else 1e3)
    pace.computed(4, 1.0)
    monkeypatch.setattr(SwapPace, "loaded", lambda *_: None)  # it stays so
    monkeypatch.setattr(SwapPace, "computed", lambda *_: None)
    stored(engine).pace = pace
    loads, begin = [], stored(engine).begin

    def watch(request, hits, max_pages, group):
        begun = begin(request, hits, max_pages, group)
        if begun:
            loads.append(request.num_preemptions)
        return begun

    stored(engine).begin = watch
    found = {}
    for i, ask in enumerate(wanted):
        found[str(i)] = add(engine, str(i), ask)[0]
    run(engine)
    right = expected(wanted)
    assert {name: request.output_token_ids for name, request in found.items()} == {n: a.tokens for n, a in right.items()}
    assert engine.scheduler.stats().num_preemptions
    assert any(loads) is is_fast, "pages of preempted requests"
    assert_empty(engine)


@pytest.mark.slow
def test_a_store_that_is_slow_is_found_out(closed):
    """By what is measured, not told."""
    engine, wanted = engine_with(pool_pages=POOL), asks(*range(3), **GROWING)
    closed.append(engine)

    class Slow(HostTier):
        def read(self, hash_, out):
            time.sleep(0.05)
            return super().read(hash_, out)

    layout = stored(engine)._layout
    stored(engine).store.close()
    stored(engine).store = TieredStore([Slow(layout, 1 << 22)])
    run_first = asks(8, n=40, max_tokens=2)
    add(engine, "first", run_first[0])  # programs may be compiled in its steps
    run(engine)
    pace = stored(engine).pace = SwapPace(4)
    for _ in range(2):
        for i, ask in enumerate(wanted):
            add(engine, str(i), ask)
        run(engine)
        settle(engine)
        engine.reset_prefix_cache()
    assert pace.load_seconds is not None and pace.load_seconds > 0.04
    assert pace.compute_seconds is not None and not pace.load_is_faster


@pytest.mark.slow
def test_a_request_that_was_preempted_is_aborted_while_it_loads(closed):
    """No page is lost, and what comes late goes nowhere."""
    engine, wanted = engine_with(pool_pages=POOL), asks(*range(3), **GROWING)
    closed.append(engine)
    request, _ = preempted_at(engine, wanted)
    settle(engine)
    engine.abort([str(i) for i in range(3) if str(i) != request.request_id])
    deadline = time.monotonic() + 60
    engine.pool.reset()
    store = stored(engine).store
    load = store.load
    store.load = lambda hashes, into, *, told: load([], into[:0], told=told)  # ends with nothing
    while request.status is RequestStatus.PREEMPTED and time.monotonic() < deadline:
        engine.step()
    engine.abort(request.request_id)
    assert_empty(engine)
    store.load = load
    poison(engine)
    again = asks(7, **GROWING)
    found = add(engine, "x", again[0])[0]
    run(engine)
    assert found.output_token_ids == expected(again)["0"].tokens


def test_the_pace_follows_what_is_measured():
    pace = SwapPace(16)
    assert pace.load_is_faster and pace.chooses_load(), "nothing is known"
    pace.computed(160, 1.0)
    assert pace.compute_seconds == pytest.approx(0.1) and pace.chooses_load()
    pace.loaded(4, 0.2)
    assert pace.load_seconds == pytest.approx(0.05) and pace.chooses_load()
    for _ in range(30):
        pace.loaded(1, 0.5)
    assert not pace.load_is_faster
    assert [pace.chooses_load() for _ in range(2 * TRY_EVERY)].count(True) == 2, "it is tried now and then"
    for _ in range(30):
        pace.loaded(1, 0.01)
    assert all(pace.chooses_load() for _ in range(5))


@pytest.mark.slow
def test_what_is_counted_and_compared(closed):
    """Nothing of this is asked without a preemption: a slow store is still used by requests that come."""
    engine = engine_with()
    closed.append(engine)
    (ask,) = asks(0)
    add(engine, "a", ask)
    run(engine)
    settle(engine)
    engine.reset_prefix_cache()
    stored(engine).pace.loaded(1, 1e6)
    stored(engine).pace.computed(4, 1e-6)
    add(engine, "b", ask)
    run(engine)
    assert counts(engine).num_hit_tokens == 36
