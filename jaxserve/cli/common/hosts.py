"""The flags of a command whose engine runs on several processes, and what becomes of the command on those that follow."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxserve.cli.common.command import fail, group

if TYPE_CHECKING:
    from jaxserve import HostGroup, HostLostError

RED_SECONDS = 5.0  # that a server says that it is unhealthy, before it ends because a host was lost

_NUM_HOSTS = flags.DEFINE_integer(
    "num_hosts",
    None,
    "Processes that run one engine, each on its own devices; with --host_id and --coordinator. Unset: one.",
    lower_bound=1,
)
_HOST_ID = flags.DEFINE_integer("host_id", None, "Which of them this is. Host 0 has the engine, the others follow.", lower_bound=0)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "ADDRESS:PORT on host 0, by which the processes find each other.")
_CLUSTER = flags.DEFINE_bool("cluster", False, "The processes that SLURM, Open MPI or LeaderWorkerSet started run one engine.")
_JOIN = flags.DEFINE_float("join_seconds", None, "Seconds that all of them have to come together; by default 30.", lower_bound=1)
group("Several processes", ("num_hosts", "host_id", "coordinator", "cluster", "join_seconds"))


def joined_hosts() -> HostGroup | None:
    """This process's group, where the flags ask for one. It is joined here: call it before anything of JAX's."""
    places: dict[str, Any] = {"num_hosts": _NUM_HOSTS.value, "host_id": _HOST_ID.value, "coordinator": _COORDINATOR.value}
    if not _CLUSTER.value and _NUM_HOSTS.value in (None, 1):
        given = places | {"join_seconds": _JOIN.value}
        alone = [f"--{name}" for name, value in given.items() if value is not None and name != "num_hosts"]
        if alone:
            raise ValueError(f"{', '.join(alone)}: give --num_hosts=N too, or --cluster")
        return None
    from jaxserve import join_hosts

    if _JOIN.value is not None:
        places["timeout"] = _JOIN.value
    return join_hosts(**places)


def lead_or_follow(model: Any, options: dict[str, Any]) -> HostGroup | None:
    """The group that the flags ask for, on host 0; None without one. On a host that follows it does not return: that host follows
    an `LLM(model, hosts=hosts, **options)` of host 0's until that is done, and the process ends."""
    hosts = joined_hosts()
    if hosts is None or hosts.leads:
        return hosts
    _follow(hosts, model, options)
    hosts.close()
    sys.exit(0)


def _follow(hosts: HostGroup, model: Any, options: dict[str, Any]) -> None:
    import signal

    from jaxserve import HostLostError, follow

    # Who stops all hosts at once lets host 0 finish what it has begun; it ends the others.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: logging.getLogger("jaxserve").info("host %d ends when host 0 does", hosts.host_id))
    try:
        follow(model, hosts=hosts, **options)
    except HostLostError as error:
        fail(sys.argv[0], error, error.exit_code)


def end_when_a_host_is_lost(llm: Any, hosts: HostGroup | None) -> None:
    """Of a server: it answers for RED_SECONDS that it is unhealthy, then it ends with an exit code that says which host it was. If
    it is lost itself because it stands still, it is ended, and its clients' connections with it."""

    def end(error: HostLostError) -> None:
        from jaxserve.hosts.group import end_process

        threading.Timer(RED_SECONDS, end_process, (error.exit_code,)).start()

    llm.engine.on_lost(end)
    if hosts is not None:
        hosts.guard()
