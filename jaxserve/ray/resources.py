"""What an engine takes of a cluster of Ray's, and what Ray's processes must be told. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.config import engine_config

# For a policy of the router's: HAProxy in place of the proxy in Python, and that it shows our ingress the bodies of requests.
ROUTING_ENVIRONMENT: dict[str, str] = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1"}


def num_devices(engine: Mapping[str, Any]) -> int:
    """Devices of an engine with these options."""
    config = engine_config(dict(engine))
    return config.tensor_parallel_size * config.pipeline_parallel_size


def host_resources(
    cluster: Mapping[str, float] | None,
    engine: Mapping[str, Any],
    num_replicas: int,
    gpus_per_replica: int | None,
    hosts_per_replica: int = 1,
) -> dict[str, int]:
    """num_cpus and num_gpus of each host of so many engines.

    cluster: what there is, by Ray's names. None: nobody knows yet, and it is thought to have GPUs enough.
    gpus_per_replica: None: the engine's devices if the cluster has GPUs, else none. A number is taken as it is, since a cluster
      that grows on demand may have no GPU yet.
    hosts_per_replica: processes of an engine, each with as many of its devices.

    Raises:
      ValueError: the cluster has too few GPUs, or CPUs, for them; GPUs that the hosts do not divide.
    """
    num_gpus = gpus_per_replica
    if num_gpus is None:
        num_gpus = num_devices(engine) if cluster is None or cluster.get("GPU") else 0
    if num_gpus % hosts_per_replica:
        raise ValueError(f"hosts_per_replica={hosts_per_replica} must divide the {num_gpus} GPUs of a replica")
    found = {"num_cpus": 1, "num_gpus": num_gpus // hosts_per_replica}
    if cluster is None or gpus_per_replica is not None:
        return found
    kind, each = ("GPU", num_gpus) if num_gpus else ("CPU", hosts_per_replica)
    need, there = each * num_replicas, cluster.get(kind, 0)
    if there < need:
        raise ValueError(
            f"{num_replicas} replicas of {each} {kind} each need {need}, and Ray's cluster has {there:g}: "
            "give fewer replicas, or gpus_per_replica where the cluster grows"
        )
    return found
