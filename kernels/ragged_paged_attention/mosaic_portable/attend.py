"""The "mosaic_portable" backend: which models and devices it can serve, and its two kernels called one after the other.

The kernel computes the items of a work list; `join` joins the partial results of sequences that were split.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kernels import gpu
from kernels.ragged_paged_attention.logits import ROWS
from kernels.ragged_paged_attention.mosaic_portable import join, kernel
from kernels.ragged_paged_attention.mosaic_portable.tiles import PortablePlanner, PortableWork
from kernels.ragged_paged_attention.mosaic_sm90.geometry import Geometry
from kernels.ragged_paged_attention.mosaic_sm90.work_list import BLOCK

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 96, 128, 256)

make_planner = PortablePlanner.make


def lacks(*, num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> str | None:
    """What the kernel lacks for this model, or this device for the kernel, in words; None if it can."""
    dtype, G = jnp.dtype(dtype).name, num_query_heads // num_kv_heads
    if dtype not in DTYPES:
        return f"{dtype}: it has {' and '.join(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: it has {', '.join(map(str, HEAD_DIMS))}"
    if G > ROWS:
        return f"{G} query heads a KV head: it has up to {ROWS}"
    if page_size not in (16, 32) and page_size % BLOCK:
        return f"page_size={page_size}: it has 16, 32 and multiples of {BLOCK}"
    missing = gpu.missing_for_mma()
    return None if missing is None else f"a device: it needs {missing}"


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
    work: Any,  # PortableWork or None
) -> jax.Array:  # [T, N, H]
    """See api.ragged_paged_attention. Rows past cu_q_lens[-1] are not written."""
    if work is None:
        work = _plan_here(q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window)
    if not isinstance(work, PortableWork):
        raise ValueError(f"work={type(work).__name__}(...) was not planned for mosaic_portable: pass its planner's work(...)")
    _check_work(work.planner, q, kv_pages, page_table, max_q_len, sliding_window)
    N, K, page_size = q.shape[1], *kv_pages.shape[2:4]
    shape, tiles = work.planner.shape, work.planner.tiles
    at = {name: where.start for name, (where, _) in shape.fields.items()}
    geometry = Geometry(
        consumers=1,
        stages=tiles.stages,
        chunk_blocks=tiles.chunk // BLOCK,
        num_kv_heads=K,
        items_at=at["items"],
        order_at=at["order"],
        cta_start_at=at["cta_start"],
        group=N // K,
        tokens=shape.tile_tokens,
        page_size=page_size,
        split_rows=shape.split_q_len * (N // K) if shape.num_slots else 0,
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        interpreted=False,
    )
    out, partial = kernel.run_items(
        *(q, kv_pages, page_table, cu_q_lens, kv_lens, work.packed),
        geometry=geometry,
        num_ctas=shape.num_ctas,
        num_slots=shape.num_slots,
    )
    if partial is None:
        return out
    return join.join_partials(
        *(out, partial, work.packed, cu_q_lens),
        split_rows=geometry.split_rows,
        num_split_at=at["num_split"],
        groups_at=at["groups"],
        num_ctas=min(shape.num_ctas, shape.num_groups * K),
        num_kv_heads=K,
    )


def _check_work(planner: PortablePlanner, q, kv_pages, page_table, max_q_len: int, sliding_window: int | None) -> None:
    """ValueError if the planner was made for another call than this one."""
    T, N, _ = q.shape
    K, page_size = kv_pages.shape[2:4]
    S, P = page_table.shape
    shape = planner.shape
    given = (T, S, max_q_len, K, sliding_window)
    planned = (shape.num_tokens, shape.num_seqs, shape.max_q_len, shape.num_kv_heads, shape.sliding_window)
    if given != planned or P * page_size > shape.max_kv_len or shape.tile_tokens != planner.tiles.tile_tokens(N // K, max_q_len):
        raise ValueError(
            f"work was planned for (T, S, max_q_len, K, sliding_window)={planned}, tiles of {shape.tile_tokens} tokens and rows of "
            f"{shape.max_kv_len} positions, not for {given}, {N // K} query heads a KV head and {P * page_size} positions: "
            "make a planner of this call's shapes with host_planner('mosaic_portable')"
        )


def _plan_here(q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window) -> PortableWork:
    """A work list from lengths that are at hand: for calls outside of jit."""
    if isinstance(cu_q_lens, Tracer) or isinstance(kv_lens, Tracer):
        raise ValueError(
            "mosaic_portable is planned on the host: inside jit, pass work=planner.work(array that planner.plan made), "
            "of a planner that host_planner('mosaic_portable') makes"
        )
    planner = PortablePlanner.make(
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
