"""The "mosaic" backend: norm, rotation and the write into pages as one kernel, from one source for every GPU from sm_80 on.

The rows of a batch are its tokens' heads, as they follow each other in what the projection gave: a token's query heads, then its
key heads, then its value heads. A thread block takes a few rows, wherever one token ends and the next begins. A row lies in a few
neighbouring lanes. Nothing passes between rows, and a row's operations are the same wherever it stands: its bits depend on the row
alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels import gpu, gpu_threads
from kernels.gpu_threads import RowTile, across

HEAD_DIMS = (64, 96, 128, 256)


def lacks(*, head_dim: int, dtype: Any) -> str | None:
    """What the kernel lacks for this model, or this device for the kernel, in words; None if it can."""
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: it has {', '.join(map(str, HEAD_DIMS))}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(dtype).name}: it has bfloat16 and float16"
    missing = None if gpu.is_interpreted() else gpu.missing_for_mma()
    return None if missing is None else f"a device: it needs {missing}"


class _Refs(NamedTuple):
    """The kernel's arguments in GMEM, those that it reads first."""

    pages: Any  # [num_pages * 2 * K * page_size, H], read and written
    qkv: Any  # [T * (N + 2K), H]
    cos: Any  # f32[T, H/2]
    sin: Any  # f32[T, H/2]
    slot_mapping: Any  # i32[T]
    q_scale: Any  # [1, H], or None as the next one
    k_scale: Any  # [1, H]
    q: Any  # [T * N, H]


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
    """See api.rotary_write. The pages are written in place where the caller donates them."""
    T, heads, H = qkv.shape
    K, page_size = kv_pages.shape[2:4]
    N = heads - 2 * K
    tile = RowTile.of(H // 2)
    scales = () if q_scale is None or k_scale is None else (q_scale.reshape(1, H), k_scale.reshape(1, H))

    def rotary_write(*args):
        *inputs, q = args
        refs = _Refs._make((*inputs, q) if scales else (*inputs, None, None, q))
        _rows(refs, tile, N, K, page_size, eps)

    pages = jax.new_ref(kv_pages.reshape(-1, H))
    q = gpu.kernel(
        rotary_write,
        out_type=jax.ShapeDtypeStruct((T * N, H), qkv.dtype),
        grid={"tile": -(-T * heads // tile.rows)},
        scratch_types=[],
    )(pages, qkv.reshape(T * heads, H), cos, sin, slot_mapping, *scales)
    return q.reshape(T, N, H), jax.freeze(pages).reshape(kv_pages.shape)


def _rows(refs: _Refs, tile: RowTile, N: int, K: int, page_size: int, eps: float) -> None:
    """One thread block: the rows of a tile."""
    num_rows, H = refs.qkv.shape
    half, heads = H // 2, N + 2 * K
    row = gpu_threads.row_numbers(tile) + lax.axis_index("tile") * tile.rows
    is_row = row < num_rows
    row = jnp.where(is_row, row, 0)
    token, head = lax.div(row, jnp.int32(heads)), lax.rem(row, jnp.int32(heads))
    is_query, is_value = head < N, head >= N + K

    first, second = (gpu_threads.load_rows(refs.qkv, row, at, half, tile) for at in (0, half))
    left, right = first, second
    if refs.q_scale is not None:
        left, right = _norm(refs, tile, is_query, left, right, eps)
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    cos, sin = (gpu_threads.load_rows(x, token, 0, half, tile) for x in (refs.cos, refs.sin))
    is_plain = across(is_value, half, tile)
    halves = (
        jnp.where(is_plain, first, (left * cos - right * sin).astype(first.dtype)),
        jnp.where(is_plain, second, (right * cos + left * sin).astype(first.dtype)),
    )

    slot = gpu_threads.load_values(refs.slot_mapping, token, tile)
    page, offset = lax.div(slot, jnp.int32(page_size)), lax.rem(slot, jnp.int32(page_size))
    kv_head = head - N  # of the keys, then of the values: they follow each other in a page too
    in_pages = (page * (2 * K) + kv_head) * page_size + offset
    is_slot = jnp.logical_and(slot >= 0, slot < refs.pages.shape[0] // (2 * K))
    to_pages = jnp.where(jnp.logical_and(is_row, jnp.logical_and(head >= N, is_slot)), in_pages, -1)
    to_queries = jnp.where(jnp.logical_and(is_row, is_query), token * N + head, -1)
    for target, rows in ((refs.q, to_queries), (refs.pages, to_pages)):
        for at, values in zip((0, half), halves, strict=True):
            gpu_threads.save_rows(values, target, rows, at, tile)


def _norm(refs: _Refs, tile: RowTile, is_query: Any, first: Any, second: Any, eps: float) -> tuple[Any, Any]:
    """Both halves of each row, normalised in float32, rounded to their dtype, then scaled by the queries' scale or the keys'."""
    half, dtype = first.shape[1], first.dtype
    x, y = first.astype(jnp.float32), second.astype(jnp.float32)
    mean = (x * x + y * y).sum(axis=1) * (1 / (2 * half))
    factor = across(lax.rsqrt(mean + eps), half, tile)
    of_query, none = across(is_query, half, tile), jnp.where(is_query, 0, 0)

    def scaled(x: Any, at: int) -> Any:
        q_scale, k_scale = (gpu_threads.load_rows(s, none, at, half, tile) for s in (refs.q_scale, refs.k_scale))
        scale = jnp.where(of_query, q_scale, k_scale).astype(jnp.float32)
        return ((x * factor).astype(dtype).astype(jnp.float32) * scale).astype(dtype)  # the product is exact in float32

    return scaled(x, 0), scaled(y, half)
