"""The "mosaic_sm90" backend: which models and devices it can serve, and its two kernels called one after the other.

The kernel computes the items of a work list; `combine` joins the partial results of sequences that were split.
"""

from __future__ import annotations

from typing import Any

import jax

from kernels import gpu
from kernels.ragged_paged_attention.geometry import Geometry
from kernels.ragged_paged_attention.mosaic_sm90 import combine, kernel
from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner, WorkList
from kernels.ragged_paged_attention.planned_calls import check_work, model_lacks, plan_here
from kernels.ragged_paged_attention.work_list import BLOCK

HEAD_DIMS = (64, 128)

make_planner = Planner.make


def lacks(*, num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> str | None:
    """What the kernel lacks for this model, or this device for the kernel, in words; None if it can."""
    lacking = model_lacks(
        HEAD_DIMS,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
    )
    if lacking is not None:
        return lacking
    missing = gpu.missing_for_sm90()
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
    work: Any,  # WorkList or None
) -> jax.Array:  # [T, N, H]
    """See api.ragged_paged_attention. Rows past cu_q_lens[-1] are not written."""
    if work is None:
        work = plan_here("mosaic_sm90", make_planner, q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window)
    if not isinstance(work, WorkList):
        raise ValueError(f"work={type(work).__name__}(...) was not planned for mosaic_sm90: pass Planner.work(...)")
    check_work("mosaic_sm90", work.planner, q, kv_pages, page_table, max_q_len, sliding_window)
    N, K, page_size = q.shape[1], *kv_pages.shape[2:4]
    shape, tiles = work.planner.shape, work.planner.tiles
    at = {name: where.start for name, (where, _) in shape.fields.items()}
    geometry = Geometry(
        consumers=tiles.consumers,
        stages=tiles.stages,
        chunk_blocks=tiles.chunk // BLOCK,
        num_kv_heads=K,
        items_at=at["items"],
        order_at=at["order"],
        cta_start_at=at["cta_start"],
        group=N // K,
        tokens=tiles.consumer_tokens(N // K, max_q_len),
        page_size=page_size,
        split_rows=shape.split_q_len * (N // K) if shape.num_slots else 0,
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        interpreted=gpu.is_interpreted(),
    )
    out, partial = kernel.run_items(
        *(q, kv_pages, page_table, cu_q_lens, kv_lens, work.packed),
        geometry=geometry,
        num_ctas=shape.num_ctas,
        num_slots=shape.num_slots,
    )
    if partial is None:
        return out
    return combine.combine(
        out,
        *partial,
        work.packed,
        cu_q_lens,
        num_split_at=at["num_split"],
        groups_at=at["groups"],
        num_ctas=min(shape.num_ctas, shape.num_groups * K),
        num_kv_heads=K,
    )
