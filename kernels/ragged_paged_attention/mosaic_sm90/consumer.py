"""The kernel's consumer warpgroups: each computes a tile of 64 rows. `kernel` lists the barriers."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90 import softmax_state
from kernels.ragged_paged_attention.mosaic_sm90.geometry import (
    Geometry,
    Item,
    Refs,
    Scratch,
    first_page,
    items_of_cta,
    load_item,
    num_blocks,
)
from kernels.ragged_paged_attention.mosaic_sm90.softmax_state import MASKED, spread
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS
from kernels.ragged_paged_attention.mosaic_sm90.work_list import BLOCK

LOG2E = math.log2(math.e)


def consume(g: Geometry, refs: Refs, smem: Scratch, me) -> None:
    """Computes every item's rows. `me`: which consumer this is."""

    def item_rows(index, count):
        item = load_item(g, refs, index)
        gpu.barrier_wait(smem.q_full)
        smem.q.at[me][...] = gpu.load(smem.q_loaded.at[me], layout=gpu.WGMMA, optimized=False)
        gpu.commit_smem()
        gpu.barrier_arrive(smem.q_empty)

        first_token = me * g.tokens
        position = item.position + first_token  # of this consumer's first token
        tokens = jnp.clip(item.num_tokens - first_token, 0, g.tokens)
        end = jnp.where(tokens > 0, num_blocks(position + tokens), item.first_block)
        end = jnp.clip(end, item.first_block, item.end_block)  # past it come blocks that only the other consumer sees
        state, count = _walk(g, refs, smem, me, index, item, position, end, count)
        item = load_item(g, refs, index)  # again, rather than kept in registers, of which the walk has none to spare
        if g.consumers > 1:
            count = lax.fori_loop(end, item.end_block, functools.partial(_pass_by, g, smem, me, item), count)

            # A turn for an item without blocks (planned for KV that is not there): consumer 1, in the last block of the item
            # before, waits for consumer 0's next turn, and must copy this item's queries before there is another item.
            @pl.when(item.first_block == item.end_block)
            def _():
                _take_turn(smem)
                _take_turn(smem)

        @pl.when(jnp.logical_and(item.slot < 0, tokens > 0))
        def _():
            _store_rows(g, refs, smem, me, item, item.token + first_token, tokens, state)

        return count

    gpu.barrier_arrive(smem.q_empty)
    for slot in range(g.stages):
        gpu.barrier_arrive(smem.kv_empty.at[slot])
    if g.consumers > 1:
        pl.when(me == 1)(lambda: _take_turn(smem))  # half a block behind
    lax.fori_loop(*items_of_cta(g, refs), item_rows, jnp.int32(0))
    if g.consumers > 1:
        pl.when(me == 0)(lambda: _take_turn(smem))
    gpu.wait_smem_to_gmem(0)


def _take_turn(smem: Scratch) -> None:
    gpu.barrier_arrive(smem.turn)
    gpu.barrier_wait(smem.turn)


def _walk(g: Geometry, refs: Refs, smem: Scratch, me, index, item: Item, position, end, count):
    """The state of the tile's rows after the item's blocks up to `end`, a chunk at a time. Of a split sequence each chunk's own
    state is stored too, also where a chunk was planned and there is no KV: its partial result will be asked for."""
    head_dim = smem.q.shape[-1]
    fold = functools.partial(_fold_block, g, smem, me, item, position)

    def chunk(c, carry):
        joined, count = carry
        begin, stop = c * g.chunk_blocks, jnp.minimum((c + 1) * g.chunk_blocks, end)
        if g.sliding_window is not None:  # else an item begins with a chunk
            begin = jnp.maximum(begin, item.first_block)
        state, count = lax.fori_loop(begin, stop, fold, (softmax_state.empty(head_dim), count))
        if g.split_rows:

            @pl.when(jnp.logical_and(item.slot >= 0, me == 0))
            def _():
                here = load_item(g, refs, index)  # again, rather than kept in registers
                _store_partial(g, refs, smem, here.head, here.slot + c - here.first_chunk, state)

        return softmax_state.join(joined, state), count

    end_chunk = lax.div(end + (g.chunk_blocks - 1), jnp.int32(g.chunk_blocks))
    first_chunk = lax.div(item.first_block, jnp.int32(g.chunk_blocks))
    if g.split_rows:
        first_chunk = jnp.where(item.slot >= 0, item.first_chunk, first_chunk)
        end_chunk = jnp.where(item.slot >= 0, item.end_chunk, end_chunk)
    return lax.fori_loop(first_chunk, end_chunk, chunk, (softmax_state.empty(head_dim), count))


def _fold_block(g: Geometry, smem: Scratch, me, item: Item, position, block, carry):
    """One block of keys and values into the state of the tile's rows."""
    (acc, maximum, total), count = carry
    slot = lax.rem(count, jnp.int32(g.stages))
    gpu.barrier_wait(smem.kv_full.at[slot])
    _clean_tail(g, smem, me, item, block, slot)

    def scores(ref):
        gpu.wgmma(ref, smem.q.at[me], smem.kv.at[slot, 0].transpose((1, 0)))
        if g.consumers > 1:
            _take_turn(smem)
        return ref[...]

    x = pl.run_scoped(scores, gpu.ACC((ROWS, BLOCK), jnp.float32))
    x = _mask(g, position, block, _logits(g, x))
    new_maximum = jnp.maximum(maximum, x.max(axis=1))
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(x - spread(new_maximum, x))
    total = total * shrink + weights.sum(axis=1)
    acc = acc * spread(shrink, acc)
    weights = weights.astype(smem.kv.dtype)
    if g.consumers > 1:
        acc, total, new_maximum, weights = lax.optimization_barrier((acc, total, new_maximum, weights))
        _take_turn(smem)
    acc = _add_weighted_values(g, smem, me, acc, weights, slot)
    gpu.barrier_arrive(smem.kv_empty.at[slot])
    return (acc, new_maximum, total), count + 1


