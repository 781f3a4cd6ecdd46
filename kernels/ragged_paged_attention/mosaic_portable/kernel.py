"""Ragged paged attention by mma.sync and cp.async: one persistent kernel of one warpgroup, for every GPU from sm_80 on.

It computes the items of a work list, which is `work_list`'s; `join` joins the partial results of split sequences.

A CTA's four warps have 16 rows each of a tile of 64: row r is query token r // G of the tile and head r % G of the KV head's group,
so a page is read once a KV head. All of them load: blocks of 32 positions (64 where head_dim is 64) come by cp.async into `stages`
slots, the next ones while one is computed. The softmax is online (Milakov and Gimelshein, arXiv:1805.02867), with the
queries and weights as left operands of mma.sync (FlashAttention-2, arXiv:2307.08691, section 3.3), and starts afresh at every
`chunk` positions; the chunks' states are joined in order, by the tile or, where they ran on different CTAs, by `join`.

One barrier a block: behind it every thread's copies of the block have come, and nobody reads the slot that is loaded next. One an
item, before its first copies: nobody reads the shared memory of the item before. What lies past a sequence's end or before its
window is zeros in shared memory, and nothing is read for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu, gpu_threads
from kernels.gpu_threads import Rows
from kernels.ragged_paged_attention.geometry import Geometry, Item, items_of_cta, load_item
from kernels.ragged_paged_attention.logits import MASKED, ROWS, mask_logits, scale_logits, spread
from kernels.ragged_paged_attention.mosaic_portable import softmax_state
from kernels.ragged_paged_attention.mosaic_portable.tiles import UNSPLIT_CHUNK, block_positions
from kernels.ragged_paged_attention.work_list import BLOCK

STATS = 16  # columns of a partial result behind its accumulator: 8 of the maximum, 8 of the total


class _Refs(NamedTuple):
    """The kernel's arguments in GMEM, then its shared memory. M = slots * K."""

    q: Any  # [T, N, H]
    kv_pages: Any  # [num_pages, 2, K, page_size, H]
    page_table: Any  # i32[S, P]
    cu_q_lens: Any  # i32[S+1]
    kv_lens: Any  # i32[S]
    work: Any  # i32[size], work_list's array
    out: Any  # [T, N, H]
    partial: Any  # f32[M * split_rows + 64, H + STATS], or None where nothing is split
    q_smem: Any  # [64, H]
    kv_smem: Any  # [stages, 2, block, H]


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
) -> tuple[jax.Array, jax.Array | None]:
    """Runs a work list. Returns (out [T, N, H] without the rows of split sequences, their partial results), these being None where
    nothing can be split, else f32[num_slots * K * split_rows + 64, H + STATS], rows of accumulators, maxima and totals."""
    g, H, splits = geometry, q.shape[2], num_slots > 0

    def portable_attention(*args):
        refs = _Refs(*args) if splits else _Refs(*args[:7], None, *args[7:])  # pyright: ignore[reportCallIssue]
        lax.fori_loop(*items_of_cta(g, refs), functools.partial(_item_rows, g, refs), None)  # pyright: ignore[reportArgumentType]

    out_type = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if splits:
        rows = num_slots * g.num_kv_heads * g.split_rows
        out_type.append(jax.ShapeDtypeStruct((rows + ROWS, H + STATS), jnp.float32))
    tiles = gpu_threads.tiles(H)
    results = gpu.kernel(
        portable_attention,
        out_type=out_type,
        grid={"cta": num_ctas},
        scratch_types=[
            gpu.SMEM((ROWS, H), q.dtype, transforms=tiles),
            gpu.SMEM((g.stages, 2, block_positions(H), H), q.dtype, transforms=tiles),
        ],
    )(q, kv_pages, page_table, cu_q_lens, kv_lens, work)
    return results[0], results[1] if splits else None


