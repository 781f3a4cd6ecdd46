"""A replica of several processes: an actor for each host that follows, in the replica's placement group.

Owns how the hosts of a replica find each other. The replica is host 0, in the group's first bundle; host i is in bundle i. What
they do together, and what becomes of them when one is lost, is jaxserve.hosts'.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from jaxserve.hosts.group import HostGroup, end_process
from jaxserve.hosts.joining import KEY, join_hosts

JOIN_SECONDS = 300.0  # that hosts have to come together: an actor may wait for its machine to be prepared
LAST_WORDS_SECONDS = 2.0  # after a host was lost, in which the streams of a replica are told why they end


@dataclass(frozen=True)
class _Meeting:
    """Where and how the hosts of one replica meet. key: a secret that nobody else knows."""

    coordinator: str
    num_hosts: int
    key: str

    def join(self, host_id: int) -> HostGroup:
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


class ReplicaHosts:
    """The processes of a replica, as host 0 has them, which makes this before anything of JAX's. The others start at once, and end
    with the replica, which owns their actors.

    engine: options, of all hosts alike.

    Raises:
      RuntimeError: the replica has no placement group with a bundle for each host.
    """

    def __init__(self, num_hosts: int, model: str, engine: Mapping[str, Any]):
        placement = ray.util.get_current_placement_group()
        if placement is None or placement.bundle_count != num_hosts:
            raise RuntimeError(f"a replica of {num_hosts} hosts needs a placement group of as many bundles")
        address = f"{ray.util.get_node_ip_address()}:{_free_port()}"
        self._meeting = _Meeting(address, num_hosts, secrets.token_hex(16))
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # a reference each, which is ready when that host has ended
        for host_id in range(1, num_hosts):
            bundle = placement.bundle_specs[host_id]
            where = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=host_id)
            needs = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
            self._actors.append(ray.remote(Follower).options(scheduling_strategy=where, **needs).remote())
            self._runs.append(self._actors[-1].run.remote(self._meeting, host_id, model, dict(engine)))

    def join(self) -> HostGroup:
        """The group, once all have met.

        Raises:
          RuntimeError: another host has failed or died before, with its error.
          TimeoutError: not all have come in JOIN_SECONDS.
        """
        joined: Future[HostGroup] = Future()
        threading.Thread(target=_settle, args=(joined, self._meeting), name="jaxserve-join", daemon=True).start()
        ends = {run.future(): host_id for host_id, run in enumerate(self._runs, 1)}
        done, _ = wait([joined, *ends], return_when=FIRST_COMPLETED)
        if joined in done:
            return joined.result()
        (end, *_) = done
        raise RuntimeError(f"host {ends[end]} has ended before it joined: {_in_a_line(end.exception())}") from end.exception()


def _settle(joined: Future[HostGroup], meeting: _Meeting) -> None:
    try:
        joined.set_result(meeting.join(0))
    except BaseException as error:
        joined.set_exception(error)


def _in_a_line(error: BaseException | None) -> str:
    """A follower's error without the traceback that Ray adds; of an actor that died, the reason that Ray knows."""
    cause = getattr(error, "cause", None) or error
    return " ".join(str(cause).split()) if isinstance(cause, ray.exceptions.RayError) else repr(cause)


def end_when_lost(group: HostGroup) -> None:
    """Ends this process soon after another host is lost: Ray starts a replica anew at once when its process is gone, and only after
    three failed checks and a farewell when it says that it is unhealthy."""
    group.on_lost(lambda error: threading.Timer(LAST_WORDS_SECONDS, end_process, (error.exit_code,)).start())


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]
