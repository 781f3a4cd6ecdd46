"""`jaxserve serve` on Ray: the flags that it alone has there, and how it runs."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from absl import app, flags

from jaxserve.cli.common import http_server
from jaxserve.cli.common.command import group, refuse_bad_input
from jaxserve.cli.common.fleet import gpus_per_replica, joins_cluster, last_error, num_replicas, start_ray, told_by
from jaxserve.routing.policy import ROUTING_POLICIES

if TYPE_CHECKING:
    from jaxserve.ray.fleet import FleetOptions

logger: logging.Logger = logging.getLogger("jaxserve")

_MAX_REPLICAS = flags.DEFINE_integer("max_replicas", None, "With --ray, up to which replicas follow the load.", lower_bound=1)
_HOSTS = flags.DEFINE_integer("hosts_per_replica", None, "With --ray, processes that share a replica's devices.", lower_bound=1)
_UP = flags.DEFINE_float("scale_up_seconds", 30.0, "With --max_replicas, how long the load must ask for more.", lower_bound=0)
_DOWN = flags.DEFINE_float("scale_down_seconds", 600.0, "With --max_replicas, how long it must ask for fewer.", lower_bound=0)
_POLICY = flags.DEFINE_enum(
    "router_policy", None, ROUTING_POLICIES, "With --ray, how a request's replica is chosen; by default Ray chooses."
)
group("Replicas on Ray", ("max_replicas", "hosts_per_replica", "scale_up_seconds", "scale_down_seconds", "router_policy"))


def fleet_of_flags(**options: Any) -> FleetOptions:
    """`FleetOptions` of these and of those that the flags here say. Errors as its own."""
    from jaxserve.ray.fleet import FleetOptions

    return FleetOptions(
        **options,
        replicas=num_replicas(),
        max_replicas=_MAX_REPLICAS.value,
        scale_up_seconds=_UP.value,
        scale_down_seconds=_DOWN.value,
        gpus_per_replica=gpus_per_replica(),
        hosts_per_replica=_HOSTS.value or 1,
        router_policy=_POLICY.value,
        grace=float(http_server.grace()),
        access_log=http_server.logs_access(),
    )


def _http_options_for(fleet: FleetOptions) -> dict[str, Any]:
    """Ray Serve's HTTP options. Where Ray will run on this machine alone, it has been seen that the model and the port can be had:
    Ray would try again and again, and share the port with another proxy of its own. Errors as `find_model` and OSError."""
    from jaxserve.models.files import find_model

    options = http_server.http_options()
    if not joins_cluster():
        find_model(fleet.model)
        with http_server.bound() as listeners:
            options["port"] = listeners[0].getsockname()[1]  # of --port=0
    return options


def serve_on_ray(fleet: FleetOptions) -> None:
    """Serves replicas until SIGTERM or Ctrl-C, then lets what runs finish for --grace seconds."""
    from jaxserve.ray.resources import ROUTING_ENVIRONMENT

    if fleet.router_policy is not None:
        for name, value in ROUTING_ENVIRONMENT.items():
            if (given := os.environ.get(name, value)) != value:
                raise app.UsageError(f"--router_policy={fleet.router_policy} needs {name}={value}, which is {given!r} here")
        os.environ.update(ROUTING_ENVIRONMENT)  # before Ray Serve reads it here, and for the processes of a cluster of our own
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    from jaxserve.ray.application import build

    with refuse_bad_input():
        http = _http_options_for(fleet)
    stop = threading.Event()
    start_ray(ray)
    try:
        with refuse_bad_input():
            application = build(fleet)
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        with refuse_bad_input():
            serve.start(http_options=http)
        try:
            serve.run(application, name="jaxserve", route_prefix="/")
            logger.info("Ray Serve's proxy runs on %s://%s:%d", http_server.scheme(), http["host"], http["port"])
        except RuntimeError as error:  # Ray's words end with the traceback of a replica
            raise app.UsageError(last_error(told_by(serve.status, str(error)))) from error
        stop.wait()
        serve.delete("jaxserve")  # replicas finish what they have begun
    finally:
        serve.shutdown()
        ray.shutdown()
