"""The specification of ragged paged attention: one query at a time in float32, over its sequence's whole page-table row.

Slow on purpose: short and obvious.
"""

from typing import Any

import jax
import jax.numpy as jnp


def lacks(**_: Any) -> None:
    """What this backend can't do: nothing."""


def plan_work(*_: Any, **__: Any) -> None:
    """Nothing: the spec has no plan."""


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[S, P]
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_q_len: int,
    work: None = None,
) -> jax.Array:  # [T, N, H]
    """Attention of every query over its own sequence's keys; rows past cu_q_lens[-1] are zero. See api for the arguments."""
    if work is not None:
        raise ValueError(f"work={type(work).__name__}(...) was planned for another backend; reference takes None")
    T, N, H = q.shape
    num_pages, _, K, page_size, _ = kv_pages.shape
    S, P = page_table.shape

    def one_query(args):
        t, q = args  # i32[], [N, H]
        seq = jnp.minimum(jnp.sum(t >= cu_q_lens[1:]), S - 1)
        position = kv_lens[seq] - (cu_q_lens[seq + 1] - t)
        pages = kv_pages[jnp.clip(page_table[seq], 0, num_pages - 1)].astype(jnp.float32)  # [P, 2, K, page_size, H]
        k, v = jnp.moveaxis(pages, 0, 2).reshape(2, K, P * page_size, H)

        key_position = jnp.arange(P * page_size)
        seen = (key_position <= position) & (t < cu_q_lens[-1])
        if sliding_window is not None:
            seen &= key_position > position - sliding_window
        x = jnp.einsum("KGH,KCH->KGC", q.astype(jnp.float32).reshape(K, N // K, H), k, precision="highest") * scale
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where(seen, x, -jnp.inf)
        weights = jnp.where(seen, jax.nn.softmax(x, axis=-1), 0)
        v = jnp.where(seen[:, None], v, 0)  # 0 * NaN is NaN: a value that is not seen may be NaN, and must not be multiplied either
        return jnp.einsum("KGC,KCH->KGH", weights, v, precision="highest").reshape(N, H).astype(q.dtype)

    return jax.lax.map(one_query, (jnp.arange(T), q))
