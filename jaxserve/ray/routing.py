"""The router's policies as Ray Serve's: which replica gets a request, by the prefix that one of them has probably cached.

With HAProxy as its proxy, Ray asks an ingress of ours for a replica, and passes the request on to that one itself: no byte of an
answer comes by here. Owns that ingress, and the policy's view of the replicas. The policies are jaxserve.routing's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxserve.ray.loads import STATS_SECONDS, Loads
from jaxserve.ray.resources import ROUTING_ENVIRONMENT
from jaxserve.routing.policy import Load, RoutingPolicy, make_policy
from jaxserve.routing.prompts import prompt_blocks


class _ByPolicy(RequestRouter):
    """Ray's choice of a replica for a request, as one of jaxserve.routing's policies makes it. The first argument of a request is
    its prompt's blocks."""

    def initialize_state(self, policy: str) -> None:
        """Ray calls it with what `router_config` says."""
        self._policy: RoutingPolicy = make_policy(policy)
        self._loads = Loads()

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        said = {replica.replica_id.unique_id: load_of(replica.routing_stats) for replica in replicas}
        for name in self._loads.hear(said):
            self._policy.forget(name)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if the replica does not take it, before the next choice
        given = pending_request.args[0] if pending_request.args else None
        blocks = given if isinstance(given, list) else []  # of Ray's proxy in Python, which stands in for HAProxy, it is a request
        by_name, now = {replica.replica_id.unique_id: replica for replica in candidate_replicas}, time.monotonic()
        server = self._policy.choose(blocks, self._loads.of(list(by_name), now)).server
        self._loads.send(server, now)
        return [[by_name[server]]]


def load_of(stats: Mapping[str, Any] | None) -> Load:
    """What a replica said by `record_routing_stats`."""
    return Load(int((stats or {}).get("waiting", 0)), int((stats or {}).get("running", 0)))


def router_config(policy: str) -> RequestRouterConfig:
    """Of the replicas' deployment."""
    return RequestRouterConfig(
        request_router_class=_ByPolicy,
        request_router_kwargs={"policy": policy},
        request_routing_stats_period_s=STATS_SECONDS,
    )


def choosing_app(replicas: Any) -> Starlette:
    """What HAProxy asks for a replica: a request's body in, the replica's name out. replicas: the handle of their deployment."""

    async def choose(request: Request) -> Response:
        blocks = prompt_blocks(None, await request.body())
        async with replicas.choose_replica(blocks, _reserve=False) as chosen:
            return JSONResponse({"replica_id": chosen._replica.replica_id.to_full_id_str()})

    return Starlette(routes=[Route("/internal/route", choose, methods=["POST"])])


@serve.ingress()
class Chooser:
    """The process of `choosing_app`."""

    def __init__(self, replicas: Any):
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> Starlette:
        return choosing_app(self._replicas)


def with_chooser(replicas: serve.Application) -> serve.Application:
    """The application of these replicas, among which an ingress of ours chooses.

    Raises:
      ValueError: this process, or the cluster that it has joined, does not have what Ray Serve must find in its environment.
    """
    _check_environment(os.environ, "this process")
    if ray.is_initialized():
        on_head = _environment.options(num_cpus=0, resources={"node:__internal_head__": 1e-3})  # Serve's controller is there too
        _check_environment(ray.get(on_head.remote()), "Ray's cluster")
    chooser = serve.deployment(Chooser, name="chooser", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=2**20)
    return replicas._with_ingress_request_router(chooser.bind(replicas))  # Ray's own, and not stable: hence its version is pinned


@ray.remote
def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in ROUTING_ENVIRONMENT if name in os.environ}


def _check_environment(found: Mapping[str, str], whose: str) -> None:
    missing = [f"{name}={value}" for name, value in ROUTING_ENVIRONMENT.items() if found.get(name) != value]
    if missing:
        raise ValueError(
            f"router_policy: Ray's proxy must be HAProxy, and {whose} was started without {' '.join(missing)}: start both with it"
        )
