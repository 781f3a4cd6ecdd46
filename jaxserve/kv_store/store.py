"""The store of pages that an engine asks: jobs that load and save pages by hash, and the thread that carries them out.

Owns the interface, KVStore, and TieredStore, whose pages lie in one tier or in several. Knows nothing of devices.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.kv_store.disk import DiskTier
from jaxserve.kv_store.host import HostTier
from jaxserve.kv_store.peers import PeerTier
from jaxserve.kv_store.spec import TierSpec
from jaxserve.kv_store.tier import PageLayout, Tier, TierStats

logger: logging.Logger = logging.getLogger("jaxserve")

CLOSE_SECONDS = 10.0  # in which pages that wait to be written are, when a store is closed
REFRESH_SECONDS = 5.0  # between looks for pages of other processes, which are taken when there is nothing else to do
REFRESH_SHARE = 0.005  # of a processor, at most, for such looks: a walk of a folder of a million pages takes seconds of it


@dataclass(eq=False, slots=True)
class Job:
    """A load or a save that was asked for.

    kind: "load" or "save"; the store's own are "touch", "forget" and "stop".
    hashes: of consecutive pages.
    pages: [at least as many as hashes, *PageLayout.shape]. A load writes them, a save reads them.
    num_done: pages of a load that have come, from the first on. What stands in the others is nothing.
    wanted: set to False by who asked and needs no more of a load, which then stops at the next page.
    told: another process has said that it keeps these pages, so that a load tries tiers that do not know of them.
    seconds: of a processor, that a save has taken.
    """

    kind: str
    hashes: Sequence[bytes]
    pages: Any = None
    num_done: int = 0
    wanted: bool = True
    told: bool = False
    seconds: float = 0.0


class KVStore(Protocol):
    """Pages by hash. Calls return at once but for `close` and a `poll` with a timeout; what they begin ends in `poll`. One thread
    calls them."""

    def lookup(self, hashes: Iterable[bytes], *, shared: bool = False) -> int:
        """How many of these, from the first on, the store seems to have. It asks for no hash behind the first that it lacks.
        shared: counts what other processes find too."""
        ...

    def load(
        self,
        hashes: Sequence[bytes],
        into: np.ndarray,  # [at least as many, *PageLayout.shape]
        *,
        told: bool = False,
    ) -> Job:
        """Begins to copy pages into `into`, which the job then owns. told: see `Job`."""
        ...

    def save(self, hashes: Sequence[bytes], pages: Any) -> Job:
        """Begins to keep pages, as copies. Those of a chain are in order; the last of them are dropped first.
        pages: an array as that of `load`; one of a device is waited for, but not here."""
        ...

    def poll(self, timeout: float = 0.0) -> list[tuple[Job, bool]]:
        """Jobs that have ended since the last call, each with whether all of its pages were loaded or kept. Waits up to `timeout`
        seconds for the first."""
        ...

    def touch(self, hashes: Sequence[bytes]) -> None:
        """These pages of a chain were used, wherever they lay: behind all others the last of them is the first to go."""
        ...

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These pages are wrong: from now on they are not found."""
        ...

    def stats(self) -> list[TierStats]:
        """The account of each tier, nearest first."""
        ...

    def close(self, seconds: float = CLOSE_SECONDS) -> int:
        """Ends the store; what waits to be kept is, within so many seconds. At most how many pages were not; 0 if called again."""
        ...


_LOADS_FIRST = {"load": 0, "save": 1, "touch": 1, "forget": 1, "stop": 2}


