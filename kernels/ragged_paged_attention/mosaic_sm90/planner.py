"""What ties the host's work lists to the Mosaic kernel: a Planner of one compiled shape, and the WorkList that its programs read.

Owns which shapes the kernel can do. The host calls `Planner.plan` before a step (a list may serve
those after it too); the compiled step calls `Planner.work`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90 import combine, kernel, work_list
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS, Tiles, choose_tiles
from kernels.ragged_paged_attention.mosaic_sm90.work_list import BLOCK, WorkShape

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Planner:
    """The work lists of one compiled shape: `shape` says how large they are, `tiles` how the kernel runs them."""

    shape: WorkShape
    tiles: Tiles

    @classmethod
    def make(
        cls,
        *,
        num_tokens: int,  # T
        num_seqs: int,  # S
        max_q_len: int,
        num_query_heads: int,  # N
        num_kv_heads: int,  # K
        head_dim: int,  # H
        max_kv_len: int,  # P * page_size
        sliding_window: int | None = None,
        split_q_len: int = 1,
        num_ctas: int | None = None,
        tiles: Tiles | None = None,
    ) -> Planner:
        """The planner of q [T, N, H] and page_table [S, P].

        Args:
            split_q_len: most query tokens of a sequence whose KV may be split over CTAs: 1 + drafts.
            num_ctas: thread blocks of the persistent kernel; None is one for each SM of the device.
            tiles: None chooses them for the device.
        """
        G = num_query_heads // num_kv_heads
        if tiles is None:
            tiles = choose_tiles(head_dim=head_dim, group=G, max_q_len=max_q_len, device_kind=gpu.device_kind())
        shape = WorkShape(
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_q_len=max_q_len,
            num_kv_heads=num_kv_heads,
            max_kv_len=max_kv_len,
            num_ctas=gpu.num_sms() if num_ctas is None else num_ctas,
            tile_tokens=tiles.tile_tokens(G, max_q_len),
            split_q_len=min(split_q_len, tiles.consumer_tokens(G, max_q_len)),
            chunk=tiles.chunk,
            sliding_window=sliding_window,
        )
        tiles.check_smem(head_dim, splits=shape.num_slots > 0)
        return cls(shape, tiles)

    @property
    def size(self) -> int:
        """int32s of a step's work list."""
        return self.shape.size

    def plan(self, q_lens: Any, kv_lens: Any, *, least_kv_lens: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        """work_list.plan: on the host. i32[size]."""
        return work_list.plan(self.shape, q_lens, kv_lens, least_kv_lens=least_kv_lens, out=out)

    def work(self, packed: jax.Array) -> WorkList:
        """The work list that `plan` made, i32[size], for `ragged_paged_attention(work=...)`."""
        return WorkList(packed, self)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["packed"], meta_fields=["planner"])
@dataclasses.dataclass(frozen=True)
class WorkList:
    """One step's work list on the device."""

    packed: jax.Array  # i32[planner.size]
    planner: Planner


def unsupported(*, num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> str | None:
    """What the Mosaic kernel lacks for this model or this device, in words; None if it can."""
    dtype, G = jnp.dtype(dtype).name, num_query_heads // num_kv_heads
    if dtype not in DTYPES:
        return f"{dtype}: it has {' and '.join(DTYPES)}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim={head_dim}: it has {' and '.join(map(str, HEAD_DIMS))}"
    if G > ROWS:
        return f"{G} query heads a KV head: it has up to {ROWS}"
    if page_size not in (16, 32) and page_size % BLOCK:
        return f"page_size={page_size}: it has 16, 32 and multiples of {BLOCK}"
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
    T, N, H = q.shape
    _, _, K, page_size, _ = kv_pages.shape
    S, P = page_table.shape
    if work is None:
        work = _plan_here(q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window)
    if not isinstance(work, WorkList):
        raise ValueError(f"work={type(work).__name__}(...) was not planned for mosaic_sm90: pass Planner.work(...)")
    shape, tiles = work.planner.shape, work.planner.tiles
    given = (T, S, max_q_len, K, sliding_window)
    planned = (shape.num_tokens, shape.num_seqs, shape.max_q_len, shape.num_kv_heads, shape.sliding_window)
    if given != planned or P * page_size > shape.max_kv_len or shape.tile_tokens != tiles.tile_tokens(N // K, max_q_len):
        raise ValueError(
            f"work was planned for (T, S, max_q_len, K, sliding_window)={planned}, tiles of {shape.tile_tokens} tokens and rows of "
            f"{shape.max_kv_len} positions, not for {given}, {N // K} query heads a KV head and {P * page_size} positions: "
            "call Planner.make with the shapes of this call"
        )
    at = {name: where.start for name, (where, _) in shape.fields.items()}
    geometry = kernel.Geometry(
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
    run = functools.partial(kernel.run_items, geometry=geometry, num_ctas=shape.num_ctas, num_slots=shape.num_slots)
    out, partial = run(q, kv_pages, page_table, cu_q_lens, kv_lens, work.packed)
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


def _plan_here(q, kv_pages, page_table, cu_q_lens, kv_lens, max_q_len, sliding_window) -> WorkList:
    """A work list from lengths that are at hand: for calls outside of jit."""
    if isinstance(cu_q_lens, Tracer) or isinstance(kv_lens, Tracer):
        raise ValueError("mosaic_sm90 is planned on the host: inside jit, pass work=Planner.work(array that Planner.plan made)")
    planner = Planner.make(
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
