"""The router's policies as Ray's choice of a replica, without a cluster; tests/ray/test_ray_serve.py has them behind HAProxy."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.ray.resources import ROUTING_ENVIRONMENT

pytest.importorskip("ray", reason="Ray is not installed: pip install 'jaxserve[ray]'")
# Importing Ray Serve takes seconds, and it uses what pydantic has deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

ROOT = Path(__file__).parents[2]
NAMES = ("a", "b", "c")
REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]


def chosen(router: Any, argument: Any, replicas: Any = REPLICAS) -> str:
    asked = SimpleNamespace(args=[argument], routing_context=SimpleNamespace(should_backoff=False))
    ((replica,),) = asyncio.run(router.choose_replicas(replicas, asked))
    assert asked.routing_context.should_backoff, "Ray would ask on without a pause"
    return replica.replica_id.unique_id


@pytest.fixture
def router() -> Any:
    from jaxserve.ray.routing import _ByPolicy

    made = _ByPolicy.__new__(_ByPolicy)  # Ray's own part of it needs a cluster
    made.initialize_state(policy="prefix_aware")
    return made


def test_a_prefix_goes_where_it_was_and_others_spread(router):
    first = {prefix: chosen(router, [prefix]) for prefix in (b"1", b"2", b"3")}
    assert sorted(first.values()) == list(NAMES)
    assert {prefix: chosen(router, [prefix, b"more"]) for prefix in first} == first
    assert [chosen(router, [b"1"], REPLICAS[1:]) for _ in range(2)].count("a") == 0, "it is not among them"


def test_what_ray_asks_without_a_prompt(router):
    """Ray's own proxy gives the request's bytes, which are no blocks: they match nothing."""
    assert sorted(chosen(router, b"bytes of a request") for _ in NAMES) == list(NAMES)
    assert asyncio.run(router.choose_replicas(REPLICAS)) == [REPLICAS] and asyncio.run(router.choose_replicas([])) == [[]]


def test_what_haproxy_asks_for():
    """A body in, the name of the replica out by which HAProxy knows it."""
    from starlette.testclient import TestClient

    from jaxserve.ray.routing import choosing_app

    asked: list[Any] = []

    class Handle:
        @contextlib.asynccontextmanager
        async def choose_replica(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            asked.append((args, options))
            name = SimpleNamespace(to_full_id_str=lambda: "SERVE_REPLICA::jaxserve#jaxserve#x")
            yield SimpleNamespace(_replica=SimpleNamespace(replica_id=name))

    client = TestClient(choosing_app(Handle()))
    for body in (b'{"prompt": "' + 600 * b"x" + b'"}', b'{"prompt": "' + 300 * b"x", b""):
        assert client.post("/internal/route", content=body).json() == {"replica_id": "SERVE_REPLICA::jaxserve#jaxserve#x"}
    assert [(len(blocks), options) for (blocks,), options in asked] == [(n, {"_reserve": False}) for n in (2, 0, 0)]


BUILD = """
import json, os, sys
if "joined" in sys.argv:
    import ray
    ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20, num_cpus=1)
    os.environ.update(json.loads(sys.argv[-1]))
from ray.serve._private.build_app import build_app
from jaxserve.ray import app
built = build_app(app({"model": "m", "router_policy": "prefix_aware"}), name="a", make_deployment_handle=lambda *_: "handle")
router = built.deployments[0]._deployment_config.request_router_config
print(json.dumps([built.ingress_deployment_name, built.ingress_request_router_deployment.name, router.request_router_kwargs]))
"""


def build(*args: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ROUTING_ENVIRONMENT} | variables
    command = [sys.executable, "-c", BUILD, *args]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


def test_the_application_has_an_ingress_that_chooses():
    done = build(**ROUTING_ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["jaxserve", "chooser", {"policy": "prefix_aware"}]


def test_what_must_be_in_the_environment():
    """Of this process, and of a cluster that it has joined."""
    needed = " ".join(f"{name}={value}" for name, value in ROUTING_ENVIRONMENT.items())
    assert f"router_policy: Ray's proxy must be HAProxy, and this process was started without {needed}: " in build().stderr
    assert f"and Ray's cluster was started without {needed}: " in build("joined", json.dumps(ROUTING_ENVIRONMENT)).stderr
