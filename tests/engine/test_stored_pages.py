"""Engines with a store of KV: answers are those of an engine without one, whatever the store does, and no page is lost."""

import random
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import pytest

from jaxserve import SamplingParams
from jaxserve.engine.save_pace import SavePace
from jaxserve.engine.stats import KVStoreStats
from jaxserve.engine.stored_pages import StoredPages
from jaxserve.execution.compilation import compile_counts
from jaxserve.execution.page_transfer import MAX_SAVES, TRANSFER_PAGES
from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.store import Job, TieredStore
from jaxserve.kv_store.tier import PageLayout
from jaxserve.request import Request, RequestStatus
from tests.dummy import ONE_BUCKET, SEQS, Ask, add, assert_empty, differences, dummy_model, make_engine, poison, serve
from tests.engine.store_faults import Flaky
from tests.engine.store_fuzz import Fuzz, converse, other_weights
from tests.engine.storing import (
    HOST,
    NAME,
    asks,
    counts,
    engine_with,
    expected,
    hold_loads,
    prompt,
    run,
    served,
    settle,
    stored,
    wait_for,
)


def test_pages_that_the_pool_has_lost_come_from_the_store(closed):
    engine, wanted = engine_with(), asks(*range(6))
    closed.append(engine)
    for _ in range(2):
        num_computed, num_cached = engine.stats.prefill_tokens, engine.pool.num_hit_tokens
        for ask in wanted:  # one at a time: none is preempted
            assert differences(served(engine, [ask]), expected([ask])) == []
    stats = counts(engine)
    assert stats.num_hit_tokens > 6 * 20 and stats.num_failed_loads == 0
    assert engine.pool.num_hit_tokens - num_cached == 6 * 36, "a loaded page was lost before it was used"
    assert engine.stats.prefill_tokens - num_computed == 6 * 4
    (tier,) = stats.tiers
    assert tier.pages_read * 4 == stats.num_hit_tokens and tier.bytes_read == tier.pages_read * 1024


def test_output_tokens_are_kept_for_the_next_turn(closed):
    engine = engine_with()
    closed.append(engine)
    (first,) = asks(0)
    answer = served(engine, [first])["0"].tokens
    engine.reset_prefix_cache()
    second = Ask(first.prompt + answer, first.params)
    engine.add_request("x", second.prompt, second.params)
    run(engine)
    assert counts(engine).num_hit_tokens == 48  # of 49 tokens


def test_others_pass_a_request_that_waits_for_kv(closed):
    engine = engine_with()
    closed.append(engine)
    served(engine, asks(0))
    engine.reset_prefix_cache()
    load, jobs = stored(engine).store.load, hold_loads(engine)
    (waits,), (passes,) = (add(engine, name, ask) for name, ask in zip("ab", asks(0, 1), strict=True))
    engine.step()
    assert waits.status is RequestStatus.WAITING_FOR_KV and passes.status is RequestStatus.RUNNING
    assert waits in engine.scheduler.waiting and len(jobs) == 1
    engine.scheduler.check_invariants()
    (job,) = stored(engine)._loads
    stored(engine)._loads[load(*jobs[0])] = stored(engine)._loads.pop(job)
    run(engine)
    assert waits.num_cached_tokens == 36
    assert_empty(engine)


def test_requests_that_load_leave_rows_and_pages_to_those_that_run(closed):
    """Of eleven requests whose pages are kept, as many load as there are free rows: running ones are not preempted for them."""
    engine, running, stored_before = engine_with(pool_pages=60), asks(20, 21, 22, 23, n=8, max_tokens=30), asks(*range(11))
    closed.append(engine)
    for ask in stored_before:
        served(engine, [ask])
    engine.reset_prefix_cache()
    for i, ask in enumerate(running):
        add(engine, f"runs-{i}", ask)
    engine.step()
    hold_loads(engine)
    for i, ask in enumerate(stored_before):
        add(engine, f"waits-{i}", ask)
    for _ in range(20):
        engine.step()
    assert stored(engine).num_waiting(0) == SEQS - len(running) == 2
    assert engine.scheduler.stats().num_preemptions == 0
    engine.abort([f"{kind}-{i}" for kind, n in (("runs", 4), ("waits", 11)) for i in range(n)])


