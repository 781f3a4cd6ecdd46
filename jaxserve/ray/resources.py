"""What an engine takes of a cluster of Ray's. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.config import engine_config


def num_devices(engine: Mapping[str, Any]) -> int:
    """Devices of an engine with these options."""
    config = engine_config(dict(engine))
    return config.tensor_parallel_size * config.pipeline_parallel_size


def replica_resources(
    cluster: Mapping[str, float] | None, engine: Mapping[str, Any], num_replicas: int, gpus_per_replica: int | None
) -> dict[str, int]:
    """num_cpus and num_gpus of each of so many engines.

    cluster: what there is, by Ray's names. None: nobody knows yet, and it is thought to have GPUs enough.
    gpus_per_replica: None: the engine's devices if the cluster has GPUs, else none. A number is taken as it is, since a cluster
      that grows on demand may have no GPU yet.

    Raises:
      ValueError: the cluster has too few GPUs, or CPUs, for them.
    """
    if cluster is None or gpus_per_replica is not None:
        return {"num_cpus": 1, "num_gpus": num_devices(engine) if gpus_per_replica is None else gpus_per_replica}
    num_gpus = num_devices(engine) if cluster.get("GPU") else 0
    kind, each = ("GPU", num_gpus) if num_gpus else ("CPU", 1)
    need, there = each * num_replicas, cluster.get(kind, 0)
    if there < need:
        raise ValueError(
            f"{num_replicas} replicas of {each} {kind} each need {need}, and Ray's cluster has {there:g}: "
            "give fewer replicas, or gpus_per_replica where the cluster grows"
        )
    return {"num_cpus": 1, "num_gpus": num_gpus}
