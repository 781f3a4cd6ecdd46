"""The entry to the rotary write: it checks the arguments and looks up the backend.

Owns the contract and its errors. The backends are the rows of `kernels.backends.ROTARY_WRITE`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from kernels.backends import ROTARY_WRITE
from kernels.checks import Shapes

DTYPES = ("bfloat16", "float16", "float32")


def rotary_write(
    qkv: jax.Array,  # [T, N + 2K, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    cos: jax.Array,  # f32[T, H/2]
    sin: jax.Array,  # f32[T, H/2]
    slot_mapping: jax.Array,  # i32[T], page * page_size + offset; num_pages * page_size + t for padding
    *,
    q_scale: jax.Array | None = None,  # [H]
    k_scale: jax.Array | None = None,  # [H]
    eps: float = 0.0,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:  # [T, N, H], [num_pages, 2, K, page_size, H]
    """Takes a token's query heads, key heads and value heads, as its projection has them. Returns (its queries, ready for
    attention; the pages with its key and value at its slot), in place where the caller donates kv_pages.

    Queries and keys are rotated by cos and sin, the first half of a head with the second (RoFormer, arXiv:2104.09864, in Hugging
    Face's layout), in float32, and rounded. With scales each head is normed before (RMSNorm, arXiv:1910.07467): divided by the root
    of its mean square plus eps in float32, rounded, then scaled, and rounded again. Values are not changed.

    Slots must be distinct, padding slots included: those lie past the end (`num_pages * page_size + t`), and nothing of such a
    token is written. Negative slots are not allowed. The contents of arrays can't be checked inside a traced program.

    Args:
        q_scale, k_scale: of the norms, both or neither.
        backend: one of `kernels.backends.ROTARY_WRITE.names`; "auto" is "mosaic" on a GPU from compute capability 8.0 on that can
            take the shapes and the dtype, else "xla".

    Raises:
        ValueError: an argument's shape, dtype or value is wrong.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    shapes = Shapes()
    shapes.check("kv_pages", kv_pages, "num_pages 2 K page_size H")
    shapes.check("qkv", qkv, "T heads H")
    shapes.sizes["half_H"] = half = shapes["H"] // 2
    heads, K, dtype = shapes["heads"], shapes["K"], qkv.dtype
    if heads <= 2 * K or (heads - 2 * K) % K:
        raise ValueError(f"{qkv.shape=} has {heads} heads; must be {K} for keys, {K} for values and a multiple of {K} for queries")
    if 2 * half != shapes["H"]:
        raise ValueError(f"{qkv.shape=} has heads of {shapes['H']}; must be even, to be rotated by halves")
    if dtype != kv_pages.dtype or dtype.name not in DTYPES:
        raise ValueError(f"{qkv.dtype=} and {kv_pages.dtype=} must be the same, one of {', '.join(DTYPES)}")
    for name, angle in (("cos", cos), ("sin", sin)):
        shapes.check(name, angle, "T half_H", jnp.float32)
    shapes.check("slot_mapping", slot_mapping, "T", jnp.int32)
    if (q_scale is None) != (k_scale is None):
        raise ValueError(f"{'q_scale' if q_scale is None else 'k_scale'} is None and the other one is not: give both or neither")
    if q_scale is not None:
        shapes.check("q_scale", q_scale, "H", dtype)
        shapes.check("k_scale", k_scale, "H", dtype)
    name = resolve_backend(backend, head_dim=shapes["H"], dtype=dtype)
    with jax.named_scope(f"rotary_write_{name}"):
        write = ROTARY_WRITE[name].functions.rotary_write
        return write(qkv, kv_pages, cos, sin, slot_mapping, q_scale, k_scale, eps=eps)


def resolve_backend(backend: str, *, head_dim: int, dtype: Any, left_out: Collection[str] = ()) -> str:
    """The backend that runs. left_out: backends that "auto" must not take on this device.

    Raises: ValueError, NotImplementedError as `rotary_write` does.
    """
    return ROTARY_WRITE.resolve(backend, lambda row: row.functions.lacks(head_dim=head_dim, dtype=dtype), left_out)
