"""The store: jobs by hash over one tier or several, on a thread that no failure ends."""

import numpy as np
import pytest

from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.spec import parse_kv_store
from jaxserve.kv_store.store import TieredStore, make_store
from tests.kv_store.pages import LAYOUT, empty, hash_of, page_of


def hashes(*numbers):
    return [hash_of(i) for i in numbers]


def ended(store, job):
    """Whether the job succeeded, once it has ended."""
    while True:
        for other, ok in store.poll(10.0):
            if other is job:
                return ok


def save(store, *numbers):
    return ended(store, store.save(hashes(*numbers), np.stack([page_of(i) for i in numbers])))


def host(num_pages):
    return HostTier(LAYOUT, num_pages * LAYOUT.page_bytes)


@pytest.fixture
def store(tmp_path):
    made = make_store(parse_kv_store(f"host:{4 * LAYOUT.page_bytes}B,disk:{tmp_path}:1MiB"), LAYOUT)
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_what_was_saved_is_found_and_loaded(store):
    assert save(store, 0, 1, 2)
    assert store.lookup(hashes(0, 1, 9, 2)) == 2 and store.lookup(hashes(9)) == 0
    into = empty(4)
    job = store.load(hashes(0, 1, 2), into)
    assert ended(store, job) and job.num_done == 3
    np.testing.assert_array_equal(into[:3], np.stack([page_of(i) for i in range(3)]))


def test_a_load_ends_at_the_first_page_that_is_missing(store):
    save(store, 0, 2)
    job = store.load(hashes(0, 1, 2), empty(3))
    assert not ended(store, job) and job.num_done == 1


def test_what_the_host_tier_evicted_comes_from_the_folder_and_is_in_memory_again(store):
    save(store, *range(6))
    memory, folder = store._tiers
    assert not memory.contains(hash_of(0)) and store.lookup(hashes(0)) == 1
    assert ended(store, store.load(hashes(0), empty(1)))
    assert ended(store, store.load(hashes(0), empty(1)))
    assert folder.stats.pages_read == 1 and memory.stats.pages_read == 1 and memory.contains(hash_of(0))
    assert memory.stats.bytes_read == LAYOUT.page_bytes and folder.stats.read_seconds > 0


def test_forgotten_pages_are_not_found_at_once_nor_later(store):
    save(store, 0, 1)
    store.forget(hashes(0))
    assert store.lookup(hashes(0)) == 0 and store.lookup(hashes(1)) == 1
    assert not ended(store, store.load(hashes(0), empty(1)))
    assert save(store, 2) and store.lookup(hashes(0)) == 0
    assert save(store, 0) and store.lookup(hashes(0)) == 1


class Broken(HostTier):
    """A tier that fails as no tier should."""

    def read(self, hash_, out):
        raise RuntimeError("broken")


def test_a_tier_that_raises_ends_its_job_and_no_other(caplog):
    store = TieredStore([Broken(LAYOUT, 4 * LAYOUT.page_bytes)])
    assert save(store, 0)
    for _ in range(2):
        job = store.load(hashes(0), empty(1))
        assert not ended(store, job) and job.num_done == 0
    assert save(store, 1) and caplog.text.count("a load failed: RuntimeError('broken')") == 1
    store.close()


def test_what_waits_to_be_kept_is_when_a_store_is_closed(tmp_path):
    made = make_store(parse_kv_store(f"disk:{tmp_path}:1MiB"), LAYOUT)
    for i in range(20):
        made.save(hashes(i), page_of(i)[None])
    made.close()
    again = make_store(parse_kv_store(f"disk:{tmp_path}:1MiB"), LAYOUT)
    assert again.lookup(hashes(*range(20))) == 20
    again.close()
