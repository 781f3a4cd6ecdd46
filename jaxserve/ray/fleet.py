"""How many replicas of a server there are: what a user may choose, what each needs, and how many the load asks for.

Owns `FleetOptions` and the rule of scaling. Knows nothing of Ray, so that the rule is tried without it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from jaxserve.config import engine_config
from jaxserve.ray.resources import num_devices
from jaxserve.routing.policy import ROUTING_POLICIES
from jaxserve.serving.options import (
    LISTENER_OPTIONS,
    ModelOptions,
    ServerOptions,
    check_can_share,
    read_chat_template,
    with_key_of_environment,
)

TARGET_LOAD = 0.7  # of a replica: above it another one is asked for


@dataclass(frozen=True, kw_only=True)
class FleetOptions(ModelOptions):
    """Replicas of one server on Ray, beside the options of its model.

    server: options of the HTTP application.
    replicas: how many there are, or at least are where max_replicas is given. max_replicas: up to which they follow the load.
    scale_up_seconds, scale_down_seconds: how long the load must ask for more or fewer of them.
    gpus_per_replica: None: as many as the engine has devices if the cluster has GPUs, else none.
    hosts_per_replica: processes that share a replica's devices, on one machine or on several, each with as many of them.
    router_policy: one of jaxserve.routing's ROUTING_POLICIES, by which a request's replica is chosen; None: Ray's own choice.
    grace: seconds in which a replica that is taken away may finish what it has begun.
    access_log: whether each request has a line in its replica's log.

    Raises:
      ValueError: as `ModelOptions`; an option out of its range, or of the engine's that is wrong; with several replicas as
        `check_can_share`; enable_control where their number changes.
      NotImplementedError: a role, keys with limits, or options that engines of several devices or hosts do not have.
    """

    server: ServerOptions
    replicas: int = 1
    max_replicas: int | None = None
    scale_up_seconds: float = 30.0
    scale_down_seconds: float = 600.0
    gpus_per_replica: int | None = None
    hosts_per_replica: int = 1
    router_policy: str | None = None
    grace: float = 30.0
    access_log: bool = True

    @property
    def has_several(self) -> bool:
        """Whether there may be more replicas than one."""
        return (self.max_replicas or self.replicas) > 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicas < 1 or (self.max_replicas is not None and self.max_replicas < self.replicas):
            raise ValueError(f"replicas={self.replicas} must be at least 1, and max_replicas={self.max_replicas} no less than that")
        if self.hosts_per_replica < 1:
            raise ValueError(f"hosts_per_replica={self.hosts_per_replica} must be at least 1")
        if self.gpus_per_replica is not None and self.gpus_per_replica < 0:
            raise ValueError(f"gpus_per_replica={self.gpus_per_replica} must be at least 0")
        if self.router_policy is not None and self.router_policy not in ROUTING_POLICIES:
            raise ValueError(f"router_policy={self.router_policy!r} must be one of {', '.join(ROUTING_POLICIES)}")
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
        if self.has_several:
            check_can_share(self.server, "replicas", asks_all=True)
        if self.server.enable_control and self.max_replicas not in (None, self.replicas):
            raise ValueError(
                f"enable_control: not with max_replicas={self.max_replicas}: a replica that is added later would run, with the "
                "weights of the model's files; leave one of them out"
            )
        devices = num_devices(self.engine)
        if devices % self.hosts_per_replica:
            raise ValueError(
                f"hosts_per_replica={self.hosts_per_replica} must divide the {devices} devices of a replica: raise "
                "tensor_parallel_size or pipeline_parallel_size"
            )
        from jaxserve.engine.sharding import check_sharding  # imports jax

        check_sharding(engine_config(dict(self.engine)), self.hosts_per_replica)


_FLAGS = {"served_model_name": "names", "api_key": "api_keys"}  # arguments that are called as the flags are -> the field
# Fields of options that are no argument: the engine's own stand beside the others, `names` and `api_keys` are called as the flags,
# and of the last Ray's proxy, which has the connections, knows nothing.
_NO_ARGS = {"engine", "server", "names", "api_keys", "root", "cross_origin", *LISTENER_OPTIONS}


def fleet_options(args: Mapping[str, Any]) -> FleetOptions:
    """The options that `serve run` or a config file of Ray Serve gives: `name=value`, where a value may be text. An API key may
    also be in the environment, as JAXSERVE_API_KEY. ValueError: as `FleetOptions`, and for a name that there is not."""
    if "model" not in args:
        raise ValueError("give model=MODEL: a Hugging Face folder or id, or a GGUF file")
    given = {"served_model_name": args["model"], **args}
    if "chat_template" in given:
        given["chat_template"] = read_chat_template(str(given["chat_template"]))
    chosen, server = _taken(FleetOptions, given), _taken(ServerOptions, given)
    server["api_keys"] = with_key_of_environment(server.get("api_keys", ()))
    engine = {name: _plain(value) for name, value in given.items()}
    return FleetOptions(**chosen, engine=engine, server=ServerOptions(**server, root=chosen["model"]))


def _taken(options: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `options` that are given, which are taken out of there. ValueError: one of a wrong kind."""
    kinds = get_type_hints(options)
    taken: dict[str, Any] = {}
    for field in fields(options):
        name = next((flag for flag, meant in _FLAGS.items() if meant == field.name), field.name)
        if name in given and name not in _NO_ARGS:
            taken[field.name] = _converted(name, given.pop(name), kinds[field.name])
    return taken


def _converted(name: str, value: Any, kind: Any) -> Any:
    """A value as a field of this kind has it. A text may be that of JSON, or of several texts with commas between them."""
    import msgspec  # of the extra [serve], without which a fleet's options and its rule can be had

    several = [str(value).split(",")] if isinstance(value, str | int) else []
    for form in (value, _plain(value), str(value), *several):
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(form, kind, strict=form is not value)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


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
