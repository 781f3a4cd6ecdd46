"""Prefill and decode on replicas of their own, in virtual time: prompts are computed on some, their KV moves, others generate.

Owns what passes between the two kinds and when: a prompt is computed with one token, which is dropped; its pages are stored while
it is computed, but for those of its last step; a decode replica loads them, one load after another, into pages of its real pool,
while its request waits as WAITING_FOR_KV. So it is in the engine (engine/stored_pages.py, docs/prefill_decode.md). The idea is
that of DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxserve.request import Request
from jaxserve.routing.policy import RoutingPolicy
from jaxserve.scheduling.page_pool import extend_hash_chain
from jaxserve.simulation.cluster import ClusterReplay, replay_cluster
from jaxserve.simulation.failures import Failure, of_replicas
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replica import Replica, SimulatedEngine
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload

MIN_PREFILL_TOKENS = 512  # the router's --min_prefill_bytes, at four bytes a token


@dataclass(frozen=True)
class KVLink:
    """How KV passes to a store, or from there. latency: seconds of a load beside its bytes. token_seconds: of a token's KV."""

    latency: float
    token_seconds: float

    def seconds(self, num_tokens: float) -> float:
        """Of the KV of so many tokens."""
        return self.latency + num_tokens * self.token_seconds


@dataclass(frozen=True)
class _Load:
    """Pages on their way. pages: those that the pool had before them, and those that are loaded, all leased."""

    request: Request
    pages: list[int]
    hashes: list[bytes]  # of the loaded ones, which come last
    end: float


