"""Arrays to the devices of a program and back, also where some of these devices belong to other processes.

Owns how an array rests on the host: a process keeps what its own devices have.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

SLEEP_PARTS: tuple[str, ...] = ("weights", "kv_cache")  # what an engine's sleep frees, and may wake alone: vLLM's tags


def to_host(x: Any) -> Any:
    """A copy in the host's memory, for `to_device`: of a global array the parts that this process's devices have."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return {shard.device: np.array(shard.data) for shard in x.addressable_shards}
    return np.array(x)


def to_device(x: Any, abstract: jax.ShapeDtypeStruct) -> jax.Array:
    """What `to_host` gave, or a numpy array that is the same on every host, on the devices that the abstract array names."""
    sharding = abstract.sharding
    if isinstance(x, dict):
        assert sharding is not None
        parts = [jax.device_put(part, device) for device, part in x.items()]
        return jax.make_array_from_single_device_arrays(abstract.shape, sharding, parts, dtype=abstract.dtype)
    if sharding is None:
        return jax.device_put(x, jax.local_devices()[0])
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index], dtype=x.dtype)
