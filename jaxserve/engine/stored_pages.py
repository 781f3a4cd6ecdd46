"""KV that outlives its pages: what an engine saves to a store, and what it loads from there before it computes a prompt.

Owns the loads and saves under way, and the leases of pages that are loaded. Pages and hashes are the pool's, the store is
kv_store's, and the two programs that move pages are the runner's.

Saves need no lease: `take_pages` is dispatched behind the steps that write the pages and before any that may reuse them, and the
device runs in that order. So a page is saved if it is still registered under its hash when its batch is taken, and is left out if
not.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxserve.engine.runner_setup import package_version
from jaxserve.engine.save_pace import SavePace
from jaxserve.engine.stats import EngineStats, KVStoreStats
from jaxserve.engine.swap_pace import SwapPace
from jaxserve.execution.leading_runner import AnyRunner
from jaxserve.execution.page_transfer import MAX_SAVES, TRANSFER_PAGES
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.hosts.pulse import HostLostError
from jaxserve.kv_store.blob import MAGIC
from jaxserve.kv_store.spec import parse_kv_store
from jaxserve.kv_store.store import CLOSE_SECONDS, Job, KVStore, make_store
from jaxserve.kv_store.tier import PageLayout
from jaxserve.request import EngineOutput, Request, RequestStatus, StoredPrefix
from jaxserve.scheduling.page_pool import PagePool, extend_hash_chain, page_hash
from jaxserve.scheduling.scheduler import Scheduler

logger: logging.Logger = logging.getLogger("jaxserve")

LOAD_SECONDS = 5.0  # after which a load is given up and tokens that have not come are computed
KEEP_SECONDS = 5.0  # that the last output of a request may wait for its prompt's pages to be stored
MAX_USED = 1024  # chains whose use the store is not told yet
UNSAVED_POOLS = 8  # pages that wait to be saved, in pools: those behind were used for other tokens long ago
IDLE_WAIT = 0.02  # seconds that an idle step waits for a load
TAKE_RATE = 2.6e9  # bytes a second that `take` is taken to copy on a CPU: 1 MiB in 0.4 ms, where its caches do not have them


@dataclass(frozen=True, slots=True)
class _Load:
    """Pages on their way into the pool of a group. pages: the cached ones before them, and those that are loaded, all leased."""

    group: int  # of devices
    hashes: list[bytes]
    pages: list[int]
    num_hits: int
    begun: float  # of time.monotonic, as is the deadline
    deadline: float
    waiting: list[Request] = field(default_factory=list)  # who asked, and others that need some of these pages

    def add(self, request: Request) -> None:
        """It waits too, from now on."""
        self.waiting.append(request)
        if request.metrics is not None and request.metrics.kv_load_time is None:
            request.metrics.kv_load_time = time.monotonic()

    def release(self) -> list[Request]:
        """Those who wait; the load is over."""
        for request in self.waiting:
            if request.metrics is not None and request.metrics.kv_loaded_time is None:
                request.metrics.kv_loaded_time = time.monotonic()
        return self.waiting


class StoredPages:
    """Loads and saves the pages of one engine. Only the engine's thread calls it.

    load_seconds: after which a load is given up. save_pace: which requests' pages are saved. shares_cores: whether steps run on the
    cores on which the store's thread and `take` do, so that their time is a cost. That of `take` is estimated.
    """

    def __init__(
        self,
        store: KVStore,
        layout: PageLayout,
        runner: AnyRunner,
        root_names: tuple[str, str],
        stats: KVStoreStats,
        save_pace: SavePace,
        *,
        shares_cores: bool = True,
    ):
        self.store: KVStore = store
        self.save_pace: SavePace = save_pace
        self._shares_cores = shares_cores
        self.load_seconds: float = LOAD_SECONDS
        self.keep_seconds: float = KEEP_SECONDS
        self._layout, self._runner, self._root_names = layout, runner, root_names
        self._stats = stats
        stats.tiers = tuple(store.stats())
        self._loads: dict[Job, _Load] = {}
        self._late: set[Job] = set()  # given up, but perhaps not ended in the store: until then no load begins behind them
        self._has_warned_late = self._has_warned_other = self._is_closed = False

    def attach(self, pools: Sequence[PagePool], scheduler: Scheduler) -> None:
        """Works for these pools, one of each group of devices, and this scheduler from now on. All are new. What was under way is
        forgotten."""
        for job in self._loads:
            job.wanted = False
        self._pools, self._scheduler, self._page_size = pools, scheduler, pools[0].page_size
        self._loads = {}
        self._loading: dict[bytes, _Load] = {}  # by each hash on its way
        self._saves: dict[Job, list[bytes]] = {}
        self._saving: set[bytes] = set()
        self._used: deque[list[bytes]] = deque(maxlen=MAX_USED)  # chains of requests that ended
        self._keeping: dict[Request, float] = {}  # ended, their last output waits for their pages: until this time.monotonic
        self._next_to_save = 0  # the group whose turn it is, if it has pages enough
        self._unsaved: list[deque[tuple[int, bytes]]] = [deque(maxlen=UNSAVED_POOLS * pool.num_pages) for pool in pools]
        self.pace: SwapPace = SwapPace(self._page_size)
        for pool in pools:
            pool.journal, pool.root_names = [], self._root_names
        scheduler.composer.kv_loads = self

    def rename(self) -> None:
        """Pages have names from now on that nobody has used. `Scheduler.change_weights` begins the chains of requests anew."""
        renamed = secrets.token_hex(16)
        self._root_names = f"{self._root_names[0]} {renamed}", f"{self._root_names[1]} {renamed}"
        for pool in self._pools:
            pool.root_names = self._root_names

    @property
    def is_awaited(self) -> bool:
        """Whether pages are on their way for which a request waits."""
        return bool(self._loads or self._keeping and self._saves)

    @property
    def is_saving(self) -> bool:
        """Whether pages wait to be saved, or to be kept by the store."""
        return bool(self._saves or self.num_unsaved)

    @property
    def num_unsaved(self) -> int:
        """Pages that wait to be saved."""
        return sum(map(len, self._unsaved))

    # -- loads

    def begin(self, request: Request, hits: list[int], max_pages: int, group: int) -> bool:
        """As `KVLoads.begin`."""
        if request.saves_kv is None:
            request.saves_kv = self._is_worth_saving(request, hits, max_pages, group)
        if request.kv_sought or len(hits) >= max_pages:
            return False
        pool, page_size, chain, num_hits = self._pools[group], self._page_size, request.hash_chain, len(hits)
        extend_hash_chain(chain, request.token_ids, page_size, num_hits + 1)
        under_way = self._loading.get(chain[num_hits + 1])
        if under_way is not None:
            under_way.add(request)
            return True
        if self._late:
            return False  # the store is slow: it would wait behind that load
        if request.num_preemptions and not self.pace.chooses_load():
            request.kv_sought = True
            return False  # it is computed sooner
        if pool.num_free_pages < -(-len(request.token_ids) // page_size) - num_hits:
            return False  # it could not be admitted with them
        num_found = self.store.lookup(self._hashes_behind(request, num_hits, max_pages))
        num_told = min(self._num_told(request), max_pages) - num_hits
        told, num_found = num_told > num_found, max(num_told, num_found)
        if not num_found:
            request.kv_sought = True
            self._stats.num_queried_tokens += (max_pages - num_hits) * page_size
            return False
        pages = pool.lease(num_found, hits)
        if pages is None:
            return False
        request.kv_sought, request.stored_prefix = True, None
        self._stats.num_queried_tokens += (max_pages - num_hits) * page_size
        hashes = chain[num_hits + 1 : num_hits + 1 + num_found]
        num_rows = -(-num_found // TRANSFER_PAGES) * TRANSFER_PAGES
        job = self.store.load(hashes, np.empty((num_rows, *self._layout.shape), self._layout.dtype), told=told)
        now = time.monotonic()
        load = _Load(group, hashes, pages, num_hits, now, now + self.load_seconds)
        load.add(request)
        self._loads[job] = load
        self._loading.update(dict.fromkeys(hashes, load))
        return True

    def _is_worth_saving(self, request: Request, hits: list[int], max_pages: int, group: int) -> bool:
        """Whether to save what the request computes; then those of `hits` are saved too that were not."""
        pace, chain, num_hits = self.save_pace, request.hash_chain, len(hits)
        if not request.keeps_prompt and (pace.has_skipped or pace.share < 1.0):
            extend_hash_chain(chain, request.token_ids, self._page_size, num_hits)
            start = num_hits * self._page_size
            first = page_hash(chain[num_hits], request.token_ids[start : start + self._page_size])
            num_missed = pace.missed(self._hashes_behind(request, num_hits, max_pages))
            pace.hit(num_missed * max((self.pace.compute_seconds or 0.0) - (self.pace.load_seconds or 0.0), 0.0))
            if not num_missed and not pace.chooses(first) and not self.store.lookup([first]):
                return False
        if pace.has_skipped and num_hits:
            num_stored = self.store.lookup(chain[1 : num_hits + 1])
            if num_stored < num_hits:
                known = self._saving.union(hash_ for _, hash_ in self._unsaved[group])
                entries = zip(hits[num_stored:], chain[num_stored + 1 :], strict=False)
                self._unsaved[group].extend(entry for entry in entries if entry[1] not in known)
        return True

    def num_waiting(self, group: int) -> int:
        """As `KVLoads.num_waiting`."""
        loads = (load for load in self._loads.values() if load.group == group)
        return sum(request.status is RequestStatus.WAITING_FOR_KV for load in loads for request in load.waiting)

    def _num_told(self, request: Request) -> int:
        """How many of the request's first pages another engine has stored, as whoever sent the request says. None if those are
        pages of other tokens or weights."""
        told, page_size = request.stored_prefix, self._page_size
        if told is None:
            return 0
        if told.num_pages * page_size <= request.num_prompt_tokens:
            extend_hash_chain(request.hash_chain, request.token_ids, page_size, told.num_pages)
            if request.hash_chain[told.num_pages] == told.last_hash:
                return told.num_pages
        request.stored_prefix = None
        self._stats.num_failed_loads += 1
        if not self._has_warned_other:
            self._has_warned_other = True
            logger.warning(
                "kv_store: pages that a prefill server has stored have other names here, so that prompts are computed again: "
                "prefill and decode servers need one version of jaxserve, the same files and page_size (further ones are counted)"
            )
        return 0

    def _hashes_behind(self, request: Request, num_hits: int, max_pages: int) -> Iterable[bytes]:
        """The hashes of the request's pages from `num_hits` on, each made when it is asked for."""
        for page in range(num_hits, max_pages):
            extend_hash_chain(request.hash_chain, request.token_ids, self._page_size, page + 1)
            yield request.hash_chain[page + 1]

    def poll(self, timeout: float = 0.0) -> None:
        """Takes in what the store has done, at the latest after `timeout` seconds, and gives up loads that are late."""
        for job, _ in self.store.poll(timeout):
            self._late.discard(job)
            if job in self._loads:
                self._arrive(job, job.num_done)
            if job.kind == "save":
                self._saving.difference_update(self._saves.pop(job, ()))
                self._count_cost(job.seconds if self._shares_cores else 0.0)
        if self._loads:
            now = time.monotonic()
            for job, load in list(self._loads.items()):
                if now > load.deadline:
                    self._warn_late(load)
                    self._late.add(job)
                    job.wanted = False
                    for request in load.waiting:
                        request.kv_sought = True  # none asks again until it has run: they would wait for one another's loads
                    self._arrive(job, job.num_done)

    def _arrive(self, job: Job, num_pages: int) -> None:
        """Writes the first pages of a load into the pool's, registers them, and lets its requests go on.

        The store may still write those behind, if the load is late.
        """
        load = self._loads[job]
        pool = self._pools[load.group]
        self._drain_journal()
        if all(request.finished for request in load.waiting):
            self._end(job)
            return
        pages = load.pages[load.num_hits : load.num_hits + num_pages]
        for start in range(0, num_pages, TRANSFER_PAGES):
            end = start + TRANSFER_PAGES
            self._runner.put_pages(pages[start:end], job.pages[start:end], load.group)
        for page, hash_ in zip(pages, load.hashes, strict=False):  # as many as came
            pool.register(page, hash_)
        assert pool.journal is not None
        pool.journal.clear()  # they are in the store
        if num_pages:
            seconds = time.monotonic() - load.begun
            self.pace.loaded(num_pages, seconds)
            gained = max(num_pages * (self.pace.compute_seconds or 0.0) - seconds, 0.0)
            self.save_pace.hit(gained)
            self._stats.hit_gain_seconds += gained
        self._stats.num_hit_tokens += num_pages * pool.page_size
        self._stats.num_failed_loads += num_pages < len(load.hashes)
        self._end(job)

    def _end(self, job: Job) -> None:
        """The load is over, whatever came of it."""
        load = self._loads.pop(job)
        for hash_ in load.hashes:
            if self._loading.get(hash_) is load:  # or else a later load has it too: of pages that the pool has forgotten meanwhile
                del self._loading[hash_]
        self._pools[load.group].end_lease(load.pages)
        for request in load.release():
            self._scheduler.kv_ready(request)

    def _give_up(self, job: Job) -> None:
        """Nobody needs the load any more."""
        job.wanted = False
        self._end(job)

    def _warn_late(self, load: _Load) -> None:
        if not self._has_warned_late:
            self._has_warned_late = True
            logger.warning(
                "kv_store: %d pages did not come within %g s: the rest is computed (further loads are counted, not logged)",
                len(load.hashes),
                self.load_seconds,
            )

    def drop_loads(self, *, all_of_them: bool) -> None:
        """Gives up the loads that nobody waits for any more, or all of them; those who wait compute their tokens."""
        for job, load in list(self._loads.items()):
            if all_of_them or all(request.finished for request in load.waiting):
                self._give_up(job)

    # -- saves

    def save(self, *, rest: bool = False) -> None:
        """Begins to save pages that were registered, TRANSFER_PAGES at a time, while less than MAX_SAVES batches are under way.

        Every step that was scheduled must have been dispatched. rest: pages that are fewer than a batch do not wait for more.
        """
        self._drain_journal()
        if not (self.num_unsaved or self._used):
            return
        least = 1 if rest or self._keeping else TRANSFER_PAGES
        while len(self._saves) < MAX_SAVES:
            ready = [group for group, unsaved in enumerate(self._unsaved) if len(unsaved) >= least]
            if not ready:
                break
            group = next((group for group in ready if group >= self._next_to_save), ready[0])  # groups take turns
            self._next_to_save = group + 1
            self._save_batch(group, self._unsaved[group])
        while self._used and all(len(unsaved) < TRANSFER_PAGES for unsaved in self._unsaved):  # behind the saves of their pages
            self.store.touch(self._used.popleft())

    def _save_batch(self, group: int, unsaved: deque[tuple[int, bytes]]) -> None:
        begun, take_seconds = time.thread_time(), 0.0
        batch: dict[bytes, int] = {}
        while unsaved and len(batch) < TRANSFER_PAGES:
            page, hash_ = unsaved.popleft()
            if self._pools[group].holds(page, hash_) and hash_ not in self._saving and not self.store.lookup([hash_]):
                batch[hash_] = page
        if batch:
            hashes = list(batch)
            self._saves[self.store.save(hashes, self._runner.take_pages(list(batch.values()), group))] = hashes
            self._saving.update(hashes)
            take_seconds = TRANSFER_PAGES * self._layout.page_bytes / TAKE_RATE if self._shares_cores else 0.0
        self._count_cost(time.thread_time() - begun + take_seconds)

    def _count_cost(self, seconds: float) -> None:
        self.save_pace.saved(seconds)
        self._stats.save_seconds += seconds

    def ran(self, num_tokens: int, seconds: float, *, of_prompts: bool) -> None:
        """A step of so many tokens has taken so long. of_prompts: most of them were prompts'."""
        self.save_pace.ran(seconds)
        self._stats.save_share = self.save_pace.share
        if of_prompts:
            self.pace.computed(num_tokens, seconds)

    def preempting(self, request: Request) -> None:
        """As `KVLoads.preempting`: what of its pages waits to be saved is saved at once, before they can be used for other tokens.
        As everywhere, at most MAX_SAVES batches are under way; pages that find no room in them are computed again."""
        if not self.pace.load_is_faster:
            return
        self._drain_journal()
        hashes = set(request.hash_chain[1:])
        if request.saves_kv is False:  # until now
            request.saves_kv = True
            for pool, unsaved in zip(self._pools, self._unsaved, strict=True):
                missing = (hash_ for hash_ in request.hash_chain[1:] if not self.store.lookup([hash_]))
                unsaved.extend((page, hash_) for hash_ in missing for page in pool.find([hash_]))
        for group, unsaved in enumerate(self._unsaved):
            own = [entry for entry in unsaved if entry[1] in hashes]
            unsaved.extendleft(reversed(own))  # where they stand twice, they are saved once
            for _ in range(0, len(own), TRANSFER_PAGES):
                if len(self._saves) < MAX_SAVES:
                    self._save_batch(group, unsaved)

    def end(self, request: Request) -> None:
        """The request has ended well: its pages are those that were used last."""
        chain = request.hash_chain[1:]
        if request.saves_kv is False:
            num_stored = self.store.lookup(chain)
            num_skipped = self.save_pace.skip(chain[num_stored:])
            self._stats.num_skipped_tokens += num_skipped * self._page_size
            chain = chain[:num_stored]
        if chain:
            self._used.append(chain)
        if not request.keeps_prompt:
            return
        extend_hash_chain(request.hash_chain, request.token_ids, self._page_size, self._num_prompt_pages(request))
        for hash_ in self._prompt_hashes(request):
            if not self.store.lookup([hash_], shared=True):  # saved never, or so long ago that the store has lost it
                for pool, unsaved in zip(self._pools, self._unsaved, strict=True):
                    unsaved.extend((page, hash_) for page in pool.find([hash_]))
        self._keeping[request] = time.monotonic() + self.keep_seconds

    def _num_prompt_pages(self, request: Request) -> int:
        return request.num_prompt_tokens // self._page_size

    def _prompt_hashes(self, request: Request) -> list[bytes]:
        return request.hash_chain[1 : self._num_prompt_pages(request) + 1]

    @property
    def is_keeping(self) -> bool:
        """Whether an output waits for pages to be stored."""
        return bool(self._keeping)

    def hold_back(self, outputs: list[EngineOutput]) -> tuple[list[EngineOutput], list[EngineOutput]]:
        """(outputs to deliver, those that wait until their request's prompt is stored). Requests whose output is in neither, since
        they were aborted, are waited for no longer. A request says in `stored_prefix` what is stored of it."""
        ready, waiting, now = [], [], time.monotonic()
        keeping, self._keeping = self._keeping, {}
        for output in outputs:
            request = output.request
            if request in keeping and not self._settle(request, late=now > keeping[request]):
                self._keeping[request] = keeping[request]
                waiting.append(output)
            else:
                ready.append(output)
        return ready, waiting

    def _settle(self, request: Request, *, late: bool) -> bool:
        """Whether as much of the prompt is stored as will be."""
        hashes = self._prompt_hashes(request)
        num_kept = self.store.lookup(hashes, shared=True)
        if any(hash_ in self._saving for hash_ in hashes[:num_kept]):
            num_kept = next(i for i, hash_ in enumerate(hashes) if hash_ in self._saving)  # in one tier, perhaps not in all
        if num_kept < len(hashes) and not late and (self.num_unsaved or hashes[num_kept] in self._saving):
            return False
        request.stored_prefix = StoredPrefix(num_kept, hashes[num_kept - 1]) if num_kept else None
        return True

    def _drain_journal(self) -> None:
        for pool, unsaved in zip(self._pools, self._unsaved, strict=True):
            assert pool.journal is not None
            if pool.journal:
                unsaved.extend(pool.journal)
                pool.journal.clear()

    def forget(self, hashes: Iterable[bytes]) -> None:
        """The pages of these hashes are wrong: they are dropped from the store, and loads of them are given up."""
        hashes = list(hashes)
        self.store.forget(hashes)
        for job, load in list(self._loads.items()):
            if not set(hashes).isdisjoint(load.hashes):
                self._give_up(job)

    def close(self) -> None:
        """Ends the store, behind what can be saved in CLOSE_SECONDS. Does nothing when called again."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(HostLostError):  # with the host its part of the pages is lost
            self.save(rest=True)
            while self.num_unsaved and time.monotonic() < deadline:
                self.poll(IDLE_WAIT)
                self.save(rest=True)
        num_lost = self.num_unsaved + self.store.close(max(deadline - time.monotonic(), 0.0))
        if num_lost:
            logger.warning("kv_store: up to %d pages were not saved within %g s of the end", num_lost, CLOSE_SECONDS)


def stored_pages(config: ResolvedConfig, runner: AnyRunner, weights_id: str | None, stats: EngineStats) -> StoredPages | None:
    """What the option kv_store asks for; None: nothing.

    weights_id: what names the weights to other engines; None: nobody else may use what this one saves. So it is too where
      jaxserve is not installed, and has no version to name. stats: get its counts.

    Raises:
      ValueError: a tier can't be had.
    """
    if config.engine.kv_store is None:
        return None
    pages, model = config.pages, config.model
    layout = PageLayout(model.num_layers, model.num_kv_heads, pages.page_size, pages.head_dim, pages.dtype)
    private = secrets.token_hex(16)
    of_all, version = f"{model!r} {layout.name} {MAGIC!r}", package_version("jaxserve")
    shared = f"jaxserve {version} {weights_id}" if weights_id and version else private
    names = f"{of_all} {shared}", f"{of_all} {private}"
    store = make_store(parse_kv_store(config.engine.kv_store), layout)
    stats.kv_store = KVStoreStats()
    save_pace = SavePace(always=config.engine.kv_store_write_policy == "write_through")
    on_cpu = jax.default_backend() == "cpu"
    return StoredPages(store, layout, runner, names, stats.kv_store, save_pace, shares_cores=on_cpu)
