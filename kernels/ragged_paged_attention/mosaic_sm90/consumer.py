"""The kernel's consumer warpgroups: each computes a tile of 64 rows. `kernel` lists the barriers."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.geometry import (
    Geometry,
    Item,
    Refs,
    Scratch,
    first_page,
    items_of_cta,
    load_item,
    num_blocks,
)
from kernels.ragged_paged_attention.logits import MASKED, again, cap_logits, mask_logits, scale_logits, spread, tile_rows
from kernels.ragged_paged_attention.mosaic_sm90 import softmax_state
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS
from kernels.ragged_paged_attention.work_list import BLOCK

PARTS = 8  # of a row's total: columns of which each of the row's four threads has two, as of all columns of a block


def consume(g: Geometry, refs: Refs, smem: Scratch, me) -> None:
    """Computes every item's rows. `me`: which consumer this is."""

    def item_rows(index, slot):  # slot: of the ring, where the item's first block is
        item = load_item(g, refs, index)
        gpu.barrier_wait(smem.q_full)
        here = again(me)
        smem.q.at[here][...] = gpu.load(smem.q_loaded.at[here], layout=gpu.WGMMA, optimized=False)
        gpu.commit_smem()
        gpu.barrier_arrive(smem.q_empty)

        position, tokens, end = _part(g, item, me)
        x = _first_scores(g, smem, me, item.first_block < end, slot)
        state, slot = _walk(g, refs, smem, me, index, item, position, end, slot, x)
        item = load_item(g, refs, index)  # again, rather than kept in registers, of which the walk has none to spare
        tokens, end = _part(g, item, me)[1:]
        if g.consumers > 1:
            slot = lax.fori_loop(end, item.end_block, functools.partial(_pass_by, g, smem, me, item), slot)

        @pl.when(jnp.logical_and(item.slot < 0, tokens > 0))
        def _():
            _store_rows(g, refs, smem, again(me), item, item.token + me * g.tokens, tokens, state)

        return slot

    gpu.barrier_arrive(smem.q_empty)
    for slot in range(g.stages):
        gpu.barrier_arrive(smem.kv_empty.at[slot])
    lax.fori_loop(*items_of_cta(g, refs), item_rows, jnp.int32(0))
    gpu.wait_smem_to_gmem(0)


def _part(g: Geometry, item: Item, me):
    """A consumer's part of an item: position of its first token, its tokens, and the end of the blocks that it sees. Past that come
    blocks that only the other consumer sees."""
    position = item.position + me * g.tokens
    tokens = jnp.clip(item.num_tokens - me * g.tokens, 0, g.tokens)
    end = jnp.where(tokens > 0, num_blocks(position + tokens), item.first_block)
    return position, tokens, jnp.clip(end, item.first_block, item.end_block)


def _walk(g: Geometry, refs: Refs, smem: Scratch, me, index, item: Item, position, end, slot, x):
    """(the state of the tile's rows after the item's blocks up to `end`, the ring's slot after them), a chunk at a time.

    x: the first block's scores. Of a split sequence each chunk's own state is stored too, also where a chunk was planned and
    there is no KV: its partial result will be asked for."""
    head_dim = smem.q.shape[-1]
    fold = functools.partial(_fold_block, g, smem, me, item, position, end)

    def chunk(c, carry):
        joined, begin, slot, x = carry
        stop = jnp.maximum(begin, jnp.minimum((c + 1) * g.chunk_blocks, end))
        (acc, maximum, totals), slot, x = lax.fori_loop(begin, stop, fold, (_empty(head_dim), slot, x))
        state = acc, maximum, totals.sum(axis=1)
        if g.split_rows:

            @pl.when(jnp.logical_and(item.slot >= 0, me == 0))
            def _():
                here = load_item(g, refs, index)  # again, rather than kept in registers
                _store_partial(g, refs, smem, here.head, here.slot + c - here.first_chunk, state)

        return softmax_state.join(joined, state), stop, slot, x

    end_chunk = lax.div(end + (g.chunk_blocks - 1), jnp.int32(g.chunk_blocks))
    first_chunk = lax.div(item.first_block, jnp.int32(g.chunk_blocks))
    if g.split_rows:
        first_chunk = jnp.where(item.slot >= 0, item.first_chunk, first_chunk)
        end_chunk = jnp.where(item.slot >= 0, item.end_chunk, end_chunk)
    carry = (softmax_state.empty(head_dim), item.first_block, slot, x)
    state, _, slot, _ = lax.fori_loop(first_chunk, end_chunk, chunk, carry)
    return state, slot


