"""How many replicas of a server there are: what a user may choose, what each needs, and how many the load asks for.

Owns `FleetOptions` and the rule of scaling. Knows nothing of Ray, so that the rule is tried without it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jaxserve.config import engine_config
from jaxserve.ray.resources import num_devices
from jaxserve.serving.options import MAX_FAILURES, MAX_WAITING, ServerOptions

TARGET_LOAD = 0.7  # of a replica: above it another one is asked for


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Replicas of one server on Ray.

    model, tokenizer: as `LLM`'s. engine: options of `LLM`. server: those of the HTTP application.
    max_waiting, request_timeout, max_failures: as `AsyncLLM`'s.
    replicas: how many there are, or at least are where max_replicas is given. max_replicas: up to which they follow the load.
    scale_up_seconds, scale_down_seconds: how long the load must ask for more or fewer of them.
    gpus_per_replica: None: as many as the engine has devices if the cluster has GPUs, else none.
    hosts_per_replica: processes that share a replica's devices, on one machine or on several, each with as many of them.
    grace: seconds in which a replica that is taken away may finish what it has begun.

    Raises:
      ValueError: an option out of its range, or of the engine's that is wrong.
      NotImplementedError: a role, keys with limits, or options that engines of several devices or hosts do not have.
    """

    model: str
    tokenizer: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: ServerOptions
    max_waiting: int = MAX_WAITING
    request_timeout: float | None = None
    max_failures: int = MAX_FAILURES
    replicas: int = 1
    max_replicas: int | None = None
    scale_up_seconds: float = 30.0
    scale_down_seconds: float = 600.0
    gpus_per_replica: int | None = None
    hosts_per_replica: int = 1
    grace: float = 30.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or (self.max_replicas is not None and self.max_replicas < self.replicas):
            raise ValueError(f"replicas={self.replicas} must be at least 1, and max_replicas={self.max_replicas} no less than that")
        if self.hosts_per_replica < 1:
            raise ValueError(f"hosts_per_replica={self.hosts_per_replica} must be at least 1")
        if self.gpus_per_replica is not None and self.gpus_per_replica < 0:
            raise ValueError(f"gpus_per_replica={self.gpus_per_replica} must be at least 0")
        for name in ("grace", "scale_up_seconds", "scale_down_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds >= 0")
        if self.server.role is not None:
            raise NotImplementedError(f"role={self.server.role!r}: servers with roles stand behind `jaxserve router`, not on Ray")
        if self.server.api_keys_file is not None:
            raise NotImplementedError(
                f"api_keys_file={self.server.api_keys_file!r}: each replica would count requests and tokens for itself; "
                "give api_key, or put `jaxserve router` with the file before the replicas"
            )
        devices = num_devices(self.engine)
        if devices % self.hosts_per_replica:
            raise ValueError(
                f"hosts_per_replica={self.hosts_per_replica} must divide the {devices} devices of a replica: raise "
                "tensor_parallel_size or pipeline_parallel_size"
            )
        from jaxserve.engine.sharding import check_sharding  # imports jax

        check_sharding(engine_config(dict(self.engine)), self.hosts_per_replica)


_SERVER_ARGS = ("served_model_name", "api_key", "enable_control")


def fleet_options(args: Mapping[str, Any]) -> FleetOptions:
    """The options that `serve run` or a config file of Ray Serve gives: `name=value`, where a value may be text. ValueError: as
    `FleetOptions`, and for a name that there is not."""
    given = {name: _plain(value) for name, value in args.items()}
    if "model" not in given:
        raise ValueError("give model=MODEL: a Hugging Face folder or id, or a GGUF file")
    own = {f.name for f in fields(FleetOptions)} - {"engine", "server"}
    chosen = {name: given.pop(name) for name in list(given) if name in own}
    chosen["model"] = str(args["model"])
    said = {name: given.pop(name) for name in _SERVER_ARGS if name in given}
    names, keys = said.get("served_model_name", chosen["model"]), said.get("api_key", ())
    server = ServerOptions(
        names=tuple(str(names).split(",")),
        api_keys=(str(keys),) if isinstance(keys, str | int) else tuple(keys),
        enable_control=bool(said.get("enable_control", False)),
    )
    return FleetOptions(**chosen, engine=given, server=server)


def _plain(value: Any) -> Any:
    """A value as Python has it: text that is JSON is read as that."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def replica_load(num_running: int, num_waiting: int, max_num_seqs: int, kv_usage: float) -> float:
    """How much of a replica its requests need: the larger of the share of its sequences and of its KV pages that are in use, and
    on top what waits, as a share of its sequences. Above 1 requests wait."""
    return max(num_running / max_num_seqs, kv_usage) + num_waiting / max_num_seqs


def replicas_wanted(loads: Sequence[float]) -> int:
    """How many replicas bring these loads, of all replicas that say theirs, to TARGET_LOAD; 1 at least."""
    return max(1, math.ceil(sum(loads) / TARGET_LOAD - 1e-9))