def test_requests_with_one_prefix_load_it_once(closed):
    engine, wanted = engine_with(), asks(0, 0, 0, max_tokens=2)
    closed.append(engine)
    served(engine, wanted)
    engine.reset_prefix_cache()
    assert differences(served(engine, wanted), expected(wanted)) == []
    assert counts(engine).num_hit_tokens == 36


def test_a_load_that_does_not_come_is_given_up(closed, caplog):
    engine, wanted = engine_with(), asks(0)
    closed.append(engine)
    served(engine, wanted)
    engine.reset_prefix_cache()
    stored(engine).load_seconds = 0.05
    late = hold_loads(engine)
    assert differences(serve(engine, wanted).answers, expected(wanted)) == []
    assert late and counts(engine).num_failed_loads == 1 and "did not come within 0.05 s" in caplog.text
    assert counts(engine).num_hit_tokens == 0


@pytest.mark.parametrize("how", ["abort", "finish"])
def test_an_ended_request_leaves_nothing_of_its_load(closed, how):
    engine = engine_with()
    closed.append(engine)
    served(engine, asks(0))
    engine.reset_prefix_cache()
    hold_loads(engine)
    (request,) = add(engine, "a", asks(0)[0])
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_KV and engine.pool.num_free_pages < 30
    if how == "abort":
        engine.abort("a")
    else:
        engine.finish(request, "stop")
    assert_empty(engine)
    del stored(engine).store.load  # the next loads do
    engine.sleep()
    engine.wake_up()
    poison(engine)
    assert differences(served(engine, asks(0, 1)), expected(asks(0, 1))) == []


def test_a_page_that_is_reused_before_it_is_saved_is_left_out(closed):
    engine, wanted = engine_with(), asks(*range(6))
    closed.append(engine)
    pages, save = stored(engine), stored(engine).store.save
    pages.store.save = lambda hashes, kv: object()  # saves that never end, so that pages queue up
    assert differences(serve(engine, wanted).answers, expected(wanted)) == []
    assert pages.num_unsaved > engine.pool.num_pages, "some of these pages hold other tokens by now"
    pages.store.save = save
    pages._saves.clear()
    settle(engine)
    engine.reset_prefix_cache()
    assert differences(served(engine, wanted), expected(wanted)) == []
    assert counts(engine).num_hit_tokens


class Saves:
    """A store that keeps what it is asked to save under way, and a runner that takes pages: `groups` has whose they were."""

    def __init__(self):
        self.groups: list[int] = []
        self.jobs: list[Job] = []

    def stats(self):
        return []

    def lookup(self, hashes, shared=False):
        return 0

    def save(self, hashes, pages):
        self.jobs.append(Job("save", hashes, pages))
        return self.jobs[-1]

    def take_pages(self, pages, group):
        self.groups.append(group)
        return pages

    def poll(self, timeout):
        """The oldest ends."""
        return [(self.jobs.pop(0), True)]


def pages_of_two_groups() -> tuple[StoredPages, Saves]:
    saves: Any = Saves()
    pools: Any = [SimpleNamespace(num_pages=64, page_size=4, holds=lambda page, hash_: True) for _ in range(2)]
    pages = StoredPages(saves, PageLayout(1, 1, 4, 8, jnp.float32), saves, ("", ""), KVStoreStats(), SavePace(always=True))
    pages.attach(pools, cast(Any, SimpleNamespace(composer=SimpleNamespace())))
    for group, pool in enumerate(pools):
        pool.journal.extend((page, b"%d %d" % (group, page)) for page in range(40))
    return pages, saves


def test_groups_take_turns_to_save():
    """While pages are made faster than a store keeps them."""
    pages, saves = pages_of_two_groups()
    pages.save()
    for _ in range(6):
        pages.poll()
        pages.save()
    assert len(saves.groups) == MAX_SAVES + 6 and abs(saves.groups.count(0) - saves.groups.count(1)) <= 1