def _item_rows(g: Geometry, refs: _Refs, index, _) -> None:
    """Computes one item's rows."""
    item = load_item(g, refs, index)  # pyright: ignore[reportArgumentType]
    size = refs.kv_smem.shape[2]
    first, end = item.first_block * (BLOCK // size), item.end_block * (BLOCK // size)
    gpu_threads.barrier()

    @pl.when(first < end)
    def _():
        heads = g.num_kv_heads * g.group
        rows = Rows(item.token * heads + item.head * g.group, _num_rows(g, item), group=g.group, stride=heads)
        gpu_threads.copy_rows(refs.q, refs.q_smem, rows)
        _load_block(g, refs, item, first)

    gpu_threads.commit_copies()
    for i in range(1, g.stages - 1):
        pl.when(first + i < end)(lambda i=i: _load_block(g, refs, item, first + i))
        gpu_threads.commit_copies()
    state = _walk(g, refs, index, item, first, end)

    @pl.when(jnp.logical_and(item.slot < 0, item.num_tokens > 0))
    def _():
        here = load_item(g, refs, index)  # again, rather than kept in registers through the walk  # pyright: ignore[reportArgumentType]
        heads = g.num_kv_heads * g.group
        for i, piece in enumerate(softmax_state.output(state)):
            row, width = here.token * heads + here.head * g.group, piece.shape[1]
            rows = Rows(row, _num_rows(g, here), i * width, group=g.group, stride=heads)
            gpu_threads.store_rows(piece.astype(refs.out.dtype), refs.out, rows)


def _num_rows(g: Geometry, item: Item):
    """Rows of the tile that are a query's."""
    return jnp.minimum(item.num_tokens, g.tokens) * g.group


def _load_block(g: Geometry, refs: _Refs, item: Item, block) -> None:
    """Begins loading a block's keys and values, a page or a part of one at a time."""
    size, slot = refs.kv_smem.shape[2], lax.rem(block, jnp.int32(g.stages))
    copy_rows = min(g.page_size, size)
    for row in range(0, size, copy_rows):
        position = block * size + row
        page = lax.div(position, jnp.int32(g.page_size))
        live = position < item.kv_len
        if g.sliding_window is not None:  # the pages before the one that is seen first may be gone
            first_seen = jnp.maximum(item.position - g.sliding_window + 1, 0)
            live = jnp.logical_and(live, page >= lax.div(first_seen, jnp.int32(g.page_size)))
        last_page = lax.div(item.kv_len - 1, jnp.int32(g.page_size))
        page_id = jnp.where(live, refs.page_table[item.seq, jnp.minimum(page, last_page)], 0)
        offset = lax.rem(position, jnp.int32(g.page_size))
        limit = jnp.where(live, jnp.minimum(item.kv_len - position, copy_rows), 0)
        for k_or_v in range(2):
            at = (page_id * 2 + k_or_v) * g.num_kv_heads + item.head
            target = refs.kv_smem.at[slot, k_or_v, pl.ds(row, copy_rows)]
            gpu_threads.copy_rows(refs.kv_pages, target, Rows(at * g.page_size + offset, limit))


def _walk(g: Geometry, refs: _Refs, index, item: Item, first, end):
    """The state of the tile's rows after the item's blocks, a chunk at a time. Of a split sequence each chunk's own state is
    stored, also where a chunk was planned and there is no KV: its partial result will be asked for."""
    H, size = refs.q_smem.shape[1], refs.kv_smem.shape[2]
    width = gpu_threads.tile_columns(H)
    empty = functools.partial(softmax_state.empty, H // width, width)
    fold = functools.partial(_fold_block, g, refs, item, end)
    if g.chunk_blocks * BLOCK >= UNSPLIT_CHUNK:
        return lax.fori_loop(first, end, fold, empty())
    chunk_blocks = g.chunk_blocks * (BLOCK // size)

    def chunk(c, carry):
        joined, begin = carry
        stop = jnp.maximum(begin, jnp.minimum((c + 1) * chunk_blocks, end))
        state = lax.fori_loop(begin, stop, fold, empty())
        if g.split_rows:
            _store_partial(g, refs, index, c, state)

        return softmax_state.join(joined, state), stop

    end_chunk = lax.div(end + (chunk_blocks - 1), jnp.int32(chunk_blocks))
    first_chunk = lax.div(first, jnp.int32(chunk_blocks))
    if g.split_rows:
        first_chunk = jnp.where(item.slot >= 0, item.first_chunk, first_chunk)
        end_chunk = jnp.where(item.slot >= 0, item.end_chunk, end_chunk)
    return lax.fori_loop(first_chunk, end_chunk, chunk, (empty(), first))[0]


def _fold_block(g: Geometry, refs: _Refs, item: Item, end, block, state):
    """One block of keys and values into the state of the tile's rows; the block `stages` - 1 further is loaded beside it."""
    pieces, maximum, total = state
    size, slot = refs.kv_smem.shape[2], lax.rem(block, jnp.int32(g.stages))
    gpu_threads.wait_copies(g.stages - 2)
    gpu_threads.barrier()
    following = block + (g.stages - 1)
    pl.when(following < end)(lambda: _load_block(g, refs, item, following))
    gpu_threads.commit_copies()

    x, unit = scale_logits(_scores(refs, slot), scale=g.scale, soft_cap=g.soft_cap)
    seen = {"group": g.group, "tokens": g.tokens, "sliding_window": g.sliding_window}
    x = mask_logits(x, MASKED / unit, begin=block * size, position=item.position, **seen)
    new_maximum = jnp.maximum(maximum, x.max(axis=1) * unit)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(x * unit - spread(new_maximum, x))
    total = total * shrink + weights.sum(axis=1)
    left = gpu_threads.as_left_operand(weights.astype(refs.kv_smem.dtype))
    pieces = tuple(_add_values(refs, slot, i, piece * spread(shrink, piece), left) for i, piece in enumerate(pieces))
    return pieces, new_maximum, total


def _scores(refs: _Refs, slot):
    """f32[64, block]: queries times keys."""
    H, size = refs.q_smem.shape[1], refs.kv_smem.shape[2]
    width = gpu_threads.tile_columns(H)
    x = softmax_state.zeros(size)
    for column in range(0, H, width):
        columns = pl.ds(column, width)
        q = gpu.load(refs.q_smem.at[:, columns], layout=gpu.MMA_LHS)
        k = gpu.load(refs.kv_smem.at[slot, 0, :, columns].transpose((1, 0)), layout=gpu.MMA_RHS)
        x = gpu.mma(x, q, k)
    return x


def _add_values(refs: _Refs, slot, i: int, piece, weights):
    """The i-th piece of the accumulator, weights @ values added."""
    width = piece.shape[1]
    return gpu.mma(piece, weights, gpu.load(refs.kv_smem.at[slot, 1, :, pl.ds(i * width, width)], layout=gpu.MMA_RHS))


def _store_partial(g: Geometry, refs: _Refs, index, c, state) -> None:
    """Writes the state of a split sequence's rows after chunk c, for `join`; of another sequence nothing."""
    item = load_item(g, refs, index)  # again, rather than kept in registers through the walk  # pyright: ignore[reportArgumentType]

    @pl.when(item.slot >= 0)
    def _():
        pieces, maximum, total = state
        row = ((item.slot + c - item.first_chunk) * g.num_kv_heads + item.head) * g.split_rows
        column = 0
        for part in (*pieces, *(spread(x, jax.ShapeDtypeStruct((ROWS, STATS // 2), x.dtype)) for x in (maximum, total))):
            gpu_threads.store_rows(part, refs.partial, Rows(row, g.split_rows, column))
            column += part.shape[1]
