"""Several engines behind a router, in virtual time: what a number of replicas would make of a workload.

Owns the order of events between replicas: each is brought up to a request's arrival before the router chooses. The choice is the
real router's policy (routing/policy.py), the replicas are replica.py's or pipeline.py's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.routing.policy import Load, RoutingPolicy, hash_blocks
from jaxserve.scheduling.schedule import SchedulerStats
from jaxserve.simulation.records import RequestRecords
from jaxserve.simulation.replica import SimulatedEngine
from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


@dataclass(frozen=True)
class ClusterReplay:
    """What a workload did. chosen: i64[requests], the replica of each. num_matched: i64[requests], leading blocks of its prompt
    that the router took for cached there. busy: f64[replicas], seconds that each computed, all its stages together."""

    times: ServedTimes
    chosen: np.ndarray
    num_matched: np.ndarray
    busy: np.ndarray
    stats: tuple[SchedulerStats, ...]


def replay_cluster(
    workload: Workload,
    make_replica: Callable[[RequestRecords, bool], SimulatedEngine],
    num_replicas: int,
    policy: RoutingPolicy,
    *,
    block_tokens: int = 64,
    progress: Callable[[int], object] | None = None,
) -> ClusterReplay:
    """Serves `workload` to its end on replicas behind a router that sees their loads as they are.

    A replica's load is that of its next decision: where a request arrives while a step runs, what the step ends has ended already.

    Args:
      make_replica: (records, prefix_caching) -> a new Replica or PipelineReplica.
      policy: see routing.policy.make_policy.
      block_tokens: of the blocks by which the router knows prompts, where the workload gives token ids.
      progress: told how many requests ended, whenever some do.

    Raises:
      ValueError: as `replay`, or num_replicas is below 1.
    """
    if num_replicas < 1:
        raise ValueError(f"{num_replicas=} must be at least 1")
    records = RequestRecords(workload, progress)
    prefix_caching = any(r.prompt_token_ids for r in workload.requests)
    replicas = {str(i): make_replica(records, prefix_caching) for i in range(num_replicas)}
    chosen, num_matched = [], []
    for row in range(len(records.sent)):
        arrival, loads = float(records.sent[row]), {}
        for name, replica in replicas.items():
            advance(replica, arrival)
            loads[name] = Load(*replica.load)
        choice = policy.choose(_blocks(workload.requests[row].prompt_token_ids, block_tokens), loads)
        replicas[choice.server].submit(row)
        chosen.append(int(choice.server))
        num_matched.append(choice.num_matched)
    for replica in replicas.values():
        while replica.turn():
            pass
    busy = np.array([replica.steps.seconds.sum() for replica in replicas.values()])
    stats = tuple(replica.stats for replica in replicas.values())
    return ClusterReplay(records.times(), np.array(chosen), np.array(num_matched), busy, stats)


def advance(replica: SimulatedEngine, until: float) -> None:
    """Lets a replica do all that it would begin before `until`; an idle one waits until then."""
    while replica.now < until:
        if not replica.turn(until):
            replica.now = until


def _blocks(token_ids: Sequence[int] | None, block_tokens: int) -> list[bytes]:
    return hash_blocks(array("i", token_ids).tobytes(), 4 * block_tokens) if token_ids else []