class TieredStore:
    """Tiers, nearest first. A page is written to all of them, and read from the nearest that has it; those nearer get a copy."""

    def __init__(self, tiers: Sequence[Tier]):
        self._tiers = tuple(tiers)
        self._jobs: queue.PriorityQueue[tuple[int, int, Job]] = queue.PriorityQueue()
        self._ended: queue.SimpleQueue[tuple[Job, bool]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._forgotten: Counter[bytes] = Counter()  # how often, of pages that are not dropped yet; changed under the lock
        self._saving = 0  # pages of the save that is carried out
        self._has_failed = False
        self._is_closed = False
        self._refresh_at = time.monotonic() + REFRESH_SECONDS
        self._thread = threading.Thread(target=self._run, name="jaxserve-kv-store", daemon=True)
        self._thread.start()

    def lookup(self, hashes: Iterable[bytes], *, shared: bool = False) -> int:
        """As `KVStore.lookup`."""
        found, tiers = 0, [tier for tier in self._tiers if tier.is_shared] if shared else self._tiers
        for hash_ in hashes:
            if hash_ in self._forgotten or not any(tier.contains(hash_) for tier in tiers):
                break
            found += 1
        return found

    def load(
        self,
        hashes: Sequence[bytes],
        into: np.ndarray,  # [at least as many, *PageLayout.shape]
        *,
        told: bool = False,
    ) -> Job:
        """As `KVStore.load`. Loads come before saves."""
        return self._begin(Job("load", hashes, into, told=told))

    def save(self, hashes: Sequence[bytes], pages: Any) -> Job:
        """As `KVStore.save`."""
        return self._begin(Job("save", hashes, pages))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """As `KVStore.touch`."""
        self._begin(Job("touch", hashes))

    def forget(self, hashes: Iterable[bytes]) -> None:
        """As `KVStore.forget`."""
        hashes = list(hashes)
        with self._lock:
            self._forgotten.update(hashes)
        self._begin(Job("forget", hashes))

    def _begin(self, job: Job) -> Job:
        self._jobs.put((_LOADS_FIRST[job.kind], next(self._numbers), job))
        return job

    def poll(self, timeout: float = 0.0) -> list[tuple[Job, bool]]:
        """As `KVStore.poll`."""
        ended = []
        if not timeout and self._ended.empty():
            return ended
        try:
            if timeout:
                ended.append(self._ended.get(timeout=timeout))
            while True:
                ended.append(self._ended.get_nowait())
        except queue.Empty:
            return ended

    def stats(self) -> list[TierStats]:
        """As `KVStore.stats`."""
        return [tier.stats for tier in self._tiers]

    def close(self, seconds: float = CLOSE_SECONDS) -> int:
        """As `KVStore.close`."""
        if self._is_closed:
            return 0
        self._is_closed = True
        stop = self._begin(Job("stop", ()))
        self._thread.join(seconds)
        for tier in self._tiers:
            tier.close()
        if not self._thread.is_alive():
            return 0
        num_lost = self._saving
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()[2]) is not stop:
                num_lost += len(job.hashes) * (job.kind == "save")
        self._begin(stop)  # behind the job that is carried out
        return num_lost

    # -- the thread

    def _next_job(self) -> Job:
        """Waits for it. Meanwhile the tiers look for what others have written."""
        while True:
            wait = self._refresh_at - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return self._jobs.get(timeout=wait)[2] if wait > 0 else self._jobs.get_nowait()[2]
            begun = time.thread_time()
            for tier in self._tiers:
                tier.refresh()
            busy = time.thread_time() - begun
            self._refresh_at = time.monotonic() + max(REFRESH_SECONDS, busy / REFRESH_SHARE)

    def _run(self) -> None:
        while (job := self._next_job()).kind != "stop":
            try:
                if job.kind == "load":
                    self._load(job)
                elif job.kind == "save":
                    self._ended.put((job, self._save(job)))
                elif job.kind == "touch":
                    self._touch(job.hashes)
                else:
                    self._drop(job)
            except Exception as error:  # a page that fails is one that is not there
                if not self._has_failed:
                    logger.exception("kv_store: a %s failed: %r (further ones are not logged)", job.kind, error)
                self._has_failed, self._saving = True, 0
                self._ended.put((job, False))

    def _load(self, job: Job) -> None:
        copies: list[tuple[int, int]] = []  # (page, tiers that lack it)
        for i, hash_ in enumerate(job.hashes):
            if not job.wanted:
                break
            level = self._read(hash_, job.pages[i], job.told)
            if level is None:
                break
            job.num_done = i + 1
            copies += [(i, level)] if level else []
        self._ended.put((job, job.num_done == len(job.hashes)))
        for i, level in reversed(copies):
            if job.wanted:
                self._write(job.hashes[i], job.pages[i], self._tiers[:level])
        self._touch(job.hashes[: job.num_done])

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for hash_ in reversed(hashes):  # a chain without its first page is of no use: its last one goes first
            for tier in self._tiers:
                tier.touch(hash_)

    def _read(self, hash_: bytes, out: np.ndarray, told: bool) -> int | None:
        """Which tier has given the page; None: none has."""
        if hash_ in self._forgotten:
            return None
        for level, tier in enumerate(self._tiers):
            start = time.perf_counter()
            if (tier.contains(hash_) or told) and tier.read(hash_, out):
                stats = tier.stats
                stats.pages_read += 1
                stats.bytes_read += out.nbytes
                stats.read_seconds += time.perf_counter() - start
                return level
        return None

    def _save(self, job: Job) -> bool:
        begun = time.thread_time()
        pages = np.asarray(job.pages)  # waits for the device
        self._saving = len(job.hashes)
        last_first = reversed(list(enumerate(job.hashes)))  # as after a load
        kept = [self._write(hash_, pages[i], self._tiers) for i, hash_ in last_first if hash_ not in self._forgotten]
        job.pages, self._saving, job.seconds = None, 0, time.thread_time() - begun
        return all(kept)

    def _write(self, hash_: bytes, page: np.ndarray, tiers: Sequence[Tier]) -> bool:
        """Whether all of `tiers` keep the page."""
        ok = True
        for tier in tiers:
            start = time.perf_counter()
            if not tier.write(hash_, page):
                ok = False
                continue
            tier.stats.write_seconds += time.perf_counter() - start
        return ok

    def _drop(self, job: Job) -> None:
        for hash_ in job.hashes:
            for tier in self._tiers:
                tier.forget(hash_)
        with self._lock:
            self._forgotten.subtract(job.hashes)
            self._forgotten = +self._forgotten


def make_store(specs: Sequence[TierSpec], layout: PageLayout) -> TieredStore:
    """The store that the option kv_store names, of pages of this layout. ValueError: a tier can't be had."""
    return TieredStore([_make_tier(spec, layout) for spec in specs])


def _make_tier(spec: TierSpec, layout: PageLayout) -> Tier:
    if spec.kind == "host":
        return HostTier(layout, spec.max_bytes)
    if spec.kind == "disk":
        return DiskTier(layout, spec.place, spec.max_bytes)
    return PeerTier(layout, spec.kind, spec.place, spec.max_bytes)
