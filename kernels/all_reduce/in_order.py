"""The "in_order" backend of the sum over devices: every device gathers all parts and adds them from the first device to the last.

On CPUs XLA's own sum within a process has this order and these bits. Over several processes it is gloo's, which adds around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels.backends import current_platform


def lacks() -> str | None:
    """What the device can't do, in words: on GPUs a sum is NCCL's."""
    platform = current_platform()
    return None if platform == "cpu" else f"a device: it needs a CPU, found {platform}"


def fits(shape: tuple[int, ...], dtype: Any, num_devices: int) -> bool:
    """Floats of three devices and more: a sum of two, or of integers, has one result in any order."""
    return num_devices > 2 and jnp.issubdtype(dtype, jnp.floating)


def in_order(part: Callable[[int], Any], num_devices: int) -> Any:
    """f32: part(0) + part(1) + ..., in this order."""
    total = part(0).astype(jnp.float32)
    for device in range(1, num_devices):
        total = total + part(device).astype(jnp.float32)
    return total


def all_reduce(x: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """See api.all_reduce."""
    parts = lax.all_gather(x, axis)  # [num_devices, *x.shape]
    return in_order(lambda device: parts[device], num_devices).astype(x.dtype)
