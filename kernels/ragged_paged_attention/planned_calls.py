"""What the Mosaic backends ask of a call: what they lack for a model, and whether their work was planned for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kernels.ragged_paged_attention.logits import ROWS
from kernels.ragged_paged_attention.work_list import BLOCK

DTYPES = ("bfloat16", "float16")


def model_lacks(
    head_dims: Sequence[int], *, num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any
) -> str | None:
    """What a kernel of these head_dims lacks for a model, in words; None if nothing."""
    dtype, G = jnp.dtype(dtype).name, num_query_heads // num_kv_heads
    if dtype not in DTYPES:
        return f"{dtype}: it has {' and '.join(DTYPES)}"
    if head_dim not in head_dims:
        return f"head_dim={head_dim}: it has {(' and ' if len(head_dims) == 2 else ', ').join(map(str, head_dims))}"
    if G > ROWS:
        return f"{G} query heads a KV head: it has up to {ROWS}"
    if page_size not in (16, 32) and page_size % BLOCK:
        return f"page_size={page_size}: it has 16, 32 and multiples of {BLOCK}"
    return None


def check_work(backend: str, planner: Any, q, kv_pages, page_table, max_q_len: int, sliding_window: int | None) -> None:
    """ValueError if the planner was made for another call than this one."""
    T, N, _ = q.shape
    K, page_size = kv_pages.shape[2:4]
    S, P = page_table.shape
    shape, tiles = planner.shape, planner.tiles
    given = (T, S, max_q_len, K, sliding_window)
    planned = (shape.num_tokens, shape.num_seqs, shape.max_q_len, shape.num_kv_heads, shape.sliding_window)
    if given != planned or P * page_size > shape.max_kv_len or shape.tile_tokens != tiles.tile_tokens(N // K, max_q_len):
        raise ValueError(
            f"work was planned for (T, S, max_q_len, K, sliding_window)={planned}, tiles of {shape.tile_tokens} tokens and rows of "
            f"{shape.max_kv_len} positions, not for {given}, {N // K} query heads a KV head and {P * page_size} positions: "
            f"make a planner of this call's shapes with host_planner({backend!r})"
        )


def plan_here(backend: str, make: Any, q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window) -> Any:
    """A work list from lengths that are at hand: for calls outside of jit. make: the backend's planner."""
    if isinstance(cu_q_lens, Tracer) or isinstance(kv_lens, Tracer):
        raise ValueError(
            f"{backend} is planned on the host: inside jit, pass work=planner.work(array that planner.plan made), "
            f"of a planner that host_planner({backend!r}) makes"
        )
    planner = make(
        num_tokens=q.shape[0],
        num_seqs=kv_lens.shape[0],
        max_q_len=max_q_len,
        num_query_heads=q.shape[1],
        num_kv_heads=kv_pages.shape[2],
        head_dim=q.shape[2],
        max_kv_len=page_table.shape[1] * kv_pages.shape[3],
        sliding_window=sliding_window,
    )
    return planner.work(jnp.asarray(planner.plan(np.diff(np.asarray(cu_q_lens)), np.asarray(kv_lens))))
