"""Ragged paged attention for Hopper in Pallas Mosaic GPU: one persistent kernel for decodes, prefill chunks and drafts alike.

Owns the kernel that computes the items of a work list. Does not know how the list is made (work_list), how the partial results of
split sequences are joined (combine), nor how tile sizes are chosen (tiles).

A CTA is one or two consumer warpgroups, which compute, and a producer warpgroup, which issues every load. A consumer's tile is
64 rows: row r is query token r // G of the tile and head r % G of the KV head's group, so a page is read once a KV head. Keys and
values come through a ring of `stages` slots of 64 positions that runs on across items: the next item's first blocks load while
this one's last are computed. The softmax is online (Milakov and Gimelshein, arXiv:1805.02867) and starts afresh at every `chunk`
positions; the chunks' states are joined in order, by the tile itself, or through memory where they ran on different CTAs.

Barriers, who arrives and who waits:
- q_full: the loads of an item's queries arrive; consumers wait. q_empty: a consumer that has copied its rows; the producer waits.
- kv_full[slot]: the loads of a block arrive; consumers wait. kv_empty[slot]: a consumer done with the block; the producer waits.
- clean: consumer 0 when it has zeroed the values past a sequence's end; consumer 1 waits.
- turn: the two consumers meet twice a block, half a block apart, so that the softmax of one runs beside the wgmmas of the other
  (FlashAttention-3, arXiv:2407.08608, section 3.1). Every block of an item counts, also one that a consumer only passes by.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90 import softmax_state
from kernels.ragged_paged_attention.mosaic_sm90.softmax_state import MASKED, spread
from kernels.ragged_paged_attention.mosaic_sm90.tiles import REGISTERS, REGISTERS_WINDOW_AND_CAP, ROWS
from kernels.ragged_paged_attention.mosaic_sm90.work_list import BLOCK, ITEM_FIELDS, TAIL

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What the kernel is specialised for. group: query heads a KV head; tokens: query tokens of one consumer's rows."""

    consumers: int
    stages: int
    chunk_blocks: int
    num_kv_heads: int
    items_at: int  # where items, order and cta_start begin in the work list
    order_at: int
    cta_start_at: int
    group: int
    tokens: int
    page_size: int
    split_rows: int  # rows of a partial result; 0 where nothing is split
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    interpreted: bool

    @property
    def copy_rows(self) -> int:
        """Positions that one copy brings, before a sequence's last ones."""
        return min(self.page_size, BLOCK)

    @property
    def drops_pages(self) -> bool:
        """Whether a block may begin with pages that the sliding window has left behind."""
        return self.sliding_window is not None and self.page_size < BLOCK

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of a consumer and of the producer, where there are two consumers."""
        return REGISTERS if self.sliding_window is None or self.soft_cap is None else REGISTERS_WINDOW_AND_CAP


class Item(NamedTuple):
    """One item in true lengths, i32 scalars. Positions count from the start of the sequence, blocks in BLOCK positions."""

    seq: Any
    head: Any  # KV head
    slot: Any  # of its first chunk's partial result; negative: it ends its rows
    token: Any  # row of q of its first query token
    num_tokens: Any  # its sequence's query tokens from there on
    position: Any  # of that first token
    kv_len: Any
    first_block: Any
    end_block: Any
    first_chunk: Any  # of those that it leaves partial results of, if it does
    end_chunk: Any


class Refs(NamedTuple):
    """The kernel's arguments in GMEM. W items, M = slots * K."""

    q: Any  # [T, N, H]
    kv_pages: Any  # [num_pages, 2, K, page_size, H]
    page_table: Any  # i32[S, P]
    cu_q_lens: Any  # i32[S+1]
    kv_lens: Any  # i32[S]
    work: Any  # i32[size], work_list's array
    out: Any  # [T, N, H]
    partial_acc: Any = None  # f32[M, split_rows, H]
    partial_stats: Any = None  # f32[M, 2, 64]: maximum, total of each row


class Scratch(NamedTuple):
    """Shared memory of a CTA, C consumers, and its barriers."""

    q_loaded: Any  # [C, 64, H], plain: a copy into tiles would have to start at a multiple of 8 rows of q
    q: Any  # [C, 64, H], as wgmma reads it
    kv: Any  # [stages, 2, BLOCK, H]
    out: Any  # [C, 64, H]
    q_full: Any
    q_empty: Any
    kv_full: Any  # [stages]
    kv_empty: Any  # [stages]
    clean: Any = None
    turn: Any = None
    acc: Any = None  # f32[64, H], of a partial result
    maximum: Any = None  # f32[64]
    total: Any = None  # f32[64]
    weights: Any = None  # [C, 64, BLOCK], where the interpreter wants them in SMEM


