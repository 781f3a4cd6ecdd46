"""The one write to the paged KV cache, whose layout is `[num_pages, 2, K, page_size, H]` (2: keys, then values).

The caller's slots say where each token goes.
"""

import jax
import jax.numpy as jnp

from kernels.checks import Shapes


def write_kv(
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    slot_mapping: jax.Array,  # i32[T], page * page_size + offset; num_pages * page_size + t for padding
) -> jax.Array:  # [num_pages, 2, K, page_size, H]
    """Returns kv_pages with each token's key and value at its slot; in place where the caller donates kv_pages.

    Slots must be distinct, padding slots included: those lie past the end (`num_pages * page_size + t`) and are dropped.
    Negative slots are not allowed (-1 would be the last live slot). k and v are converted to the cache's dtype.

    Raises ValueError if shapes disagree or the slots are not int32.
    """
    shapes = Shapes()
    shapes.check("kv_pages", kv_pages, "num_pages 2 K page_size H")
    shapes.check("k", k, "T K H")
    shapes.check("v", v, "T K H")
    shapes.check("slot_mapping", slot_mapping, "T", jnp.int32)
    page_size = shapes["page_size"]
    with jax.named_scope("write_kv"):
        kv = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)  # [T, 2, K, H]
        # One scatter instead of two, and unique_indices: on a GPU a bf16 scatter without it is a compare-and-swap loop.
        return kv_pages.at[slot_mapping // page_size, :, :, slot_mapping % page_size].set(kv, mode="drop", unique_indices=True)
