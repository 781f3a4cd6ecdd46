"""The kernel's consumer warpgroups: each computes a tile of 64 rows. `kernel` lists the barriers."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu, gpu_tiles
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
from kernels.ragged_paged_attention.logits import again, spread
from kernels.ragged_paged_attention.mosaic_sm90 import block_weights, softmax_state
from kernels.ragged_paged_attention.mosaic_sm90.tiles import PIECE, ROWS
from kernels.ragged_paged_attention.work_list import BLOCK


def consume(g: Geometry, refs: Refs, smem: Scratch, me) -> None:
    """Computes every item's rows. `me`: which consumer this is."""

    def item_rows(index, slot):  # slot: of the ring, where the item's first block is
        item = load_item(g, refs, index)
        gpu.barrier_wait(smem.q_full)
        here = again(me)
        gpu_tiles.write_tile(gpu_tiles.read_tile(smem.q_loaded.at[here]), smem.q.at[here], swizzled=True)
        gpu.commit_smem()
        gpu.barrier_arrive(smem.q_empty)

        position, tokens, end = _part(g, item, me)
        x = _first_scores(g, smem, me, item.first_block < end, slot)
        slot = _walk(g, refs, smem, me, index, item, position, end, slot, x)
        item = load_item(g, refs, index)  # again, rather than kept in registers, of which the walk has none to spare
        tokens, end = _part(g, item, me)[1:]
        if g.consumers > 1:
            slot = lax.fori_loop(end, item.end_block, functools.partial(_pass_by, g, smem, me, item), slot)

        @pl.when(jnp.logical_and(item.slot < 0, tokens > 0))
        def _():
            _store_rows(g, refs, smem, again(me), item, item.token + me * g.tokens, tokens)

        return slot

    gpu.barrier_arrive(smem.q_empty)
    late = _is_bounded(g, smem)
    for slot in range(g.stages - late):
        gpu.barrier_arrive(smem.kv_empty.at[slot])
    slot = lax.fori_loop(*items_of_cta(g, refs), item_rows, jnp.int32(0))
    if late:
        _give_back(g, smem, slot)
    gpu.wait_smem_to_gmem(0)


def _is_bounded(g: Geometry, smem: Scratch) -> bool:
    return block_weights.is_bounded(g.soft_cap, smem.kv.dtype)


def _part(g: Geometry, item: Item, me):
    """A consumer's part of an item: position of its first token, its tokens, and the end of the blocks that it sees. Past that come
    blocks that only the other consumer sees."""
    position = item.position + me * g.tokens
    tokens = jnp.clip(item.num_tokens - me * g.tokens, 0, g.tokens)
    end = jnp.where(tokens > 0, num_blocks(position + tokens), item.first_block)
    return position, tokens, jnp.clip(end, item.first_block, item.end_block)


def _walk(g: Geometry, refs: Refs, smem: Scratch, me, index, item: Item, position, end, slot, x):
    """Takes the tile's rows through the item's blocks up to `end`, a chunk at a time, and leaves their state in shared memory.
    Returns the ring's slot after them.

    x: the first block's scores. Of a split sequence each chunk's own state is stored too, also where a chunk was planned and
    there is no KV: its partial result will be asked for."""
    fold = _fold_bounded if _is_bounded(g, smem) else _fold_online

    def chunk(c, carry):
        begin, slot, x = carry
        stop = jnp.maximum(begin, jnp.minimum((c + 1) * g.chunk_blocks, end))
        (acc, maximum, totals), slot, x = fold(g, smem, me, item, position, end, begin, stop, (slot, x))
        state = acc, maximum, totals.sum(axis=1)
        gpu.wait_smem_to_gmem(0, wait_read_only=True)  # rows or a partial result have left the memory of smem.joined
        if g.split_rows:

            @pl.when(jnp.logical_and(item.slot >= 0, me == 0))
            def _():
                here = load_item(g, refs, index)  # again, rather than kept in registers
                _store_partial(g, refs, smem, here.head, here.slot + c - here.first_chunk, state)

        pl.when(item.slot < 0)(lambda: _join(smem, again(me), c == first_chunk, state))
        return stop, slot, x

    first_chunk = lax.div(item.first_block, jnp.int32(g.chunk_blocks))
    end_chunk = lax.div(end + (g.chunk_blocks - 1), jnp.int32(g.chunk_blocks))
    end_chunk = jnp.maximum(end_chunk, first_chunk + 1)  # without blocks too there is a state
    if g.split_rows:
        first_chunk = jnp.where(item.slot >= 0, item.first_chunk, first_chunk)
        end_chunk = jnp.where(item.slot >= 0, item.end_chunk, end_chunk)
    return lax.fori_loop(first_chunk, end_chunk, chunk, (item.first_block, slot, x))[1]