def test_pages_of_who_is_preempted_are_saved_before_other_groups():
    pages, saves = pages_of_two_groups()
    request = Request("preempted", [1], SamplingParams())
    request.hash_chain[:] = [b"root", *(b"1 %d" % page for page in range(30, 30 + TRANSFER_PAGES + 2))]
    cast(Any, pages).pace = SimpleNamespace(load_is_faster=True)
    pages.preempting(request)
    assert saves.groups == [1, 1] and [page for job in saves.jobs for page in job.pages][: TRANSFER_PAGES + 2] == list(
        range(30, 30 + TRANSFER_PAGES + 2)
    )


def test_a_conversation_loses_its_last_pages_first(closed):
    """Of two, for one and a half of which there is room, the first keeps a beginning."""
    engine = engine_with("host:16KiB")  # 16 pages
    closed.append(engine)
    chains = []
    for ask in asks(0, 1):
        (request,) = add(engine, "a", ask)
        run(engine)
        settle(engine)
        chains.append(request.hash_chain[1:13])
    store = stored(engine).store
    wait_for(lambda: store._jobs.empty() and store.lookup(chains[1]) == 12)
    assert store.lookup(chains[0]) == 4


def test_two_engines_share_a_folder_and_it_survives_restarts(tmp_path, closed):
    wanted, store = asks(*range(4)), f"host:64KiB,disk:{tmp_path}:16MiB"
    first = engine_with(store, weights_id=NAME, pool_pages=100)
    closed.append(first)
    served(first, wanted)
    for name, num_hits in ((NAME, 4 * 36), ("others", 0), (None, 0)):
        engine = engine_with(store, weights_id=name, pool_pages=100)  # no request is preempted
        closed.append(engine)
        assert differences(served(engine, wanted), expected(wanted)) == []
        assert counts(engine).num_hit_tokens == num_hits


def test_a_reset_of_the_prefix_cache_leaves_the_store_unless_it_is_told(tmp_path, closed):
    store, wanted = f"disk:{tmp_path}:16MiB", asks(0, 1)
    first = engine_with(store, weights_id=NAME)
    closed.append(first)
    served(first, wanted)
    (waiting,) = add(first, "x", asks(0)[0])  # its hash chain begins anew, too
    hits = counts(first).num_hit_tokens
    assert first.reset_prefix_cache(reset_external=True)
    run(first)
    settle(first)
    assert waiting.output_token_ids == expected(asks(0))["0"].tokens and counts(first).num_hit_tokens == hits
    second = engine_with(store, weights_id=NAME)
    closed.append(second)
    assert differences(served(second, wanted), expected(wanted)) == []
    assert counts(second).num_hit_tokens == 2 * 36, "another engine finds what was there"
    num_hits = []
    for reset_external in (False, True, False):  # what it saves since then it finds itself
        assert first.reset_prefix_cache(reset_external)
        before = counts(first).num_hit_tokens
        assert differences(served(first, wanted), expected(wanted)) == []
        num_hits.append(counts(first).num_hit_tokens - before)
    assert num_hits[1:] == [0, 2 * 36] and num_hits[0] >= 36
    (running,) = add(first, "y", asks(0)[0])
    while running.status is not RequestStatus.RUNNING:
        first.step()
    assert not first.reset_prefix_cache(reset_external=True), "it holds pages"
    run(first)
    assert_empty(first)


@pytest.mark.parametrize("in_flight", ["refuse", "recompute", "keep"])
def test_no_page_of_old_weights_is_loaded(tmp_path, closed, in_flight):
    """Also where another engine that was given other weights saved pages for its own."""
    store, wanted = f"disk:{tmp_path}:16MiB", asks(0, 1)
    engines = [engine_with(store, weights_id=NAME) for _ in range(2)]
    closed += engines
    for engine in engines:
        served(engine, wanted)
    engines[0].reset_prefix_cache()
    if in_flight != "refuse":
        hold_loads(engines[0])
        add(engines[0], "x", asks(0)[0])
        engines[0].step()
        assert stored(engines[0]).is_awaited
    hits = counts(engines[0]).num_hit_tokens
    engines[0].update_params(other_weights(), in_flight)
    assert not stored(engines[0]).is_awaited
    engines[0].abort("x")
    right = serve(make_engine(other_weights(), bucket_plan=ONE_BUCKET), wanted).answers
    assert differences(served(engines[0], wanted), right) == []
    assert counts(engines[0]).num_hit_tokens == hits
    num_read = counts(engines[1]).tiers[0].pages_read
    engines[1].update_params(dummy_model())  # its first update, as that of the other engine
    assert differences(served(engines[1], wanted), expected(wanted)) == []
    assert counts(engines[1]).tiers[0].pages_read == num_read


