"""Matmuls of a model that is trained: products of bfloat16 summed in float32, of weights and rows that stay float32.

Source: Micikevicius et al., 1710.03740, with bfloat16, which needs no scaling of the loss. Owns the product and its gradient; what
stands around it is that of `kernels.fused_matmul`. Everything else of a model stays float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jaxserve.models.layers import Fused
from kernels.fused_matmul.xla import around


def product(x: jax.Array, weight: jax.Array) -> jax.Array:  # f32[T, in], f32[in, out] -> f32[T, out]
    """x @ weight of both rounded to bfloat16."""
    return _product(x, weight)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _forward(x, weight)[0]


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return _dot(x, weight, 0), (x, weight)


def _backward(kept: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """On a CPU x is transposed in memory: XLA multiplies a left operand that lies so twice as fast (407 in place of 183
    multiplications a nanosecond, medians over an EAGLE-3 head's matrices with 672 rows, two cores of a Zen 5)."""
    (x, weight), g = kept, g.astype(jnp.bfloat16)
    turned = with_layout_constraint(x.T, Layout(major_to_minor=(0, 1))) if jax.default_backend() == "cpu" else x.T
    return _dot(g, weight, 1), _dot(turned, g, 0)


def _dot(a: jax.Array, b: jax.Array, b_axis: int) -> jax.Array:
    return jax.lax.dot_general(a, b, (((1,), (b_axis,)), ((), ())), preferred_element_type=jnp.float32)


_product.defvjp(_forward, _backward)


def _matmul(
    x: jax.Array,  # [T, in]
    kernel: jax.Array,  # f32[in, out]
    *,
    scale: jax.Array | None = None,
    eps: float = 0.0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    gated: bool = False,
    dtype: Any = None,
) -> jax.Array:  # f32[T, out], or f32[T, out / 2] where gated
    """As `kernels.fused_matmul`, of a `Linear`'s matrix; results are float32."""
    assert kernel.dtype == jnp.float32 and dtype in (None, jnp.float32)
    return around(lambda x: product(x, kernel), x.astype(jnp.float32), scale, bias, residual, eps=eps, gated=gated)


MIXED = Fused(_matmul, residuals=True, any_layout=True)
