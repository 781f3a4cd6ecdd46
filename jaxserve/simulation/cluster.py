"""Several engines behind a router, in virtual time: what a number of replicas would make of a workload.

Owns the order of events between replicas: each is brought up to a request's arrival before the router chooses, unless its load is
certain to be what it was. Replicas may be lost (failures.py). The choice is the real router's policy (routing/policy.py), the
replicas are replica.py's or pipeline.py's.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

import numpy as np

from jaxserve.routing.policy import Load, RoutingPolicy, hash_blocks
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.simulation.failures import Failure
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replica import SimulatedEngine
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


@dataclass(frozen=True)
class ClusterReplay:
    """What a workload did. chosen: i64[requests], the replica of each (of one that was sent again, the last). num_matched:
    i64[requests], leading blocks of its prompt that the router took for cached there. busy: f64[replicas], seconds that each
    computed, all its stages together. stats: of each engine, those that were lost first.

    num_failures: replicas that were lost. num_sent_again: requests, each counted as often as it was. num_lost_tokens: output tokens
    that these had.
    """

    times: ServedTimes
    chosen: np.ndarray
    num_matched: np.ndarray
    busy: np.ndarray
    stats: tuple[SchedulerStats, ...]
    num_failures: int = 0
    num_sent_again: int = 0
    num_lost_tokens: int = 0


def replay_cluster(
    workload: Workload,
    make_replica: Callable[[RequestRecords, bool], SimulatedEngine],
    num_replicas: int,
    policy: RoutingPolicy,
    *,
    block_tokens: int = 64,
    failures: Sequence[Failure] = (),
    progress: Callable[[int], object] | None = None,
) -> ClusterReplay:
    """Serves `workload` to its end on replicas behind a router that sees their loads as they are.

    A replica's load is that of its next decision: where a request arrives while a step runs, what the step ends has ended already.
    What a replica had not ended when it is lost begins anew on another at once, or when there is one. Its arrival stays what it
    was, and the gaps between tokens that it had got stay among the others.

    Args:
      make_replica: (records, prefix_caching) -> a new Replica or PipelineReplica.
      policy: see routing.policy.make_policy.
      block_tokens: of the blocks by which the router knows prompts, where the workload gives token ids.
      failures: of replicas, in any order.
      progress: told how many requests ended, whenever some do.

    Raises:
      ValueError: as `replay`, num_replicas is below 1, or a failure is of none of the replicas.
    """
    if num_replicas < 1:
        raise ValueError(f"{num_replicas=} must be at least 1")
    if wrong := [failure for failure in failures if failure.replica >= num_replicas]:
        raise ValueError(f"{wrong[0]}: there are {num_replicas} replicas, numbered from 0")
    records = RequestRecords(workload, progress)
    cluster = _Cluster(records, make_replica, num_replicas, policy, block_tokens, failures)
    for row in range(len(records.sent)):
        cluster.live_until(float(records.sent[row]))
        cluster.submit(row)
    return cluster.end()


class _Cluster:
    """The replicas and what happens to them, on one clock."""

    def __init__(
        self,
        records: RequestRecords,
        make_replica: Callable[[RequestRecords, bool], SimulatedEngine],
        num_replicas: int,
        policy: RoutingPolicy,
        block_tokens: int,
        failures: Sequence[Failure],
    ):
        self._records, self._policy, self._block_tokens = records, policy, block_tokens
        prefix_caching = any(r.prompt_token_ids for r in records.workload.requests)
        self._make = partial(make_replica, records, prefix_caching)
        self._replicas: list[SimulatedEngine | None] = [self._make() for _ in range(num_replicas)]  # None: lost, not replaced yet
        self._quiet_until = [0.0] * num_replicas  # of those that are there
        self._loads = {str(i): Load() for i in range(num_replicas)}  # of the same, at the present time
        self._lost: list[tuple[int, SimulatedEngine]] = []
        self._events: list[tuple[float, Failure | int]] = sorted((f.time, f) for f in failures)  # an int: of the one replaced
        self._stranded: list[int] = []  # rows that no replica is there for
        n = len(records.sent)
        self._chosen, self._num_matched = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._num_sent_again = self._num_lost_tokens = 0
        self._now = 0.0

    def submit(self, row: int) -> None:
        """The router chooses a replica for a request."""
        if not self._loads:
            self._stranded.append(row)
            return
        blocks = _blocks(self._records.workload.requests[row].prompt_token_ids, self._block_tokens)
        choice = self._policy.choose(blocks, self._loads)
        index = int(choice.server)
        replica = self._replicas[index]
        assert replica is not None
        advance(replica, self._now)
        replica.submit(row)
        self._note(index, replica)
        self._chosen[row], self._num_matched[row] = index, choice.num_matched

    def _note(self, index: int, replica: SimulatedEngine) -> None:
        """What the router sees of a replica that is at the present time."""
        self._quiet_until[index], self._loads[str(index)] = replica.quiet_until, Load(*replica.load)

    def live_until(self, time: float) -> None:
        """Brings every replica to this time, through what happens before."""
        while self._events and self._events[0][0] <= time:
            at, event = self._events.pop(0)
            self._advance(at)
            if isinstance(event, Failure):
                self._lose(event)
            else:
                self._replace(event, at)
        self._advance(time)

    def _advance(self, time: float) -> None:
        """Those replicas catch up whose load may be another by then."""
        self._now = time
        for index, quiet_until in enumerate(self._quiet_until):
            replica = self._replicas[index]
            if quiet_until < time and replica is not None:
                advance(replica, time)
                self._note(index, replica)

    def _lose(self, failure: Failure) -> None:
        replica = self._replicas[failure.replica]
        if replica is None:
            return
        advance(replica, failure.time)
        self._replicas[failure.replica] = None
        del self._loads[str(failure.replica)]
        self._lost.append((failure.replica, replica))
        self._policy.forget(str(failure.replica))
        insort(self._events, (failure.time + failure.seconds, failure.replica), key=itemgetter(0))
        unfinished = replica.unfinished
        self._records.begin_anew([row for row, _ in unfinished])
        self._num_sent_again += len(unfinished)
        for row, num_tokens in unfinished:
            self._num_lost_tokens += num_tokens
            self.submit(row)

    def _replace(self, index: int, time: float) -> None:
        self._replicas[index] = replica = self._make()
        replica.now = time
        self._note(index, replica)
        stranded, self._stranded = self._stranded, []
        for row in stranded:
            self.submit(row)

    def end(self) -> ClusterReplay:
        """What became of it all, when every request has ended."""
        while self._events:
            self.live_until(self._events[0][0])
        engines = [*self._lost, *((i, replica) for i, replica in enumerate(self._replicas) if replica is not None)]
        for _, replica in engines[len(self._lost) :]:
            while replica.turn():
                pass
        busy = np.zeros(len(self._replicas))
        for i, replica in engines:
            busy[i] += replica.steps.seconds.sum()
        stats = tuple(replica.stats for _, replica in engines)
        counts = len(self._lost), self._num_sent_again, self._num_lost_tokens
        return ClusterReplay(self._records.times(), self._chosen, self._num_matched, busy, stats, *counts)


def advance(replica: SimulatedEngine, until: float) -> None:
    """Lets a replica do all that it would begin before `until`; an idle one waits until then."""
    while replica.now < until:
        if not replica.turn(until):
            replica.now = until


def _blocks(token_ids: Sequence[int] | None, block_tokens: int) -> list[bytes]:
    return hash_blocks(array("i", token_ids).tobytes(), 4 * block_tokens) if token_ids else []
