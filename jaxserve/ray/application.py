"""The server as an application of Ray Serve.

Owns what Ray asks of a replica: the HTTP application, its health and its load. Ray places replicas, starts them again, and routes
to them. A stream's chunks pass from the server's own application to Ray's proxy as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy  # pyright: ignore[reportMissingImports]

from jaxserve.ray.fleet import FleetOptions, replica_load, replicas_wanted
from jaxserve.ray.resources import host_resources

if TYPE_CHECKING:
    from jaxserve.serving.control import ControlCall

HEALTH_SECONDS = 1.0  # between two checks of a replica
HEALTH_TIMEOUT = 30.0  # that one check may take: a step that compiles holds the interpreter for a while
LOAD = "load"  # the metric by which replicas are added and taken away


@serve.ingress()
class Replica:
    """One engine and its HTTP application, in a process of its own; or host 0 of an engine of several processes."""

    def __init__(self, options: FleetOptions):
        from jaxserve.serving.logs import set_up_logging

        set_up_logging(access_log=options.access_log)  # on stderr, which Ray writes into a file of the process
        options = replace(options, engine={"warm_up": "background", **options.engine})
        self._hosts: Any = None  # keeps the followers' actors
        if options.hosts_per_replica > 1:
            from jaxserve.ray.hosts import ReplicaHosts

            # They import meanwhile what this imports.
            self._hosts = ReplicaHosts(options.hosts_per_replica, options.model, options.engine)
        from jaxserve.serving.launch import load_llm, make_engine

        group = None if self._hosts is None else self._hosts.join()
        llm = load_llm(options, group)
        if group is not None:
            from jaxserve.ray.hosts import end_when_lost

            end_when_lost(group)
        self._options = options
        self._controls: Any = None  # of several replicas, the application of its own control routes
        self._engine = make_engine(llm, options)

    def __serve_build_asgi_app__(self) -> Any:
        from jaxserve.serving.app import make_app

        if not self._options.has_several:
            return make_app(self._engine, self._options.server)
        from jaxserve.ray.control import ask_replicas

        app = make_app(self._engine, self._options.server, one_of_several="replicas", ask_all=ask_replicas)
        self._controls = getattr(app.state, "controls", None)
        return app

    async def control(self, call: ControlCall) -> tuple[int, bytes]:
        """What the control routes of this replica's engine answer, for whichever replica got the call."""
        return await call.ask(self._controls)

    def check_health(self) -> None:
        """Raises what `/health` would answer with 503: Ray starts the replica anew."""
        self._engine.check_health()

    def record_routing_stats(self) -> dict[str, int]:
        """What a router_policy goes by (routing.py)."""
        stats = self._engine.stats
        return {"waiting": stats.num_waiting, "running": stats.num_running}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscale` goes by."""
        stats = self._engine.stats
        usage = 1.0 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        longest = self._engine.config.scheduler.max_num_seqs
        return {LOAD: replica_load(stats.num_running, stats.num_waiting, longest, usage)}


def autoscale(ctx: Any) -> tuple[int, dict[str, Any]]:
    """A policy of Ray Serve's autoscaler: (how many replicas there should be, no state). Ray waits before it follows."""
    loads = list((ctx.aggregated_metrics or {}).get(LOAD, {}).values())
    return (replicas_wanted(loads) if loads else ctx.target_num_replicas), {}


def build(options: FleetOptions) -> serve.Application:
    """The application of so many replicas.

    Raises:
      ValueError: Ray has been started, and its cluster has too few GPUs or CPUs for the replicas; a router_policy without HAProxy.
    """
    cluster = ray.cluster_resources() if ray.is_initialized() else None  # `serve run` builds the application first
    needs = host_resources(cluster, options.engine, options.replicas, options.gpus_per_replica, options.hosts_per_replica)
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.hosts_per_replica > 1:
        bundle = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
        bundles = [{kind: count for kind, count in bundle.items() if count}] * options.hosts_per_replica
        scaling |= {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    if options.max_replicas is not None:
        del scaling["num_replicas"]
        scaling |= {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.replicas,
                max_replicas=options.max_replicas,
                initial_replicas=options.replicas,
                upscale_delay_s=options.scale_up_seconds,
                downscale_delay_s=options.scale_down_seconds,
                policy=AutoscalingPolicy(policy_function=autoscale),
            )
        }
    if options.router_policy is not None:
        from jaxserve.ray.routing import router_config

        scaling["request_router_config"] = router_config(options.router_policy)
    deployment = serve.deployment(
        Replica,
        name="jaxserve",
        ray_actor_options=needs,
        max_ongoing_requests=2**20,  # the server itself says when it is full, with a 429
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=options.grace,
        graceful_shutdown_wait_loop_s=0.5,
        **scaling,
    )
    replicas = deployment.bind(options)
    if options.router_policy is None:
        return replicas
    from jaxserve.ray.routing import with_chooser

    return with_chooser(replicas)
