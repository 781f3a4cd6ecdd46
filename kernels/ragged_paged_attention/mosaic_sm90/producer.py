"""The kernel's producer warpgroup: it issues every load. `kernel` lists the barriers."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.geometry import Geometry, Item, Refs, Scratch, first_page, items_of_cta, load_item
from kernels.ragged_paged_attention.work_list import BLOCK, TAIL


def produce(g: Geometry, refs: Refs, smem: Scratch) -> None:
    """Loads every item's queries and KV blocks, in order, as the ring has room."""

    def item_loads(index, count):
        item = load_item(g, refs, index)
        gpu.barrier_wait(smem.q_empty)
        _load_queries(g, refs, smem, item)
        item = load_item(g, refs, index)  # again, rather than kept in registers: a producer beside two consumers has few

        def load_block(block, count):
            slot = lax.rem(count, jnp.int32(g.stages))

            def load_page(i, _):
                row = i * g.copy_rows
                left = lax.div(item.kv_len - block * BLOCK - row + (TAIL - 1), jnp.int32(TAIL))  # to the sequence's end
                least = 0 if g.copy_rows < BLOCK else 1
                sizes = range(least * TAIL, g.copy_rows + 1, TAIL)
                copies = [functools.partial(_load_rows, g, refs, smem, item, block, slot, row, size) for size in sizes]
                here = jnp.where(i == 0, 1, least)  # a block that is read begins before the end
                lax.switch(jnp.clip(left, here, g.copy_rows // TAIL) - least, copies)

            gpu.barrier_wait(smem.kv_empty.at[slot])
            # A loop, though short: unrolled, pages of 16 spill where the producer has 24 registers.
            lax.fori_loop(0, BLOCK // g.copy_rows, load_page, None)
            return count + 1

        return lax.fori_loop(item.first_block, item.end_block, load_block, count)

    lax.fori_loop(*items_of_cta(g, refs), item_loads, jnp.int32(0))
    gpu.barrier_wait(smem.q_empty)  # every phase of a barrier must be seen before the kernel ends
    for slot in range(g.stages):
        gpu.barrier_wait(smem.kv_empty.at[slot])


def _load_queries(g: Geometry, refs: Refs, smem: Scratch, item: Item) -> None:
    """The query heads of each consumer's tokens, a copy each. Past the item's last token come those of other sequences, and past
    the end of q zeros: rows that nobody stores."""
    for consumer in range(g.consumers):
        first = item.token + consumer * g.tokens
        if g.interpreted:
            lax.fori_loop(0, g.tokens, functools.partial(_load_token, g, refs, smem, item, consumer, first), None)
        else:
            rows = smem.q_loaded.at[consumer, pl.ds(0, g.tokens * g.group)]
            heads = refs.q.at[pl.ds(first, g.tokens), item.head]
            gpu.copy_gmem_to_smem(heads, rows.reshape((g.tokens, g.group, rows.shape[-1])), smem.q_full)


def _load_token(g: Geometry, refs: Refs, smem: Scratch, item: Item, consumer: int, first, t, _) -> None:
    """One token's query heads, for the interpreter: it can't reshape shared memory, nor pass the end of an array."""
    token = jnp.minimum(first + t, refs.q.shape[0] - 1)
    gpu.copy_gmem_to_smem(refs.q.at[token, item.head], smem.q_loaded.at[consumer, pl.ds(t * g.group, g.group)], smem.q_full)


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
        page = jnp.maximum(page, first_page(g, item))
    page_id = refs.page_table[item.seq, page]
    offset = lax.rem(position, jnp.int32(g.page_size)) if g.page_size > BLOCK else 0
    for k_or_v in range(2):
        gpu.copy_gmem_to_smem(
            refs.kv_pages.at[page_id, k_or_v, item.head, pl.ds(offset, num_rows)],
            smem.kv.at[slot, k_or_v, pl.ds(row, num_rows)],
            smem.kv_full.at[slot],
        )