class DecodeReplica(Replica):
    """An engine that loads the KV of prompts which others have computed.

    told: ids of the requests of which there is KV: that of all full pages of their prompts. link: one load at a time passes it. The
    other arguments are `Replica`'s; prefixes are cached in any case.
    """

    def __init__(self, *args: Any, told: Collection[str], link: KVLink, **options: Any):
        super().__init__(*args, **{**options, "prefix_caching": True})
        self._told, self._link, self._link_free = told, link, 0.0
        self._loads: deque[_Load] = deque()  # in the order of their ends
        self.scheduler.composer.kv_loads = self
        self.num_loaded_tokens: int = 0

    def begin(self, request: Request, hits: list[int], max_pages: int, group: int = 0) -> bool:
        """As `KVLoads.begin`."""
        assert group == 0, "a replica's devices attend together"
        pool, num_hits = self.scheduler.pool, len(hits)
        end = min(max_pages, request.num_prompt_tokens // pool.page_size)
        if request.kv_sought or request.request_id not in self._told or end <= num_hits:
            return False
        if pool.num_free_pages < -(-len(request.token_ids) // pool.page_size) - num_hits:
            return False  # it could not be admitted with them
        pages = pool.lease(end - num_hits, hits)
        if pages is None:
            return False
        request.kv_sought = True
        extend_hash_chain(request.hash_chain, request.token_ids, pool.page_size, end)
        num_tokens = (end - num_hits) * pool.page_size
        self._link_free = max(self.now, self._link_free) + self._link.seconds(num_tokens)
        self._loads.append(_Load(request, pages, request.hash_chain[num_hits + 1 : end + 1], self._link_free))
        self.num_loaded_tokens += num_tokens
        return True

    def num_waiting(self, group: int) -> int:
        """As `KVLoads.num_waiting`."""
        return sum(not load.request.finished for load in self._loads)

    def preempting(self, request: Request) -> None:
        """As `KVLoads.preempting`: the prompt's KV is stored, and what was generated is computed again."""

    @property
    def quiet_until(self) -> float:
        """As `SimulatedEngine.quiet_until`."""
        return min(super().quiet_until, self._due)

    def turn(self, until: float = math.inf) -> bool:
        """As `Replica.turn`. Loads end between steps."""
        self._arrive()
        if super().turn(min(until, self._due)):
            return True
        if self._due >= until:  # of a load, perhaps, that has just begun
            return False
        self.now: float = max(self.now, self._due)
        return True

    @property
    def _due(self) -> float:
        """When the next load ends."""
        return self._loads[0].end if self._loads else math.inf

    def _arrive(self) -> None:
        """Loads that have ended by now are in the pool, and their requests in the queue."""
        while self._loads and self._loads[0].end <= self.now:
            load, pool = self._loads.popleft(), self.scheduler.pool
            for page, hash_ in zip(load.pages[-len(load.hashes) :], load.hashes, strict=True):
                pool.register(page, hash_)
            pool.end_lease(load.pages)
            self.scheduler.kv_ready(load.request)


@dataclass(frozen=True)
class RolesReplay:
    """What a workload did. times: from the arrival of requests at the router to their last token. prefills: the prompts that
    prefill replicas computed, in the order of their arrival, each with one token. decodes: all requests, in the order in which they
    reached decode replicas."""

    times: ServedTimes
    prefills: ClusterReplay | None  # None: all prompts were too short
    decodes: ClusterReplay


def replay_roles(
    workload: Workload,
    make_prefill: Callable[[RequestRecords, bool], SimulatedEngine],
    make_decode: Callable[[RequestRecords, Collection[str]], DecodeReplica],
    num_prefill: int,
    num_decode: int,
    make_policy: Callable[[], RoutingPolicy],
    save: Callable[[int], float],
    *,
    min_prefill_tokens: int = MIN_PREFILL_TOKENS,
    failures: Sequence[Failure] = (),
    progress: Callable[[int], object] | None = None,
) -> RolesReplay:
    """Serves `workload` to its end on replicas of two kinds behind a router.

    Prefill replicas hear nothing from the others, so they are replayed first. The router chooses a decode replica when the prompt's
    KV is there, where the real one chooses before it is computed.

    Args:
      make_prefill: as `replay_cluster`'s make_replica. make_decode: (records, told) -> a new DecodeReplica.
      make_policy: for each kind of replica one.
      save: seconds from the end of a prompt of so many tokens until all its pages are stored.
      min_prefill_tokens: shorter prompts are computed where they are decoded.
      failures: as `replay_cluster`'s; prefill replicas are numbered first. What is stored outlives the replica that stored it.
      progress: told how many requests ended, whenever some do.

    Raises:
      ValueError: as `replay_cluster`.
    """
    if wrong := [failure for failure in failures if failure.replica >= num_prefill + num_decode]:
        raise ValueError(f"{wrong[0]}: there are {num_prefill + num_decode} replicas, numbered from 0")
    requests = workload.requests
    long = np.array([r.num_prompt_tokens >= min_prefill_tokens for r in requests], bool)
    rows = long.nonzero()[0]
    begin = np.array([r.arrived_at for r in requests])
    scheduled, prefills = np.full(len(requests), np.nan), None
    if len(rows):
        prompts = tuple(replace(requests[row], num_output_tokens=1) for row in rows)
        lost = of_replicas(failures, 0, num_prefill)
        prefills = replay_cluster(Workload(workload.name, prompts), make_prefill, num_prefill, make_policy(), failures=lost)
        begin[rows] = prefills.times.last + [save(r.num_prompt_tokens) for r in prompts]
        scheduled[rows] = prefills.times.scheduled
    order = np.argsort(begin, kind="stable")
    handed = tuple(replace(requests[row], arrived_at=float(begin[row])) for row in order)
    told = frozenset(f"r{i}" for i, row in enumerate(order) if long[row])
    decodes = replay_cluster(
        Workload(workload.name, handed),
        lambda records, _: make_decode(records, told),
        num_decode,
        make_policy(),
        failures=of_replicas(failures, num_prefill, num_decode),
        progress=progress,
    )
    return RolesReplay(_whole_times(workload, decodes.times, order, scheduled), prefills, decodes)


def _whole_times(
    workload: Workload,
    found: ServedTimes,
    order: np.ndarray,  # intp[n]: rows of the workload, as they were handed over
    scheduled: np.ndarray,  # f64[n]: when prompts were begun elsewhere; NaN: they were not
) -> ServedTimes:
    """Times from the arrival at the router, in the workload's order."""
    place = np.argsort(order)  # of each request among those that were handed over
    assert found.scheduled is not None
    return replace(
        found,
        arrivals=np.array([r.arrived_at for r in workload.requests]),
        first=found.first[place],
        last=found.last[place],
        num_prompt=found.num_prompt[place],
        num_output=found.num_output[place],
        scheduled=np.where(np.isnan(scheduled), found.scheduled[place], scheduled),
    )