def test_a_request_whose_logits_are_not_numbers_is_not_kept(closed):
    """Its pages are dropped from the store as from the prefix cache."""
    engine = engine_with()
    closed.append(engine)
    served(engine, asks(0))
    (request,) = add(engine, "bad", asks(0)[0])
    while request.status is not RequestStatus.RUNNING:
        engine.step()
    runner: Any = engine.runner
    runner.state.kv_pages[:] = [jnp.full_like(pages, jnp.nan) for pages in runner.state.kv_pages]
    run(engine)
    assert request.finish_reason == "error"
    assert stored(engine).store.lookup(request.hash_chain[1:2]) == 0
    engine._make_host_state(30)
    engine.runner.reset()
    assert differences(served(engine, asks(0)), expected(asks(0))) == []


def test_requests_lose_nothing_by_a_step_that_breaks_off(closed):
    engine, wanted = engine_with(), asks(0, 1)
    closed.append(engine)
    served(engine, wanted)
    engine.reset_prefix_cache()
    add(engine, "a", wanted[0])
    engine.step()
    runner: Any = engine.runner
    fetch, runner.fetch = runner.fetch, None
    with pytest.raises(TypeError):
        for _ in range(50):
            engine.step()
    runner.fetch = fetch
    assert_empty(engine)
    assert differences(served(engine, wanted), expected(wanted)) == []


@pytest.mark.parametrize("pool_pages", [30, 14])
def test_preempted_requests_load_what_they_had(closed, pool_pages):
    wanted = [*asks(*range(3), n=20, max_tokens=26), *asks(4, n=9, prompt_logprobs=1)]
    engine = engine_with(pool_pages=pool_pages)
    closed.append(engine)
    first = serve(engine, wanted)
    assert differences(first.answers, expected(wanted)) == []
    assert first.stats.num_preemptions or pool_pages > 14
    settle(engine)
    engine.reset_prefix_cache()
    assert differences(serve(engine, wanted).answers, expected(wanted)) == []
    assert counts(engine).num_hit_tokens


def test_scored_tokens_are_computed(closed):
    engine, wanted = engine_with(), asks(0, prompt_logprobs=1)
    closed.append(engine)
    served(engine, asks(0))
    engine.reset_prefix_cache()
    assert differences(served(engine, wanted), expected(wanted)) == []


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(closed):
    engine = make_engine(
        dummy_model(), bucket_plan=ONE_BUCKET, kv_store=HOST, pool_pages=30, warm_up="first_use", compile_anew="all"
    )
    closed.append(engine)
    engine.runner.warm_up()
    before = compile_counts().programs
    engine.add_request("a", prompt(40), SamplingParams(max_tokens=5))
    for _ in range(2):
        while engine.has_unfinished_requests():
            engine.step()
        settle(engine)
        engine.reset_prefix_cache()
        engine.add_request("b", prompt(40), SamplingParams(max_tokens=5))
    engine.abort("b")
    assert compile_counts().programs == before


def test_without_a_store_there_is_nothing_of_it():
    engine = engine_with(None)
    assert engine.stored_pages is None and engine.pool.journal is None and engine.stats.kv_store is None
    assert not {"take", "put"} & set(engine.runner.programs.keys)


def test_a_store_that_fails_at_random_changes_no_answer(closed, tmp_path):
    """A few dozen requests; tests/engine/test_store_fuzz.py has thousands."""
    fuzz, engine = Fuzz(), engine_with(pool_pages=40)
    closed.append(engine)
    pages = stored(engine)
    pages.store.close()
    tiers = [HostTier(pages._layout, 20 << 10), DiskTier(pages._layout, tmp_path, 400 << 10)]
    pages.store, pages.load_seconds = TieredStore([Flaky(tier, i) for i, tier in enumerate(tiers)]), 0.02
    converse(fuzz, engine, 60, random.Random(1))
    assert fuzz.num_hit_tokens and fuzz.num_failed_loads and fuzz.wrong() == []
