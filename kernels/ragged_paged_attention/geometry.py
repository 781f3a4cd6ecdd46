"""What the producer and the consumers of the kernel share: its static sizes, its arguments, its shared memory and its items."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from kernels.ragged_paged_attention.work_list import BLOCK, ITEM_FIELDS


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
    """The kernel's arguments in GMEM. M = slots * K, G = N // K."""

    q: Any  # [T, N, H]; for Hopper [T, K, G, H]
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
    joined: Any  # f32[C, H / PIECE, 64, PIECE]: the accumulators of an item's chunks so far
    joined_stats: Any  # f32[C, 2, 64]: their maxima and totals; of consumer 0 also those of a partial result
    out: Any  # [C, 2, 64, H], of which [:, 0]; in the memory of `joined`
    q_full: Any
    q_empty: Any
    kv_full: Any  # [stages]
    kv_empty: Any  # [stages]
    clean: Any = None  # [stages]
    acc: Any = None  # f32[64, H], of a partial result; in the memory of `joined` of consumer 0
    weights: Any = None  # [C, 64, BLOCK], where the interpreter wants them in SMEM


def load_item(g: Geometry, refs: Refs, index) -> Item:
    """Loads an item and clips it to the true lengths."""
    entry = refs.work[g.order_at + index]
    unit, head = lax.div(entry, jnp.int32(g.num_kv_heads)), lax.rem(entry, jnp.int32(g.num_kv_heads))
    seq, row, begin, chunks, slot = (refs.work[g.items_at + unit * ITEM_FIELDS + column] for column in range(ITEM_FIELDS))
    first_token, kv_len = refs.cu_q_lens[seq], refs.kv_lens[seq]
    q_len = refs.cu_q_lens[seq + 1] - first_token
    position = kv_len - q_len + row
    num_tokens = jnp.maximum(q_len - row, 0)
    end = num_blocks(position + jnp.minimum(num_tokens, g.tokens * g.consumers))
    end = jnp.where(slot >= 0, jnp.minimum(end, begin + chunks * g.chunk_blocks), end)
    first_chunk = lax.div(begin, jnp.int32(g.chunk_blocks))
    if g.sliding_window is not None:
        begin = jnp.maximum(begin, lax.div(jnp.maximum(position - g.sliding_window + 1, 0), jnp.int32(BLOCK)))
    end = jnp.where(num_tokens > 0, jnp.maximum(end, begin), begin)
    token = first_token + row
    return Item(seq, head, slot, token, num_tokens, position, kv_len, begin, end, first_chunk, first_chunk + chunks)


def num_blocks(positions):
    return lax.div(positions + (BLOCK - 1), jnp.int32(BLOCK))


def first_page(g: Geometry, item: Item):
    """The first page that the item sees through the sliding window: those before it may be gone."""
    return lax.div(jnp.maximum(item.position - g.sliding_window + 1, 0), jnp.int32(g.page_size))


def items_of_cta(g: Geometry, refs: Refs):
    """The entries (first, end) of the order that are this CTA's."""
    cta = lax.axis_index("cta")
    return refs.work[g.cta_start_at + cta], refs.work[g.cta_start_at + cta + 1]