def _logits(g: Geometry, x):
    """Scores in units of log2."""
    if g.soft_cap is None:
        return x * (g.scale * LOG2E)
    # tanh(y) = 1 - 2 / (exp(2 y) + 1), as the hardware's own tanh has 11 bits.
    cap = g.soft_cap * LOG2E
    return cap - (2 * cap) / (jnp.exp2(x * (2 * g.scale / g.soft_cap * LOG2E)) + 1)


def _mask(g: Geometry, position, block, x):
    """Logits of a block, MASKED where a row does not see the key. Most blocks are seen whole and pass as they are."""

    def mask(x):
        token = lax.div(gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=gpu.WGMMA_ROW), jnp.int32(g.group))
        column = gpu.broadcasted_iota(jnp.int32, (ROWS, BLOCK), 1, layout=gpu.WGMMA)
        last = spread(token + (position - block * BLOCK), column)
        seen = column <= last
        if g.sliding_window is not None:
            seen = jnp.logical_and(seen, column > last - g.sliding_window)
        return jnp.where(seen, x, MASKED)

    partly_seen = (block + 1) * BLOCK > position + 1  # by the first row
    if g.sliding_window is not None:
        partly_seen = jnp.logical_or(partly_seen, block * BLOCK <= position + g.tokens - 1 - g.sliding_window)  # by the last
    return lax.cond(partly_seen, mask, lambda x: x, x)


def _add_weighted_values(g: Geometry, smem: Scratch, me, acc, weights, slot):
    """acc + weights @ values: on the device with the weights in registers and in place; the interpreter has neither."""
    values = smem.kv.at[slot, 1]
    if not g.interpreted:
        return pl.run_state(lambda ref: gpu.wgmma(ref, weights, values))(gpu.ACC.init(acc))
    smem.weights.at[me][...] = weights
    gpu.commit_smem()

    def product(ref):
        gpu.wgmma(ref, smem.weights.at[me], values)
        return ref[...]

    return acc + pl.run_scoped(product, gpu.ACC(acc.shape, jnp.float32))


def _clean_tail(g: Geometry, smem: Scratch, me, item: Item, block, slot) -> None:
    """Zeroes the values past the sequence's end, where NaN may stand: a weight of 0 would not drop it. So too the rows of pages
    before the window: the page that is loaded instead may be the sequence's last one (and this block its last one then)."""

    @pl.when((block + 1) * BLOCK > item.kv_len)
    def _():
        @pl.when(me == 0)
        def _():
            for column in range(0, smem.kv.shape[-1], 64):  # a part at a time, for want of registers
                values = smem.kv.at[slot, 1, :, pl.ds(column, 64)]
                v = gpu.load(values, layout=gpu.WGMMA)
                position = gpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=gpu.WGMMA) + block * BLOCK
                zero = gpu.layout_cast(jnp.zeros(v.shape, v.dtype), gpu.WGMMA)
                kept = position < item.kv_len
                if g.drops_pages:
                    kept = jnp.logical_and(kept, position >= first_page(g, item) * g.page_size)
                values[...] = jnp.where(kept, v, zero)
            gpu.commit_smem()
            if g.consumers > 1:
                gpu.barrier_arrive(smem.clean)

        if g.consumers > 1:
            pl.when(me == 1)(lambda: gpu.barrier_wait(smem.clean))


def _pass_by(g: Geometry, smem: Scratch, me, item: Item, block, count):
    """A block that only the other consumer sees: keeps the ring and the turns going."""
    slot = lax.rem(count, jnp.int32(g.stages))
    gpu.barrier_wait(smem.kv_full.at[slot])
    _clean_tail(g, smem, me, item, block, slot)
    _take_turn(smem)
    _take_turn(smem)
    gpu.barrier_arrive(smem.kv_empty.at[slot])
    return count + 1


def _store_rows(g: Geometry, refs: Refs, smem: Scratch, me, item: Item, token, tokens, state) -> None:
    """Writes finished rows: those of `tokens` tokens from row `token` of q on."""
    gpu.wait_smem_to_gmem(0)  # the item before has left smem.out
    smem.out.at[me][...] = softmax_state.output(state).astype(smem.out.dtype)
    gpu.commit_smem()

    def store(t, _):
        heads = refs.out.at[token + t, pl.ds(item.head * g.group, g.group)]
        gpu.copy_smem_to_gmem(smem.out.at[me, pl.ds(t * g.group, g.group)], heads)

    lax.fori_loop(0, tokens, store, None)


def _store_partial(g: Geometry, refs: Refs, smem: Scratch, head, slot, state) -> None:
    """Writes the state of a split sequence's rows after a chunk, for `combine`."""
    gpu.wait_smem_to_gmem(0)
    smem.acc[...], smem.maximum[...], smem.total[...] = state
    gpu.commit_smem()
    slot = slot * g.num_kv_heads + head
    gpu.copy_smem_to_gmem(smem.acc.at[pl.ds(0, g.split_rows)], refs.partial_acc.at[slot])
    gpu.copy_smem_to_gmem(smem.maximum, refs.partial_stats.at[slot, 0])
    gpu.copy_smem_to_gmem(smem.total, refs.partial_stats.at[slot, 1])