def _join(smem: Scratch, me, first, state) -> None:
    """Joins a chunk's state to those of the item's chunks before it, which lie in shared memory."""
    acc, maximum, total = state
    rows = [smem.joined_stats.at[me, 0], smem.joined_stats.at[me, 1]]
    empty = softmax_state.empty(PIECE)
    before = [lax.cond(first, lambda i=i: empty[1 + i], lambda i=i: gpu.load(rows[i], layout=gpu.WGMMA_ROW)) for i in range(2)]
    maximum, from_joined, from_chunk = softmax_state.shares(before[0], maximum)
    rows[0][...] = maximum
    rows[1][...] = before[1] * from_joined + total * from_chunk
    for piece in range(smem.joined.shape[1]):  # a part at a time, for want of registers
        here, part = smem.joined.at[me, piece], acc[:, piece * PIECE : (piece + 1) * PIECE]
        before = lax.cond(first, lambda: empty[0], lambda here=here: gpu_tiles.kept(here))
        gpu_tiles.keep(softmax_state.join_acc(before, part, from_joined, from_chunk), here)


def _next_slot(g: Geometry, slot):
    """The slot of the ring that follows."""
    return jnp.where(slot + 1 == g.stages, 0, slot + 1)


def _give_back(g: Geometry, smem: Scratch, slot) -> None:
    """A consumer has a block's weights, and its slot may be filled again. Where logits are bounded its values are still to be read,
    and it is the slot of the block before that may be filled."""
    if _is_bounded(g, smem):
        slot = jnp.where(slot == 0, g.stages - 1, slot - 1)
    gpu.barrier_arrive(smem.kv_empty.at[slot])


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


class _Next:
    """The next block's scores, which a block begins. more: whether there is one; else they are those of the same keys again, and
    nobody looks at them."""

    def __init__(self, g: Geometry, smem: Scratch, me, block, end, slot):
        self.smem, self.me, self.slot, self.more = smem, me, slot, block + 1 < end
        self.following = _next_slot(g, slot)

    def wait(self) -> None:
        """For its keys."""
        pl.when(self.more)(lambda: gpu.barrier_wait(self.smem.kv_full.at[self.following]))

    def compute(self, scores) -> None:
        keys = self.smem.kv.at[jnp.where(self.more, self.following, self.slot), 0]
        gpu.wgmma(scores, self.smem.q.at[self.me], keys.transpose((1, 0)))


def _fold_online(g: Geometry, smem: Scratch, me, item: Item, position, end, begin, stop, carry):
    """(the state of the tile's rows after the blocks from `begin` to `stop`, the ring's slot and the scores after them), of any
    logits. carry: the slot and the scores, f32[64, BLOCK], of the first block. A row's total is in parts: a thread adds up its own
    until the chunk ends, so that in a block threads exchange maxima alone."""

    def fold(block, carry):
        state, slot, x = carry
        following = _Next(g, smem, me, block, end, slot)

        def softmax():
            (acc, *stats), weights = block_weights.online(g, position, block, state, x)
            return acc, stats, weights.astype(smem.kv.dtype)

        def add_values(scores, acc, stats, weights):
            acc, following_x = _add_weighted_values(g, smem, me, acc, weights, slot, scores)
            return (acc, *stats), following_x

        def beside_the_softmax(scores):
            following.compute(scores)
            return add_values(scores, *softmax())

        _clean_tail(g, smem, me, item, block, slot)
        if g.consumers == 1:
            following.wait()
            state, x = pl.run_scoped(beside_the_softmax, gpu.ACC((ROWS, BLOCK), jnp.float32))
        else:
            weighted = lax.optimization_barrier(softmax())  # before the scores take registers
            following.wait()

            def beside_the_values(scores):
                following.compute(scores)
                return add_values(scores, *weighted)

            state, x = pl.run_scoped(beside_the_values, gpu.ACC((ROWS, BLOCK), jnp.float32))
        _give_back(g, smem, slot)
        return state, following.following, x

    acc, maximum, _ = softmax_state.empty(smem.q.shape[-1])
    state, *carry = lax.fori_loop(begin, stop, fold, ((acc, maximum, block_weights.no_parts()), *carry))
    return state, *carry


