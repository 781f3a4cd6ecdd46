"""Replicas on Ray: the server as a Ray Serve application, and engines for Ray Data. `serve run jaxserve.ray:app model=...`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Builds the application for `serve run jaxserve.ray:app model=MODEL replicas=2 max_num_seqs=64`, or a Ray Serve config.

    args: model; replicas, max_replicas, gpus_per_replica and the other fields of `fleet.FleetOptions`; served_model_name, api_key
      and the like as flags of `jaxserve serve`; and options of an engine. Values may be text, as on a command line.

    Raises:
      ValueError: an argument that there is not, or one out of its range.
    """
    from jaxserve.ray.application import build
    from jaxserve.ray.fleet import fleet_options

    return build(fleet_options(args))


def __getattr__(name: str) -> Any:
    if name == "Generate":
        from jaxserve.ray.batches import Generate

        return Generate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
