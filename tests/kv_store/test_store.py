"""The store: jobs by hash over one tier or several, on a thread that no failure ends."""

import itertools
import threading
import time

import numpy as np
import pytest

from jaxserve.kv_store import store as stores
from jaxserve.kv_store.blob import blob_bytes
from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.spec import parse_kv_store
from jaxserve.kv_store.store import TieredStore, make_store
from tests.kv_store.pages import LAYOUT, empty, hash_of, page_of


def hashes(*numbers):
    return [hash_of(i) for i in numbers]


def ended(store, job):
    """Whether the job succeeded, once it has ended."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for other, ok in store.poll(10.0):
            if other is job:
                return ok
    raise AssertionError("a job that does not end")


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
    assert not memory.contains(hash_of(5)) and store.lookup(hashes(5)) == 1
    assert ended(store, store.load(hashes(5), empty(1)))
    assert ended(store, store.load(hashes(5), empty(1)))
    assert folder.stats.pages_read == 1 and memory.stats.pages_read == 1 and memory.contains(hash_of(5))
    assert memory.stats.bytes_read == LAYOUT.page_bytes and folder.stats.read_seconds > 0


def test_forgotten_pages_are_not_found_at_once_nor_later(store):
    save(store, 0, 1)
    store.forget(hashes(0))
    assert store.lookup(hashes(0)) == 0 and store.lookup(hashes(1)) == 1
    assert not ended(store, store.load(hashes(0), empty(1)))
    assert save(store, 2) and store.lookup(hashes(0)) == 0
    assert save(store, 0) and store.lookup(hashes(0)) == 1


class Held(HostTier):
    """A tier that drops and reads nothing until its gate opens."""

    def __init__(self, num_pages):
        super().__init__(LAYOUT, num_pages * LAYOUT.page_bytes)
        self.gates, self.num_read, self.num_dropped = [threading.Event(), threading.Event()], 0, 0

    def forget(self, hash_):
        assert self.gates[self.num_dropped].wait(120)
        self.num_dropped += 1
        super().forget(hash_)

    def read(self, hash_, out):
        self.num_read += 1
        assert self.gates[0].wait(120)
        return super().read(hash_, out)


def test_a_page_that_was_forgotten_twice_is_not_found_between():
    """Saved behind the first of two forgets that wait, it is not found while the second does."""
    tier = Held(4)
    store = TieredStore([tier])
    store.forget(hashes(0))
    job = store.save(hashes(0), page_of(0)[None])
    store.forget(hashes(0))
    tier.gates[0].set()
    assert ended(store, job) and store.lookup(hashes(0)) == 0
    tier.gates[1].set()
    assert save(store, 1, 0) and store.lookup(hashes(0)) == 1
    store.close()


def test_a_load_that_nobody_wants_stops_and_is_not_copied():
    far, near = Held(4), host(4)
    for i in range(3):
        far.write(hash_of(i), page_of(i))
    store = TieredStore([near, far])
    job = store.load(hashes(0, 1, 2), empty(3))
    deadline = time.monotonic() + 120
    while not far.num_read and time.monotonic() < deadline:
        time.sleep(0.001)
    job.wanted = False
    far.gates[0].set()
    assert not ended(store, job) and job.num_done == 1 and far.num_read == 1
    assert save(store, 9) and not near.contains(hash_of(0))
    store.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_of_a_chain_the_last_pages_go_first(tmp_path, kind):
    """Without its first page the rest of a chain is of no use."""
    bound = 4 * blob_bytes(LAYOUT)
    tier = host(4) if kind == "host" else DiskTier(LAYOUT, tmp_path, bound)
    store = TieredStore([tier])
    assert save(store, *range(8))
    assert store.lookup(hashes(*range(8))) == 4
    assert ended(store, store.load(hashes(*range(4)), empty(4)))
    assert save(store, 20)
    num_left = 3 if kind == "host" else 2  # a folder is emptied to nine tenths of its bound
    assert store.lookup(hashes(*range(4))) == num_left and store.lookup(hashes(20)) == 1
    store.close()


def test_pages_of_another_process_are_found_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "REFRESH_SECONDS", 0.01)
    mine, theirs = (TieredStore([DiskTier(LAYOUT, tmp_path, 1 << 20)]) for _ in range(2))
    assert save(theirs, 0)
    deadline = time.monotonic() + 120
    while not mine.lookup(hashes(0)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ended(mine, mine.load(hashes(0), empty(1)))
    for store in (mine, theirs):
        store.close()


class Walked(HostTier):
    """A tier whose look for pages of others takes a processor 2 ms or more. looks: (when it began, seconds of a processor)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.looks = []

    def refresh(self):
        began, busy = time.monotonic(), time.thread_time()
        while time.thread_time() - busy < 0.002:
            pass
        self.looks.append((began, time.thread_time() - busy))


def test_looks_for_pages_of_others_take_a_small_part_of_a_processor(monkeypatch):
    """However large a folder is."""
    monkeypatch.setattr(stores, "REFRESH_SECONDS", 0.001)
    monkeypatch.setattr(stores, "REFRESH_SHARE", 0.05)
    store = TieredStore([tier := Walked(LAYOUT, 4 * LAYOUT.page_bytes)])
    deadline = time.monotonic() + 120
    while len(tier.looks) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    store.close()
    assert len(tier.looks) >= 4
    for (began, busy), (following, _) in itertools.pairwise(tier.looks):
        assert following - began >= busy / 0.05


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
    assert made.close() == 0 and made.close() == 0
    again = make_store(parse_kv_store(f"disk:{tmp_path}:1MiB"), LAYOUT)
    assert again.lookup(hashes(*range(20))) == 20
    again.close()


def test_a_store_that_hangs_is_closed_in_time_and_says_what_it_lost():
    tier, gate = host(9), threading.Event()
    write, tier.write = tier.write, lambda hash_, page: gate.wait(120) and write(hash_, page)
    store = TieredStore([tier])
    for first in (0, 2, 4):
        store.save(hashes(first, first + 1), np.stack([page_of(first), page_of(first + 1)]))
    begun = time.monotonic()
    assert store.close(0.05) in (4, 6) and time.monotonic() - begun < 60
    gate.set()
    store._thread.join(120)
    assert not store._thread.is_alive() and store.close(0.05) == 0
    assert not tier.contains(hash_of(4)), "saves behind the one that hung are dropped"
