"""The small kernel that runs after `kernel`: it joins the partial results of split sequences and writes their rows.

Slots rise with KV position, so that the order is that of a tile which walks all its KV itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90 import softmax_state
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS
from kernels.ragged_paged_attention.work_list import GROUP_FIELDS

DEPTH = 3  # partial results on their way at a time


def combine(
    out: jax.Array,  # [T, N, H]
    partial_acc: jax.Array,  # f32[M, split_rows, H], M = slots * K
    partial_stats: jax.Array,  # f32[M, 2, 64]: maximum, total of each row
    work: jax.Array,  # i32[size], work_list's array
    cu_q_lens: jax.Array,  # i32[S+1]
    *,
    num_split_at: int,  # where the work list has the number of its groups, and where these begin
    groups_at: int,
    num_ctas: int,
    num_kv_heads: int,
) -> jax.Array:  # [T, N, H]
    """`out` with the rows of split sequences written; in place where `out` is an intermediate. The CTAs take turns at the groups
    and KV heads that there are."""
    H, K = out.shape[2], num_kv_heads

    def join_partial_results(*args):
        refs = _Refs(*args)

        def join_turn(turn, _):
            index = turn * num_ctas + lax.axis_index("cta")
            group, head = lax.div(index, jnp.int32(K)), lax.rem(index, jnp.int32(K))
            seq, first, count = (refs.work[groups_at + group * GROUP_FIELDS + column] for column in range(GROUP_FIELDS))
            _join_group(refs, K, seq, head, first, count)

        turns = refs.work[num_split_at] * K - lax.axis_index("cta") + (num_ctas - 1)
        lax.fori_loop(0, lax.div(turns, jnp.int32(num_ctas)), join_turn, None)

    ref = jax.new_ref(out)
    gpu.kernel(
        join_partial_results,
        out_type=(),
        grid={"cta": num_ctas},
        scratch_types=[
            gpu.SMEM((DEPTH, ROWS, H), jnp.float32),
            gpu.SMEM((DEPTH, 2, ROWS), jnp.float32),
            gpu.SMEM((ROWS, H), out.dtype),
            gpu.Barrier(num_arrivals=2, num_barriers=DEPTH),
        ],
    )(ref, partial_acc, partial_stats, work, cu_q_lens)
    return jax.freeze(ref)


class _Refs(NamedTuple):
    """The kernel's arguments in GMEM, then its shared memory and barriers."""

    out: Any  # [T, N, H]
    acc: Any  # f32[M, split_rows, H]
    stats: Any  # f32[M, 2, 64]
    work: Any  # i32[size]
    cu_q_lens: Any  # i32[S+1]
    acc_smem: Any  # f32[DEPTH, 64, H]
    stats_smem: Any  # f32[DEPTH, 2, 64]
    out_smem: Any  # [64, H]
    full: Any  # [DEPTH]: the loads of a partial result arrive, all wait


def _join_group(refs: _Refs, K: int, seq, head, first, count) -> None:
    """Writes one sequence's rows of one KV head, from `count` partial results that begin at slot `first`."""
    G, split_rows, H = refs.out.shape[1] // K, refs.acc.shape[1], refs.out.shape[2]

    def fetch(i):
        at, slot = (first + i) * K + head, lax.rem(i, jnp.int32(DEPTH))
        gpu.copy_gmem_to_smem(refs.acc.at[at], refs.acc_smem.at[slot, pl.ds(0, split_rows)], refs.full.at[slot])
        gpu.copy_gmem_to_smem(refs.stats.at[at], refs.stats_smem.at[slot], refs.full.at[slot])

    def fold(i, state):
        slot = lax.rem(i, jnp.int32(DEPTH))
        gpu.barrier_wait(refs.full.at[slot])
        acc = gpu.load(refs.acc_smem.at[slot], layout=gpu.WGMMA, optimized=False)
        maximum, total = (gpu.load(refs.stats_smem.at[slot, j], layout=gpu.WGMMA_ROW) for j in range(2))
        gpu.commit_smem()  # all have read the slot before it is filled again
        pl.when(i + DEPTH < count)(lambda: fetch(i + DEPTH))
        return softmax_state.join(state, (acc, maximum, total))

    for i in range(DEPTH):
        pl.when(i < count)(lambda i=i: fetch(jnp.int32(i)))
    acc, _, total = lax.fori_loop(0, count, fold, softmax_state.empty(H))
    refs.out_smem[...] = softmax_state.output(acc, total).astype(refs.out_smem.dtype)
    gpu.commit_smem()
    token = refs.cu_q_lens[seq]

    def store(t, _):
        heads = refs.out.at[token + t, pl.ds(head * G, G)]
        gpu.copy_smem_to_gmem(refs.out_smem.at[pl.ds(t * G, G)], heads)

    lax.fori_loop(0, refs.cu_q_lens[seq + 1] - token, store, None)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