def _item(g: Geometry, refs: Refs, index) -> Item:
    """Loads an item and clips it to the true lengths."""
    entry = refs.work[g.order_at + index]
    unit, head = lax.div(entry, jnp.int32(g.num_kv_heads)), lax.rem(entry, jnp.int32(g.num_kv_heads))
    seq, row, begin, chunks, slot = (refs.work[g.items_at + unit * ITEM_FIELDS + column] for column in range(ITEM_FIELDS))
    first_token, kv_len = refs.cu_q_lens[seq], refs.kv_lens[seq]
    q_len = refs.cu_q_lens[seq + 1] - first_token
    position = kv_len - q_len + row
    num_tokens = jnp.maximum(q_len - row, 0)
    end = _blocks(position + jnp.minimum(num_tokens, g.tokens * g.consumers))
    end = jnp.where(slot >= 0, jnp.minimum(end, begin + chunks * g.chunk_blocks), end)
    first_chunk = lax.div(begin, jnp.int32(g.chunk_blocks))
    if g.sliding_window is not None:
        begin = jnp.maximum(begin, lax.div(jnp.maximum(position - g.sliding_window + 1, 0), jnp.int32(BLOCK)))
    end = jnp.where(num_tokens > 0, jnp.maximum(end, begin), begin)
    token = first_token + row
    return Item(seq, head, slot, token, num_tokens, position, kv_len, begin, end, first_chunk, first_chunk + chunks)


def _blocks(positions):
    return lax.div(positions + (BLOCK - 1), jnp.int32(BLOCK))


def _first_page(g: Geometry, item: Item):
    """The first page that the item sees through the sliding window: those before it may be gone."""
    return lax.div(jnp.maximum(item.position - g.sliding_window + 1, 0), jnp.int32(g.page_size))


def _items_of_cta(g: Geometry, refs: Refs):
    """The entries (first, end) of the order that are this CTA's."""
    cta = lax.axis_index("cta")
    return refs.work[g.cta_start_at + cta], refs.work[g.cta_start_at + cta + 1]


# -- the producer


