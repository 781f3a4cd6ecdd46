"""The rotary write's specification, in numpy: float64, rounded to the dtype where the contract says so, token by token."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def rotary_write(
    qkv: Array,  # [T, N + 2K, H]
    kv_pages: Array,  # [num_pages, 2, K, page_size, H]
    cos: Array,  # f32[T, H/2]
    sin: Array,  # f32[T, H/2]
    slot_mapping: Array,  # i32[T]
    q_scale: Array | None,  # [H]
    k_scale: Array | None,  # [H]
    *,
    eps: float,
) -> tuple[Array, Array]:  # float64 [T, N, H], [num_pages, 2, K, page_size, H]
    """See api.rotary_write. Results are not rounded at the end."""
    (num_pages, _, K, page_size, _), (T, heads, _), dtype = kv_pages.shape, qkv.shape, qkv.dtype
    N = heads - 2 * K
    queries, pages = np.zeros((T, N, qkv.shape[2])), kv_pages.astype(np.float64)
    for t in range(T):
        x, slot = qkv[t].astype(np.float64), slot_mapping[t]
        q, k, v = x[:N], x[N : N + K], x[N + K :]
        if q_scale is not None and k_scale is not None:
            q, k = _norm(q, q_scale, eps, dtype), _norm(k, k_scale, eps, dtype)
        queries[t] = _rotate(q, cos[t], sin[t])
        if slot < num_pages * page_size:
            pages[slot // page_size, :, :, slot % page_size] = _rotate(k, cos[t], sin[t]), v
    return queries, pages


def _norm(x: Array, scale: Array, eps: float, dtype: np.dtype) -> Array:
    rms = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    normed = (x / rms).astype(dtype).astype(np.float64)
    return (normed * scale.astype(np.float64)).astype(dtype).astype(np.float64)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos.astype(np.float64), sin.astype(np.float64)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
