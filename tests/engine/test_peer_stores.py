"""Prefill and decode engines whose pages pass from memory to memory: tokens are those of one engine, whatever fails on the way."""

import random

import pytest

from jaxserve.kv_store import peers
from jaxserve.kv_store.transfer import TransferError
from jaxserve.request import StoredPrefix
from tests.dummy import Ask, assert_empty, poison
from tests.engine.storing import NAME, asks, counts, engine_with, settle, stored
from tests.engine.test_handover import PAGES, decode, prefill
from tests.kv_store.memory_transfer import MemoryTransfer
from tests.selection import exhaustive_unless


@pytest.fixture
def two(closed, monkeypatch):
    """A prefill engine and a decode engine that reads from it. Neither looks for what the other writes."""
    network = {}
    monkeypatch.setattr(peers, "NixlTransfer", lambda name: MemoryTransfer(name, network))
    monkeypatch.setattr(peers, "DOWN_SECONDS", 0.0)
    first = engine_with("nixl:127.0.0.1:0:1MiB", weights_id=NAME, pool_pages=100)
    closed.append(first)
    port = tier_of(first).port
    second = engine_with(f"nixl:127.0.0.1:0+127.0.0.1:{port}:1MiB", weights_id=NAME, pool_pages=100)
    closed.append(second)
    for engine in (first, second):
        tier_of(engine).refresh = lambda: None
        stored(engine).keep_seconds = 60.0
    return first, second


def tier_of(engine):
    (tier,) = stored(engine).store._tiers
    return tier


@pytest.mark.slow
def test_what_is_told_of_is_read_from_the_other_engines_memory(two):
    first, second = two
    (ask,) = asks(0)
    told = prefill(first, ask.prompt).stored_prefix
    assert told is not None and told.num_pages == PAGES + 1, "the last page too, which whoever decodes does not need"
    decode(second, ask, told)
    assert counts(second).num_hit_tokens == 4 * PAGES and counts(second).num_failed_loads == 0
    assert not tier_of(first)._leases


@pytest.mark.slow
def test_without_being_told_pages_are_found_by_the_news(two):
    first, second = two
    (ask,) = asks(0)
    prefill(first, ask.prompt)
    settle(first)
    type(tier_of(second)).refresh(tier_of(second))
    decode(second, ask, None)
    assert counts(second).num_hit_tokens == 4 * PAGES


@pytest.mark.slow
def test_a_prefill_engine_that_is_lost_is_done_without(two):
    first, second = two
    (ask,) = asks(0)
    told = prefill(first, ask.prompt).stored_prefix
    first.close()
    decode(second, ask, told)
    assert counts(second).num_hit_tokens == 0 and counts(second).num_failed_loads == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", exhaustive_unless(lambda seed: seed == 0, range(3)))
def test_whatever_fails_tokens_are_those_of_one_engine(two, seed):
    rng, (first, second) = random.Random(seed), two
    tier = tier_of(first)

    def trouble(_into):
        what = rng.random()
        if what < 0.1:
            raise TransferError("by chance")
        if what < 0.3:
            slot = rng.randrange(len(tier._blobs))
            for slot in rng.sample(sorted(tier._slots.values()), min(3, len(tier._slots))):
                tier._blobs[slot, rng.randrange(tier._blob_bytes)] ^= 1 << rng.randrange(8)
        if what > 0.9:
            tier._leases.clear()
            tier._written.clear()
            tier._slots.clear()  # all of them are free, and overwritten
            tier._free = list(range(len(tier._blobs)))
            tier._blobs[:] = rng.randrange(256)

    tier_of(second)._transfer.before_read = trouble
    for i in range(60):
        (ask,) = asks(rng.randrange(4), n=rng.choice([8, 17, 40]), max_tokens=3)
        told = prefill(first, ask.prompt, f"p{i}").stored_prefix
        if told is not None and rng.random() < 0.2:
            told = StoredPrefix(told.num_pages, bytes(32))
        poison(second)
        decode(second, Ask(ask.prompt, ask.params), told)
        if rng.random() < 0.5:
            second.reset_prefix_cache()
    assert_empty(first)
    assert counts(second).num_hit_tokens and tier_of(second).stats.num_failures
