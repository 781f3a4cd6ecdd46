"""The "xla" backend of the sum over devices: the collective of the platform."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def lacks() -> str | None:
    """Nothing."""
    return None


def fits(shape: tuple[int, ...], dtype: Any, num_devices: int) -> bool:
    """Every message."""
    return True


def all_reduce(x: jax.Array, *, axis: str, num_devices: int) -> jax.Array:
    """See api.all_reduce."""
    return lax.psum(x, axis)
