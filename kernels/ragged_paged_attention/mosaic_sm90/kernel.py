"""Ragged paged attention for Hopper in Pallas Mosaic GPU: one persistent kernel for decodes, prefill chunks and drafts alike.

It computes the items of a work list. `work_list` makes the list, `combine` joins the partial results of split sequences, `tiles`
chooses the sizes. The two halves of the kernel are `producer` and `consumer`.

A CTA is one to four consumer warpgroups, which compute, and a producer warpgroup, which issues every load. A consumer's tile is
64 rows: row r is query token r // G of the tile and head r % G of the KV head's group, so a page is read once a KV head. Keys and
values come through a ring of `stages` slots of 64 positions that runs on across items: the next item's first blocks load while
this one's last are computed. The softmax is online (Milakov and Gimelshein, arXiv:1805.02867) and starts afresh at every `chunk`
positions; the chunks' states are joined in order, by the tile itself, or through memory where they ran on different CTAs. What a
tile has joined so far lies in shared memory: at head_dim 128 it would take 64 of a thread's registers.

Barriers, who arrives and who waits:
- q_full: the loads of an item's queries arrive; consumers wait. q_empty: a consumer that has copied its rows; the producer waits.
- kv_full[slot]: the loads of a block arrive; consumers wait. kv_empty[slot]: a consumer done with the block; the producer waits.
  Where logits are bounded (`block_weights`) a block's values are still multiplied while the next one's weights are computed, so
  that each block gives back the slot of the one before it, also across items.
- clean[slot]: consumer 0 when it has zeroed the values past a sequence's end; the others wait. One a slot, because consumer 0 may
  be blocks and an item ahead: the ring is what holds them together.

The scores of a block are computed a block ahead, so that a softmax never waits for them (FlashAttention-3, arXiv:2407.08608,
section 3.2). One consumer computes them beside the softmax of the block before. Several have no registers for that: each computes
them with that block's weighted values, and one's softmax runs beside another's wgmmas.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.geometry import Geometry, Refs, Scratch
from kernels.ragged_paged_attention.mosaic_sm90.consumer import consume
from kernels.ragged_paged_attention.mosaic_sm90.producer import produce
from kernels.ragged_paged_attention.mosaic_sm90.tiles import PIECE, REGISTERS, ROWS
from kernels.ragged_paged_attention.work_list import BLOCK


def run_items(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[S, P]
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    work: jax.Array,  # i32[size], work_list's array
    *,
    geometry: Geometry,
    num_ctas: int,
    num_slots: int,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Runs a work list. Returns (out [T, N, H] without the rows of split sequences, their partial results), these being None where
    nothing can be split, else (accumulators f32[num_slots * K, split_rows, H], maxima and totals f32[num_slots * K, 2, 64])."""
    g, H, dtype = geometry, q.shape[2], q.dtype
    C, splits = g.consumers, num_slots > 0
    scratch = _scratch(g, H, dtype, splits=splits)
    names, num_refs = list(scratch), 9 if splits else 7

    def ragged_paged_attention(*args):
        refs, smem = Refs(*args[:num_refs]), _unite(dict(zip(names, args[num_refs:], strict=True)))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == C)
        def _():
            if C > 1 and not g.interpreted:
                gpu.set_max_registers(REGISTERS[C][1], action="decrease")
            produce(g, refs, smem)

        @pl.when(warpgroup < C)
        def _():
            if C > 1 and not g.interpreted:
                gpu.set_max_registers(REGISTERS[C][0], action="increase")
            consume(g, refs, smem, warpgroup)

    out_type = [jax.ShapeDtypeStruct(q.shape, dtype)]
    if splits:
        M = num_slots * g.num_kv_heads
        out_type.append(jax.ShapeDtypeStruct((M, g.split_rows, H), jnp.float32))
        out_type.append(jax.ShapeDtypeStruct((M, 2, ROWS), jnp.float32))
    results = gpu.kernel(
        ragged_paged_attention,
        out_type=out_type,
        grid={"cta": num_ctas},
        scratch_types=list(scratch.values()),
        warpgroups=C + 1,
    )(q.reshape(len(q), g.num_kv_heads, g.group, H), kv_pages, page_table, cu_q_lens, kv_lens, work)
    return (results[0], (results[1], results[2])) if splits else (results[0], None)


def _unite(scratch: dict[str, Any]) -> Scratch:
    """Scratch of what _scratch names."""
    groups = scratch.pop("shared", ())
    return Scratch(**scratch, **{name: ref for group in groups for name, ref in group.items()})


def _scratch(g: Geometry, H: int, dtype: Any, *, splits: bool) -> dict[str, Any]:
    """The fields of Scratch that this kernel needs, and what they are."""
    C = g.consumers
    tile = gpu.SMEM((C, ROWS, H), dtype)
    swizzled = gpu.SMEM((C, ROWS, H), dtype, transforms=gpu.SWIZZLED)
    scratch = {
        "q_loaded": tile,
        "q": swizzled,
        "kv": gpu.SMEM((g.stages, 2, BLOCK, H), dtype, transforms=gpu.SWIZZLED),
        "q_full": gpu.Barrier(num_arrivals=C * (g.tokens if g.interpreted else 1)),
        "q_empty": gpu.Barrier(num_arrivals=C),
        "kv_full": gpu.Barrier(num_arrivals=2 * BLOCK // g.copy_rows, num_barriers=g.stages),
        "kv_empty": gpu.Barrier(num_arrivals=C, num_barriers=g.stages),
    }
    if C > 1:
        scratch |= {"clean": gpu.Barrier(num_barriers=g.stages)}
    # In the same memory, which the interpreter doesn't share: a consumer's part of one lies where its part of another does.
    shared = [
        {"joined": gpu.SMEM((C, H // PIECE, ROWS, PIECE), jnp.float32), "joined_stats": gpu.SMEM((C, 2, ROWS), jnp.float32)},
        {"out": gpu.SMEM((C, 2, ROWS, H), dtype)},
    ]
    if splits:
        shared.append({"acc": gpu.SMEM((ROWS, H), jnp.float32)})
    if not g.interpreted:
        return scratch | {"shared": gpu.RefUnion(*shared)}
    for group in shared:
        scratch |= group
    return scratch | {"weights": gpu.SMEM((C, ROWS, BLOCK), dtype, transforms=gpu.SWIZZLED)}
