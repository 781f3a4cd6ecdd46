"""The flags of commands that run on Ray, and how Ray is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import group
from jaxserve.serving.options import LISTENER_OPTIONS

_RAY = flags.DEFINE_bool("ray", False, "Run on Ray: on the cluster that RAY_ADDRESS names, or on one on this machine.")
_REPLICAS = flags.DEFINE_integer("replicas", None, "With --ray, how many engines there are; by default 1.", lower_bound=1)
_GPUS = flags.DEFINE_integer(
    "gpus_per_replica", None, "With --ray, GPUs of a replica; by default its devices, if the cluster has GPUs.", lower_bound=0
)
group("Replicas on Ray", ("ray", "replicas", "gpus_per_replica"))
_ON_RAY_ALONE = ("replicas", "max_replicas", "gpus_per_replica", "hosts_per_replica", "router_policy")
_ALONE = ("num_hosts", "host_id", "coordinator", "cluster", "join_seconds", "role")  # flags that mean nothing there
# Flags of our own HTTP server: Ray's proxy, which listens there, has no such option.
_OF_OUR_LISTENER = ("uds", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", *LISTENER_OPTIONS)


def num_replicas() -> int:
    """How many engines the flags ask for."""
    return _REPLICAS.value or 1


def gpus_per_replica() -> int | None:
    """What the flags say of a replica's GPUs."""
    return _GPUS.value


def on_ray() -> bool:
    """Whether the flags ask for Ray. UsageError: flags that do not go together."""
    if not _RAY.value:
        ours = [name for name in _ON_RAY_ALONE if name in flags.FLAGS]
        given = [f"--{name}" for name in ours if flags.FLAGS[name].value is not None]
        if given:
            raise app.UsageError(f"{', '.join(given)}: give --ray too")
        return False
    given = {name: flags.FLAGS[name].value for name in _ALONE if name in flags.FLAGS}
    refused = [f"--{name}" for name, value in given.items() if value is not None and value is not False]
    if refused:
        raise app.UsageError(
            f"{', '.join(refused)}: Ray places the processes of a replica, which has no role; leave --ray or these out, and give "
            "--hosts_per_replica for several"
        )
    ours = [f"--{name}" for name in _OF_OUR_LISTENER if name in flags.FLAGS and not flags.FLAGS[name].using_default_value]
    if ours:
        raise app.UsageError(
            f"{', '.join(ours)}: Ray's proxy has no such option; leave it out, or put a proxy that has it before Ray's"
        )
    return True


def joins_cluster() -> bool:
    """Whether Ray runs already, where RAY_ADDRESS says."""
    return bool(os.environ.get("RAY_ADDRESS"))


def start_ray(ray: Any) -> None:
    """Joins the cluster that RAY_ADDRESS names, or starts one on this machine alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets whatever else runs on the machine pass before a step
    if joins_cluster():
        ray.init(log_to_driver=False)
    else:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,  # what passes is requests and text
            _node_ip_address="127.0.0.1",
        )


def last_error(text: str) -> str:
    """The last line of a traceback's text, which Ray wraps in its own words."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith("Error") and " " in line]
    return errors[-1] if errors else lines[-1]


def told_by(status: Callable[[], Any], said: str) -> str:
    """What Ray Serve says of an application that did not start: its replicas' error, which `said` at times leaves out."""
    try:
        found = status()
    except Exception:  # whatever Ray raises where its controller has died as well
        return said
    application = found.applications.get("jaxserve")
    told = [] if application is None else [deployment.message for deployment in application.deployments.values()]
    return next((message for message in told if "Error" in message), said)
