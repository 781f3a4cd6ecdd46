"""The "xla" backend, and its parts, with which models compute norms and rotations anywhere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kernels.kv_cache import write_kv


def lacks(*, head_dim: int, dtype: Any) -> str | None:
    """Nothing."""
    return None


def rotary_write(
    qkv: jax.Array,  # [T, N + 2K, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    cos: jax.Array,  # f32[T, H/2]
    sin: jax.Array,  # f32[T, H/2]
    slot_mapping: jax.Array,  # i32[T]
    q_scale: jax.Array | None,  # [H]
    k_scale: jax.Array | None,  # [H]
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:  # [T, N, H], [num_pages, 2, K, page_size, H]
    """See api.rotary_write."""
    num_kv_heads = kv_pages.shape[2]
    q, k, v = split_heads(qkv, num_kv_heads, cos, sin, q_scale, k_scale, eps=eps)
    return q, write_kv(kv_pages, k, v, slot_mapping)


def split_heads(
    qkv: jax.Array,  # [..., N + 2K, H]
    num_kv_heads: int,
    cos: jax.Array,  # f32[..., H/2]
    sin: jax.Array,  # f32[..., H/2]
    q_scale: jax.Array | None,  # [H]
    k_scale: jax.Array | None,  # [H]
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q[..., N, H] and k[..., K, H], normed and rotated, and v[..., K, H]."""
    K = num_kv_heads
    N = qkv.shape[-2] - 2 * K
    qk, v = jnp.split(qkv, [N + K], axis=-2)
    if q_scale is not None and k_scale is not None:
        # Query and key heads at once: on a GPU a norm is a kernel, and this is one less a layer.
        is_query = jnp.arange(N + K)[:, None] < N
        qk = rms_normalize(qk, eps) * jnp.where(is_query, q_scale, k_scale)
    q, k = (apply_rope(heads, cos, sin) for heads in jnp.split(qk, [N], axis=-2))
    return q, k, v


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, computed in float32 and cast back."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


def apply_rope(
    x: jax.Array,  # [..., T, heads, H]
    cos: jax.Array,  # f32[..., T, H/2]
    sin: jax.Array,  # f32[..., T, H/2]
) -> jax.Array:
    """Rotates every head of every token; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
