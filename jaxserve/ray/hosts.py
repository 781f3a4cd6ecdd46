"""A replica of several processes: an actor for each host that follows, in the replica's placement group.

Owns how the hosts of a replica find each other. The replica is host 0, in the group's first bundle; host i is in bundle i. What
they do together, and what becomes of them when one is lost, is jaxserve.hosts'.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxserve.hosts.joining import KEY, join_hosts

JOIN_SECONDS = 300.0  # that hosts have to come together: an actor may wait for its machine to be prepared


@dataclass(frozen=True)
class _Meeting:
    """Where and how the hosts of one replica meet. key: a secret that nobody else knows."""

    coordinator: str
    num_hosts: int
    key: str

    def join(self, host_id: int) -> Any:
        os.environ[KEY] = self.key
        return join_hosts(self.num_hosts, host_id, self.coordinator, timeout=JOIN_SECONDS)


class Follower:
    """One host of a replica that follows its leader."""

    def run(self, meeting: _Meeting, host_id: int, model: str, engine: Mapping[str, Any]) -> None:
        """Follows until the leader has ended. Errors as `follow`'s."""
        from jaxserve.engine.follower import follow

        hosts = meeting.join(host_id)
        follow(model, hosts=hosts, **engine)
        hosts.close()


@dataclass(frozen=True)
class ReplicaHosts:
    """The group of a replica's processes, as host 0 has it. actors, runs: of the others; they end with the replica, which owns
    them."""

    group: Any  # HostGroup
    actors: list[Any]
    runs: list[Any]


def lead(num_hosts: int, model: str, engine: Mapping[str, Any]) -> ReplicaHosts:
    """Starts the other hosts of the replica that calls this, and meets them. Call it in the replica, before anything of JAX's.

    engine: options, of all hosts alike.

    Raises:
      RuntimeError: the replica has no placement group with a bundle for each host.
      TimeoutError: not all have come in JOIN_SECONDS.
    """
    placement = ray.util.get_current_placement_group()
    if placement is None or placement.bundle_count != num_hosts:
        raise RuntimeError(f"a replica of {num_hosts} hosts needs a placement group of as many bundles")
    meeting = _Meeting(f"{ray.util.get_node_ip_address()}:{_free_port()}", num_hosts, secrets.token_hex(16))
    actors, runs = [], []
    for host_id in range(1, num_hosts):
        bundle = placement.bundle_specs[host_id]
        where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=host_id)
        needs = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        actors.append(ray.remote(Follower).options(scheduling_strategy=where, **needs).remote())
        runs.append(actors[-1].run.remote(meeting, host_id, model, dict(engine)))
    return ReplicaHosts(meeting.join(0), actors, runs)


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]