def _fold_bounded(g: Geometry, smem: Scratch, me, item: Item, position, end, begin, stop, carry):
    """As `_fold_online`, of bounded logits. Nothing is scaled, so that a block's values are still being multiplied while the next
    one's weights are computed."""

    def fold(acc, block, carry):
        totals, slot, x = carry
        following = _Next(g, smem, me, block, end, slot)

        def softmax(y):
            return block_weights.bounded(g, position, block, totals, y, smem.kv.dtype)

        def end_block_before(wait_n):
            gpu.wgmma_wait(wait_n)
            _give_back(g, smem, slot)

        def add_values(scores, weights):
            if g.interpreted:
                smem.weights.at[me][...] = weights
                gpu.commit_smem()
                weights = smem.weights.at[me]
            gpu.wgmma(acc, weights, smem.kv.at[slot, 1])
            return gpu.wgmma_accumulator_load(scores, wait_n=1)

        def beside_the_softmax(scores):
            following.compute(scores)
            new_totals, weights = softmax(y)
            end_block_before(1)
            return new_totals, add_values(scores, weights)

        _clean_tail(g, smem, me, item, block, slot)
        y = block_weights.exponents(g, x)
        if g.consumers == 1:
            y = lax.optimization_barrier(y)  # before the next scores take x's registers
            following.wait()
            totals, x = pl.run_scoped(beside_the_softmax, gpu.ACC((ROWS, BLOCK), jnp.float32))
        else:
            totals, weights = lax.optimization_barrier(softmax(y))  # before the scores take registers
            end_block_before(0)
            following.wait()

            def beside_the_values(scores):
                following.compute(scores)
                return add_values(scores, weights)

            x = pl.run_scoped(beside_the_values, gpu.ACC((ROWS, BLOCK), jnp.float32))
        return totals, following.following, x

    def walk(acc):
        totals, *after = lax.fori_loop(begin, stop, functools.partial(fold, acc), (block_weights.no_parts(), *carry))
        return acc[...], totals, *after

    acc, totals, *after = pl.run_scoped(walk, gpu.ACC((ROWS, smem.q.shape[-1]), jnp.float32))
    # Of every state: none is scaled where they are joined.
    maximum = gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), gpu.WGMMA_ROW)
    return (acc, maximum, totals), *after


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
                row = spread(gpu_tiles.tile_rows(), v)
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
    _give_back(g, smem, slot)
    return _next_slot(g, slot)


def _store_rows(g: Geometry, refs: Refs, smem: Scratch, me, item: Item, token, tokens) -> None:
    """Writes finished rows: those of `tokens` tokens from row `token` of q on."""
    acc = jnp.concatenate([gpu_tiles.kept(smem.joined.at[me, piece]) for piece in range(smem.joined.shape[1])], axis=1)
    total = gpu.load(smem.joined_stats.at[me, 1], layout=gpu.WGMMA_ROW)
    rows = softmax_state.output(acc, total).astype(smem.out.dtype)
    gpu.commit_smem()  # all have read smem.joined, whose memory smem.out is
    gpu_tiles.write_tile(rows, smem.out.at[me, 0])
    gpu.commit_smem()

    def store(t, _):
        heads = refs.out.at[token + t, pl.ds(item.head * g.group, g.group)]
        gpu.copy_smem_to_gmem(smem.out.at[me, 0, pl.ds(t * g.group, g.group)], heads)

    lax.fori_loop(0, tokens, store, None)


def _store_partial(g: Geometry, refs: Refs, smem: Scratch, head, slot, state) -> None:
    """Writes the state of a split sequence's rows after a chunk, for `combine`."""
    stats = [smem.joined_stats.at[0, 0], smem.joined_stats.at[0, 1]]
    acc, stats[0][...], stats[1][...] = state
    gpu_tiles.write_tile(acc, smem.acc)
    gpu.commit_smem()
    slot = slot * g.num_kv_heads + head
    gpu.copy_smem_to_gmem(smem.acc.at[pl.ds(0, g.split_rows)], refs.partial_acc.at[slot])
    gpu.copy_smem_to_gmem(stats[0], refs.partial_stats.at[slot, 0])
    gpu.copy_smem_to_gmem(stats[1], refs.partial_stats.at[slot, 1])