def _produce(g: Geometry, refs: Refs, smem: Scratch) -> None:
    """Loads every item's queries and KV blocks, in order, as the ring has room."""

    def item_loads(index, count):
        item = _item(g, refs, index)
        gpu.barrier_wait(smem.q_empty)
        lax.fori_loop(0, g.tokens, functools.partial(_load_tokens, g, refs, smem, item), None)
        item = _item(g, refs, index)  # again, rather than kept in registers: a producer beside two consumers has few

        def load_block(block, count):
            slot = lax.rem(count, jnp.int32(g.stages))

            def load_page(i, _):
                row = i * g.copy_rows
                left = lax.div(item.kv_len - block * BLOCK - row + (TAIL - 1), jnp.int32(TAIL))  # to the sequence's end
                least = 0 if g.copy_rows < BLOCK else 1  # a block that is read begins before the end
                sizes = range(least * TAIL, g.copy_rows + 1, TAIL)
                copies = [functools.partial(_load_rows, g, refs, smem, item, block, slot, row, size) for size in sizes]
                lax.switch(jnp.clip(left, least, g.copy_rows // TAIL) - least, copies)

            gpu.barrier_wait(smem.kv_empty.at[slot])
            # A loop, though short: unrolled, pages of 16 spill where the producer has 24 registers.
            lax.fori_loop(0, BLOCK // g.copy_rows, load_page, None)
            return count + 1

        return lax.fori_loop(item.first_block, item.end_block, load_block, count)

    lax.fori_loop(*_items_of_cta(g, refs), item_loads, jnp.int32(0))
    gpu.barrier_wait(smem.q_empty)  # every phase of a barrier must be seen before the kernel ends
    for slot in range(g.stages):
        gpu.barrier_wait(smem.kv_empty.at[slot])


def _load_tokens(g: Geometry, refs: Refs, smem: Scratch, item: Item, t, _) -> None:
    """The query heads of each consumer's token t; past the item's last token that one again, to be ignored."""
    last = jnp.maximum(item.num_tokens - 1, 0)
    for consumer in range(g.consumers):
        token = item.token + jnp.minimum(consumer * g.tokens + t, last)
        heads = refs.q.at[token, pl.ds(item.head * g.group, g.group)]
        gpu.copy_gmem_to_smem(heads, smem.q_loaded.at[consumer, pl.ds(t * g.group, g.group)], smem.q_full)


def _load_rows(g: Geometry, refs: Refs, smem: Scratch, item: Item, block, slot, row, num_rows: int) -> None:
    """The keys and values of the `num_rows` positions that begin at row `row` of the block. They are of one page. Rows past the
    sequence's end keep what was there: the keys' logits are masked, the values are zeroed by _clean_tail."""
    if not num_rows:
        gpu.barrier_arrive(smem.kv_full.at[slot])
        gpu.barrier_arrive(smem.kv_full.at[slot])
        return
    position = block * BLOCK + row
    page = lax.div(position, jnp.int32(g.page_size))
    if g.drops_pages:  # the first page that is seen is loaded instead, to be masked
        page = jnp.maximum(page, _first_page(g, item))
    page_id = refs.page_table[item.seq, page]
    offset = lax.rem(position, jnp.int32(g.page_size)) if g.page_size > BLOCK else 0
    for k_or_v in range(2):
        gpu.copy_gmem_to_smem(
            refs.kv_pages.at[page_id, k_or_v, item.head, pl.ds(offset, num_rows)],
            smem.kv.at[slot, k_or_v, pl.ds(row, num_rows)],
            smem.kv_full.at[slot],
        )


# -- the consumers


def _consume(g: Geometry, refs: Refs, smem: Scratch, me) -> None:
    """Computes every item's rows. `me`: which consumer this is."""

    def item_rows(index, count):
        item = _item(g, refs, index)
        gpu.barrier_wait(smem.q_full)
        smem.q.at[me][...] = gpu.load(smem.q_loaded.at[me], layout=gpu.WGMMA, optimized=False)
        gpu.commit_smem()
        gpu.barrier_arrive(smem.q_empty)

        first_token = me * g.tokens
        position = item.position + first_token  # of this consumer's first token
        tokens = jnp.clip(item.num_tokens - first_token, 0, g.tokens)
        end = jnp.where(tokens > 0, _blocks(position + tokens), item.first_block)
        end = jnp.clip(end, item.first_block, item.end_block)  # past it come blocks that only the other consumer sees
        state, count = _walk(g, refs, smem, me, index, item, position, end, count)
        item = _item(g, refs, index)  # again, rather than kept in registers, of which the walk has none to spare
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
    lax.fori_loop(*_items_of_cta(g, refs), item_rows, jnp.int32(0))
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
                here = _item(g, refs, index)  # again, rather than kept in registers
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
                    kept = jnp.logical_and(kept, position >= _first_page(g, item) * g.page_size)
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
    """Writes the state of a split sequence's rows after a chunk, for combine."""
    gpu.wait_smem_to_gmem(0)
    smem.acc[...], smem.maximum[...], smem.total[...] = state
    gpu.commit_smem()
    slot = slot * g.num_kv_heads + head
    gpu.copy_smem_to_gmem(smem.acc.at[pl.ds(0, g.split_rows)], refs.partial_acc.at[slot])
    gpu.copy_smem_to_gmem(smem.maximum, refs.partial_stats.at[slot, 0])
    gpu.copy_smem_to_gmem(smem.total, refs.partial_stats.at[slot, 1])


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
    tile = gpu.SMEM((C, ROWS, H), dtype)
    swizzled = gpu.SMEM((C, ROWS, H), dtype, transforms=gpu.SWIZZLED)
    scratch = {
        "q_loaded": tile,
        "q": swizzled,
        "kv": gpu.SMEM((g.stages, 2, BLOCK, H), dtype, transforms=gpu.SWIZZLED),
        "out": tile,
        "q_full": gpu.Barrier(num_arrivals=C * g.tokens),
        "q_empty": gpu.Barrier(num_arrivals=C),
        "kv_full": gpu.Barrier(num_arrivals=2 * BLOCK // g.copy_rows, num_barriers=g.stages),
        "kv_empty": gpu.Barrier(num_arrivals=C, num_barriers=g.stages),
    }
    if C > 1:
        scratch |= {"clean": gpu.Barrier(), "turn": gpu.Barrier(num_arrivals=C)}
    if splits:
        scratch |= {"acc": gpu.SMEM((ROWS, H), jnp.float32)}
        scratch |= {name: gpu.SMEM((ROWS,), jnp.float32) for name in ("maximum", "total")}
    if g.interpreted:
        scratch |= {"weights": gpu.SMEM((C, ROWS, BLOCK), dtype, transforms=gpu.SWIZZLED)}
    names, num_refs = list(scratch), 9 if splits else 7

    def ragged_paged_attention(*args):
        refs, smem = Refs(*args[:num_refs]), Scratch(**dict(zip(names, args[num_refs:], strict=True)))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == C)
        def _():
            if C > 1 and not g.interpreted:
                gpu.set_max_registers(g.registers[1], action="decrease")
            _produce(g, refs, smem)

        @pl.when(warpgroup < C)
        def _():
            if C > 1 and not g.interpreted:
                gpu.set_max_registers(g.registers[0], action="increase")
            _consume(g, refs, smem, warpgroup)

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
    )(q, kv_pages, page_table, cu_q_lens, kv_lens, work)
    return (results[0], (results[1], results[2])) if splits else (results[0], None)