def _empty(head_dim: int):
    """`softmax_state.empty`, with a row's total in PARTS parts. A thread adds up its own until the chunk ends, so that in a block
    threads exchange maxima alone."""
    acc, maximum, _ = softmax_state.empty(head_dim)
    return acc, maximum, gpu.layout_cast(jnp.zeros((ROWS, PARTS), jnp.float32), gpu.WGMMA)


def _next_slot(g: Geometry, slot):
    """The slot of the ring that follows."""
    return jnp.where(slot + 1 == g.stages, 0, slot + 1)


def _first_scores(g: Geometry, smem: Scratch, me, has_blocks, slot):
    """The scores of an item's first block; zeros where it has none."""

    def compute():
        gpu.barrier_wait(smem.kv_full.at[slot])

        def scores(ref):
            gpu.wgmma(ref, smem.q.at[me], smem.kv.at[slot, 0].transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(scores, gpu.ACC((ROWS, BLOCK), jnp.float32))

    def none():
        return gpu.layout_cast(jnp.zeros((ROWS, BLOCK), jnp.float32), gpu.WGMMA)

    return lax.cond(has_blocks, compute, none)


def _fold_block(g: Geometry, smem: Scratch, me, item: Item, position, end, block, carry):
    """One block of keys and values into the state of the tile's rows. carry ends in its scores, f32[64, BLOCK], the result in those
    of the next block. After an item's last block these are of the same keys again, and nobody looks at them."""
    state, slot, x = carry
    following = _next_slot(g, slot)
    more = block + 1 < end

    def wait_for_next():
        pl.when(more)(lambda: gpu.barrier_wait(smem.kv_full.at[following]))

    def compute_next(scores):
        keys = smem.kv.at[jnp.where(more, following, slot), 0]
        gpu.wgmma(scores, smem.q.at[me], keys.transpose((1, 0)))

    def softmax():
        (acc, *stats), weights = _softmax(g, position, block, state, x)
        return acc, stats, weights.astype(smem.kv.dtype)

    def add_values(scores, acc, stats, weights):
        acc, following_x = _add_weighted_values(g, smem, me, acc, weights, slot, scores)
        return (acc, *stats), following_x

    def beside_the_softmax(scores):
        compute_next(scores)
        return add_values(scores, *softmax())

    _clean_tail(g, smem, me, item, block, slot)
    if g.consumers == 1:
        wait_for_next()
        state, x = pl.run_scoped(beside_the_softmax, gpu.ACC((ROWS, BLOCK), jnp.float32))
    else:
        weighted = lax.optimization_barrier(softmax())  # before the scores take registers
        wait_for_next()

        def beside_the_values(scores):
            compute_next(scores)
            return add_values(scores, *weighted)

        state, x = pl.run_scoped(beside_the_values, gpu.ACC((ROWS, BLOCK), jnp.float32))
    gpu.barrier_arrive(smem.kv_empty.at[slot])
    return state, following, x


def _softmax(g: Geometry, position, block, state, x):
    """(the state with the block's weights in it but not yet its values; those weights, f32[64, BLOCK])."""
    acc, maximum, totals = state
    seen = {"group": g.group, "tokens": g.tokens, "sliding_window": g.sliding_window}
    mask = functools.partial(mask_logits, begin=block * BLOCK, position=position, **seen)
    if g.soft_cap is None:
        x, unit = scale_logits(x, scale=g.scale, soft_cap=None)
    else:
        x, unit = cap_logits(mask(x, 0.0), scale=g.scale, soft_cap=g.soft_cap)
    x = mask(x, MASKED / unit)
    new_maximum = jnp.maximum(maximum, x.max(axis=1) * unit)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(x * unit - spread(new_maximum, x))
    parts = [weights[:, column : column + PARTS] for column in range(0, BLOCK, PARTS)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return (acc * spread(shrink, acc), new_maximum, totals * spread(shrink, totals) + parts[0]), weights


def _add_weighted_values(g: Geometry, smem: Scratch, me, acc, weights, slot, scores):
    """(acc + weights @ values, the scores that were begun before): on the device with the weights in registers and in place; the
    interpreter has neither. Scores are taken while the values are still being multiplied."""
    values = smem.kv.at[slot, 1]
    if not g.interpreted:

        def add(refs):
            added, taken = refs
            gpu.wgmma(added, weights, values)
            taken[...] = gpu.wgmma_accumulator_load(scores, wait_n=1)

        return pl.run_state(add)((gpu.ACC.init(acc), gpu.layout_cast(jnp.zeros(scores.shape, jnp.float32), gpu.WGMMA)))
    smem.weights.at[me][...] = weights
    gpu.commit_smem()

    def product(ref):
        gpu.wgmma(ref, smem.weights.at[me], values)
        return ref[...]

    return acc + pl.run_scoped(product, gpu.ACC(acc.shape, jnp.float32)), scores[...]


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
                row = spread(tile_rows(), v)
                zero = gpu.layout_cast(jnp.zeros(v.shape, v.dtype), gpu.WGMMA)
                kept = row < item.kv_len - block * BLOCK
                if g.drops_pages:
                    first = first_page(g, item._replace(position=again(item.position))) * g.page_size
                    kept = jnp.logical_and(kept, row >= first - block * BLOCK)
                values[...] = jnp.where(kept, v, zero)
            gpu.commit_smem()
            if g.consumers > 1:
                gpu.barrier_arrive(smem.clean.at[slot])

        if g.consumers > 1:
            pl.when(me > 0)(lambda: gpu.barrier_wait(smem.clean.at[slot]))


def _pass_by(g: Geometry, smem: Scratch, me, item: Item, block, slot):
    """A block that only the other consumer sees: keeps the ring going."""
    gpu.barrier_wait(smem.kv_full.at[slot])
    _clean_tail(g, smem, me, item, block, slot)
    gpu.barrier_arrive(smem.kv_empty.at[slot])
    return _next_slot(g, slot)


def _store_rows(g: Geometry, refs: Refs, smem: Scratch, me, item: Item, token, tokens, state) -> None:
    """Writes finished rows: those of `tokens` tokens from row `token` of q on."""
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before has left smem.out
    smem.out.at[me][...] = softmax_state.output(state).astype(smem.out.dtype)
    gpu.commit_smem()

    def store(t, _):
        heads = refs.out.at[token + t, pl.ds(item.head * g.group, g.group)]
        gpu.copy_smem_to_gmem(smem.out.at[me, pl.ds(t * g.group, g.group)], heads)

    lax.fori_loop(0, tokens, store, None)


def _store_partial(g: Geometry, refs: Refs, smem: Scratch, head, slot, state) -> None:
    """Writes the state of a split sequence's rows after a chunk, for `combine`."""
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    smem.acc[...], smem.maximum[...], smem.total[...] = state
    gpu.commit_smem()
    slot = slot * g.num_kv_heads + head
    gpu.copy_smem_to_gmem(smem.acc.at[pl.ds(0, g.split_rows)], refs.partial_acc.at[slot])
    gpu.copy_smem_to_gmem(smem.maximum, refs.partial_stats.at[slot, 0])
    gpu.copy_smem_to_gmem(smem.total, refs.partial_stats.at[slot, 1])
