"""A work list that the device plans itself, for steps of one query token a sequence whose lengths the host does not know.

It is an array of `work_list`'s, cheaper to make and less even: what is cut is cut into runs of one length, and the CTAs take the
items as they come, each up to its share. No CTA has more than its share and one item, and an item of a split sequence is at most
1 / SPLIT_SHARE of a share, or one chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels.ragged_paged_attention.work_list import BLOCK, ITEM_COST, MAX_RUN, SPLIT_SHARE, WorkShape


def plan_decodes(
    shape: WorkShape,
    kv_lens: jax.Array,  # i32[S]
    least_kv_lens: jax.Array | None = None,  # i32[S]
) -> jax.Array:  # i32[shape.size]
    """Plans one query token of each sequence whose kv_len is not 0. kv_lens and least_kv_lens are bounds, as `work_list.plan`'s, so
    that one list may serve several steps.

    A few small sums and compares, O(num_items * (S + K * num_ctas)), no sort and no loop.

    Raises ValueError for a shape of several query tokens a sequence, or of another number of sequences.
    """
    S, K, chunk = shape.num_seqs, shape.num_kv_heads, shape.chunk // BLOCK
    if shape.max_q_len != 1 or kv_lens.shape != (S,):
        raise ValueError(f"{kv_lens.shape=} must be ({S},), and max_q_len={shape.max_q_len} 1: plan other steps on the host")
    least_kv_lens = kv_lens if least_kv_lens is None else least_kv_lens
    has_query = kv_lens > 0
    first = jnp.zeros(S, jnp.int32)  # first chunk that the query may see
    if shape.sliding_window is not None:
        first = jnp.maximum(least_kv_lens - shape.sliding_window, 0) // shape.chunk
    blocks = -(-kv_lens // BLOCK)
    left = jnp.where(has_query, blocks - first * chunk, 0)
    num_chunks = jnp.maximum(-(-left // chunk), 1)
    share = jnp.sum(left + jnp.where(has_query, ITEM_COST, 0)) * K // shape.num_ctas
    split = (left > share // SPLIT_SHARE) & (num_chunks > 1)
    slots = _before(jnp.where(split, num_chunks, 0))
    split &= slots + num_chunks <= shape.num_slots  # in order, while slots last
    run = jnp.clip(share // (SPLIT_SHARE * chunk), 1, MAX_RUN)  # chunks of an item of a split sequence
    count = jnp.where(split, -(-num_chunks // run), has_query)
    item_before = _before(count)
    cost_before = _before(left + ITEM_COST * count)

    i = jnp.arange(shape.num_items, dtype=jnp.int32)
    seq = _owner(i, item_before + count)
    is_split, turn = split[seq], i - item_before[seq]
    start = jnp.where(is_split, turn * run, 0)  # in chunks, from the sequence's first
    begin = (first[seq] + start) * chunk
    chunks = jnp.where(is_split, jnp.minimum(run, num_chunks[seq] - start), 0)
    slot = jnp.where(is_split, slots[seq] + start, -1)
    items = jnp.stack([seq, jnp.zeros_like(seq), begin, chunks, slot], axis=1)

    size = jnp.where(is_split, jnp.minimum(chunks * chunk, blocks[seq] - begin), left[seq]) + ITEM_COST
    num_entries, total = jnp.sum(count) * K, jnp.sum(left + ITEM_COST * count) * K
    before = (cost_before[seq] + start * chunk + ITEM_COST * turn) * K  # of the items in front of each, all KV heads
    entry = jnp.arange(shape.num_items * K, dtype=jnp.int32)
    middle = (before[:, None] + size[:, None] * (jnp.arange(K) + 0.5)).reshape(-1)  # of each entry, had one CTA all of them
    level = jnp.arange(shape.num_ctas + 1) * (total / shape.num_ctas)
    cta_start = jnp.sum((middle < level[:, None]) & (entry < num_entries), axis=1, dtype=jnp.int32)
    cta_start = cta_start.at[-1].set(num_entries)

    ends = slots + jnp.where(split, num_chunks, 0)
    of = _owner(jnp.arange(max(1, shape.num_groups), dtype=jnp.int32), _before(split) + split)
    groups = jnp.stack([of, slots[of], (ends - slots)[of]], axis=1)
    parts = items, entry, cta_start, jnp.sum(split, dtype=jnp.int32), groups
    return jnp.concatenate([part.reshape(-1).astype(jnp.int32) for part in parts])


def _before(x: jax.Array) -> jax.Array:  # i32[S] -> i32[S]
    """The sum of what stands in front of each."""
    s = jnp.arange(len(x), dtype=jnp.int32)
    return jnp.sum(jnp.where(s[None] < s[:, None], x.astype(jnp.int32)[None], 0), axis=1, dtype=jnp.int32)


def _owner(index: jax.Array, ends: jax.Array) -> jax.Array:
    """The first of the rising ends that is more than each index; the last one for what lies past them all."""
    return jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), len(ends) - 1)
