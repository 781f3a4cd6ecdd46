"""The rotary write for CPUs: `cpu.cc` as a foreign function of XLA's, which writes into the pages in place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu import library

DTYPES = ("bfloat16", "float32")


def lacks(*, head_dim: int, dtype: Any) -> str | None:
    """What the kernel lacks for this dtype, or this machine for the kernel; None if it can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"{jnp.dtype(dtype).name}: it has {' and '.join(DTYPES)}"
    return library.lacks()


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
    T, heads, H = qkv.shape
    q = jax.ShapeDtypeStruct((T, heads - 2 * kv_pages.shape[2], H), qkv.dtype)
    pages = jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype)
    call = jax.ffi.ffi_call("jaxserve_cpu_rotary_write", [q, pages], input_output_aliases={1: 1})
    scales = () if q_scale is None else (q_scale, k_scale)
    q, kv_pages = call(qkv, kv_pages, cos, sin, slot_mapping, *scales, eps=np.float32(eps))
    return q, kv_pages
