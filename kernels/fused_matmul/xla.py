"""The "xla" backend: the steps one by one, each rounded, as models compute them anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels.rotary_write.xla import rms_normalize


def lacks(*, depth: int, num_columns: int, gated: bool, dtype: Any) -> str | None:
    """Nothing."""
    return None


def matmul(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [D, F], or [F, D] where transposed
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [F]
    residual: jax.Array | None,  # [T, F]
    *,
    eps: float,
    gated: bool,
    transposed: bool = False,
    dtype: Any = None,
) -> jax.Array:  # [T, F], or [T, F / 2]
    """See api.fused_matmul."""
    axes = (((1,), (1 if transposed else 0,)), ((), ()))
    product = lambda x: jax.lax.dot_general(x, w, axes, preferred_element_type=dtype)  # noqa: E731
    return around(product, x, scale, bias, residual, eps=eps, gated=gated)


def around(
    product: Callable[[jax.Array], jax.Array],  # [T, D] -> [T, F]
    x: jax.Array,  # [T, D]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [F]
    residual: jax.Array | None,  # [T, F]
    *,
    eps: float,
    gated: bool,
) -> jax.Array:  # [T, F], or [T, F / 2]
    """A product and what stands around it, as in api.fused_matmul."""
    x = x if scale is None else rms_normalize(x, eps) * scale
    y = product(x)
    y = y if bias is None else y + bias
    y = y if residual is None else y + residual
    return silu_gated(y) if gated else y


def silu_gated(gate_up: jax.Array) -> jax.Array:  # [..., 2F] -> [..., F]
    """silu(the first half of the columns) times the second half, computed in float32 and cast back."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate_up.dtype)
