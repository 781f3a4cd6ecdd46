"""How a process joins its group: from what was given, or from the environment of SLURM, Open MPI or LeaderWorkerSet.

Owns how the processes meet: host 0 listens where all were told, until all have come. Then all call `jax.distributed.initialize`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from jaxserve.hosts.group import HostGroup

logger: logging.Logger = logging.getLogger("jaxserve")

JOIN_SECONDS = 30  # that all hosts have to come together
KEY = "JAXSERVE_HOSTS_KEY"  # in the environment, the same on all hosts
HANDSHAKE_SECONDS = 2  # in which who connects must show that it knows the key
PORT = 9911  # of the coordinator, where only its host is known
_OPEN_MPI_4 = "OMPI_MCA_orte_hnp_uri"  # in the environment of Open MPI's processes, before its version 5


def join_hosts(
    num_hosts: int | None = None,
    host_id: int | None = None,
    coordinator: str | None = None,
    *,
    timeout: float = JOIN_SECONDS,
) -> HostGroup:
    """This process's place in a group of processes that run one engine. Call it before anything else of JAX's.

    Args:
      num_hosts, host_id: how many processes there are, and which this is; host 0 leads.
      coordinator: "ADDRESS:PORT" on host 0, where all meet. The port must be free there. Host 0 listens on it until all have come,
        and then on one that the system chooses.
      timeout: seconds that all hosts have to come.

    What is None is read from the environment: LeaderWorkerSet's (LWS_LEADER_ADDRESS, LWS_GROUP_SIZE, LWS_WORKER_INDEX), or SLURM's
    or Open MPI's, as `jax.distributed.initialize` reads them. From Open MPI 5 on the coordinator is not there: JAX asks mpi4py for
    it, and without mpi4py it must be given.

    Whoever knows the group's key (JAXSERVE_HOSTS_KEY, the same on all hosts) may join, and then run code on the hosts: without one
    keep the ports in a private network.

    Raises:
      ValueError: something is missing and the environment does not have it either, or is out of range.
      TimeoutError: not all hosts came in time; the message says who is missing, or where they were to meet.
    """
    place = _place({"num_hosts": num_hosts, "host_id": host_id, "coordinator": coordinator}, os.environ, timeout)
    meet = _await_followers if place.host_id == 0 else _reach_leader
    if KEY not in os.environ and place.address[0] not in ("localhost", "127.0.0.1", "::1"):
        logger.warning(
            "%s is not set: whoever reaches %s while hosts join may run code on them; set the same secret on all",
            KEY,
            place.coordinator,
        )
    connections, jax_port = meet(place, timeout)
    _initialize_jax(place, jax_port, timeout)
    logger.info("host %d of %d is in its group (%s)", place.host_id, place.num_hosts, place.coordinator)
    return HostGroup(place.host_id, place.num_hosts, *(connections[kind] for kind in KINDS), leave=_leave)


@dataclass(frozen=True)
class _Place:
    num_hosts: int
    host_id: int
    coordinator: str
    local_device_ids: Any = None  # of JAX's, where a process is to see some of the devices alone

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def _place(given: Mapping[str, Any], environ: Mapping[str, str], timeout: float) -> _Place:
    """What is given, filled up from the environment, and checked."""
    open_mpi_5 = _of_open_mpi_5(environ)
    found = open_mpi_5 | _of_leader_worker_set(environ)
    place: dict[str, Any] = {name: found.get(name) if value is None else value for name, value in given.items()}
    local_device_ids = found.get("local_device_ids") if given["host_id"] is None else None
    missing = [name for name, value in place.items() if value is None]
    if missing and not open_mpi_5 and any(name in environ for name in ("SLURM_JOB_ID", _OPEN_MPI_4, "PMIX_NAMESPACE")):
        from jax._src.clusters import ClusterEnv  # has no public name

        detected = ClusterEnv.auto_detect_unset_distributed_params(
            place["coordinator"], place["num_hosts"], place["host_id"], None, None, int(timeout)
        )
        *found_place, local_device_ids = detected
        place = dict(zip(("coordinator", "num_hosts", "host_id"), found_place, strict=True))
        missing = [name for name, value in place.items() if value is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given where neither SLURM, Open MPI (from 5 on with mpi4py) nor LeaderWorkerSet "
            "says it: num_hosts=2, host_id=0, coordinator='ADDRESS:PORT' of host 0"
        )
    num_hosts, host_id, address = int(place["num_hosts"]), int(place["host_id"]), str(place["coordinator"])
    if num_hosts < 2:
        raise ValueError(f"{num_hosts=} must be at least 2; one process needs no group")
    if not 0 <= host_id < num_hosts:
        raise ValueError(f"{host_id=} must be in [0, {num_hosts - 1}], with {num_hosts=}")
    if not (":" in address and address.rpartition(":")[2].isdecimal()):
        raise ValueError(f"coordinator={address!r} must be ADDRESS:PORT of host 0")
    return _Place(num_hosts, host_id, address, local_device_ids)


def _of_leader_worker_set(environ: Mapping[str, str]) -> dict[str, Any]:
    if "LWS_LEADER_ADDRESS" not in environ:
        return {}
    address = environ["LWS_LEADER_ADDRESS"]
    found: dict[str, Any] = {"coordinator": address if ":" in address else f"{address}:{PORT}"}
    for ours, theirs in (("num_hosts", "LWS_GROUP_SIZE"), ("host_id", "LWS_WORKER_INDEX")):
        if theirs in environ:
            found[ours] = int(environ[theirs])
    return found


def _of_open_mpi_5(environ: Mapping[str, str]) -> dict[str, Any]:
    """What its launcher says by itself. Where the processes meet is for MPI to say, and JAX asks through mpi4py: with that
    installed, JAX is left to read all of it."""
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK")]
    if _OPEN_MPI_4 in environ or find_spec("mpi4py") is not None or not all(name in environ for name in names):
        return {}
    num_hosts, host_id, local_id = (int(environ[name]) for name in names)
    return {"num_hosts": num_hosts, "host_id": host_id, "local_device_ids": [local_id]}


def _key() -> bytes:
    return os.environ.get(KEY, "jaxserve").encode()


KINDS = ("commands", "pulse", "reports")  # of connections between host 0 and another host, one each

Met = tuple[dict[str, dict[int, Connection]], int]  # {kind: connections}; the port of JAX's coordinator


def _await_followers(place: _Place, timeout: float) -> Met:
    """Host 0: a connection of each kind of each other host."""
    connections: dict[str, dict[int, Connection]] = {kind: {} for kind in KINDS}
    others, deadline = set(range(1, place.num_hosts)), time.monotonic() + timeout
    both = socket.has_dualstack_ipv6()
    family = {"family": socket.AF_INET6, "dualstack_ipv6": True} if both else {}
    try:
        listening = socket.create_server(("", place.address[1]), backlog=len(KINDS) * place.num_hosts, **family)
    except OSError as error:
        raise ValueError(f"coordinator={place.coordinator!r}: host 0 can't listen there: {error}") from error
    with listening:
        while any(kind.keys() != others for kind in connections.values()):
            listening.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                accepted, _ = listening.accept()
            except TimeoutError:
                absent = ", ".join(map(str, sorted(others - set.intersection(*map(set, connections.values())))))
                raise TimeoutError(
                    f"host 0 waited {timeout:g} s at {place.coordinator} for host {absent} of {place.num_hosts}: are they "
                    "started, with this coordinator and the same JAXSERVE_HOSTS_KEY, and can they reach it?"
                ) from None
            try:
                connection = _wrapped(accepted)
                deliver_challenge(connection, _key())
                answer_challenge(connection, _key())
                host_id, num_hosts, kind = connection.recv()
            except (OSError, EOFError, AuthenticationError) as error:  # somebody else's knock
                level = logging.WARNING if isinstance(error, AuthenticationError) else logging.DEBUG
                logger.log(level, "host 0: a connection that is no host's: %r", error)
                continue
            if num_hosts != place.num_hosts or host_id in connections[kind] or host_id not in others:
                raise ValueError(
                    f"host {host_id} of {num_hosts} came to host 0 of {place.num_hosts}, where {sorted(connections[kind])} are: "
                    "every host needs an id of its own, and the same num_hosts"
                )
            connections[kind][host_id] = _patient(connection)
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    for connection in connections["commands"].values():
        connection.send(port)
    return connections, port


def _reach_leader(place: _Place, timeout: float) -> Met:
    """Another host: a connection of each kind to host 0, tried until it listens."""
    deadline = time.monotonic() + timeout
    found: dict[str, Connection] = {}
    for kind in KINDS:
        while kind not in found:
            try:
                connection = _wrapped(socket.create_connection(place.address, timeout=max(deadline - time.monotonic(), 0.01)))
                answer_challenge(connection, _key())
                deliver_challenge(connection, _key())
                connection.send((place.host_id, place.num_hosts, kind))
                found[kind] = _patient(connection)
            except (OSError, EOFError, AuthenticationError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"host {place.host_id} of {place.num_hosts} found no host 0 at {place.coordinator} in {timeout:g} s "
                        f"({error!r}): is it started, its address right, the port open there, and JAXSERVE_HOSTS_KEY the same?"
                    ) from error
                time.sleep(0.1)
    try:
        if not found["commands"].poll(max(deadline - time.monotonic(), 0) + timeout):
            raise TimeoutError(f"host 0 at {place.coordinator} still waits for others after {timeout:g} s")
        port = found["commands"].recv()
    except (EOFError, OSError) as error:
        raise TimeoutError(f"host 0 at {place.coordinator} gave up: its log says for whom it waited ({error!r})") from error
    return {kind: {0: connection} for kind, connection in found.items()}, port


def _initialize_jax(place: _Place, port: int, timeout: float) -> None:
    """JAX's own group, by which devices of all hosts are known and collectives run."""
    import jax

    if place.host_id:
        _delay_aborts()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", True)  # or JAX ends every process when one is lost, without a word to clients
    host = place.address[0]
    jax.distributed.initialize(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        place.num_hosts,
        place.host_id,
        local_device_ids=place.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(int(timeout), 1),
        heartbeat_timeout_seconds=10,
        shutdown_timeout_seconds=10,
    )


def _delay_aborts() -> None:
    """JAX aborts a process as soon as the connection to its coordinator, on host 0, breaks. Here the handler of SIGABRT is libc's
    `sleep`, which takes the signal's number as seconds. For these 6 only the thread that aborts stands still, and the pulse ends
    the process with the code that names host 0. JAX's client has a callback for that, but calling one of Python's raises
    std::bad_cast (jaxlib 0.11.2)."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


def _leave() -> None:
    import jax

    jax.distributed.shutdown()


def _wrapped(accepted: socket.socket) -> Connection:
    """A connection whose other end must speak within HANDSHAKE_SECONDS, until it is `_patient`. Small messages do not wait for
    more."""
    accepted.settimeout(None)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_SECONDS, 0))
    return Connection(accepted.detach())


def _patient(connection: Connection) -> Connection:
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return connection
