"""The small kernel that runs after `kernel`: it joins the partial results of split sequences and writes their rows.

Slots rise with KV position, so that the order is that of a tile which walks all its KV itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu, gpu_threads
from kernels.gpu_threads import Rows
from kernels.ragged_paged_attention.logits import ROWS
from kernels.ragged_paged_attention.mosaic_portable import softmax_state
from kernels.ragged_paged_attention.mosaic_portable.kernel import STATS
from kernels.ragged_paged_attention.work_list import GROUP_FIELDS


class _Refs(NamedTuple):
    """The kernel's arguments in GMEM."""

    out: Any  # [T, N, H]
    partial: Any  # f32[M * split_rows + 64, H + STATS], M = slots * K
    work: Any  # i32[size]
    cu_q_lens: Any  # i32[S+1]


def join_partials(
    out: jax.Array,  # [T, N, H]
    partial: jax.Array,  # f32[M * split_rows + 64, H + STATS]
    work: jax.Array,  # i32[size], work_list's array
    cu_q_lens: jax.Array,  # i32[S+1]
    *,
    split_rows: int,
    num_split_at: int,  # where the work list has the number of its groups, and where these begin
    groups_at: int,
    num_ctas: int,
    num_kv_heads: int,
) -> jax.Array:  # [T, N, H]
    """`out` with the rows of split sequences written; in place where `out` is an intermediate. The CTAs take turns at the groups,
    KV heads and pieces of columns that there are."""
    H, K = out.shape[2], num_kv_heads
    pieces = H // gpu_threads.tile_columns(H)

    def portable_join(*args):
        refs = _Refs(*args)
        cta = lax.axis_index("cta")

        def join_turn(turn, _):
            index = turn * num_ctas + cta
            piece, unit = lax.rem(index, jnp.int32(pieces)), lax.div(index, jnp.int32(pieces))
            group, head = lax.div(unit, jnp.int32(K)), lax.rem(unit, jnp.int32(K))
            seq, first, count = (refs.work[groups_at + group * GROUP_FIELDS + column] for column in range(GROUP_FIELDS))
            _join_group(refs, K, split_rows, piece, head, seq, first, count)

        turns = refs.work[num_split_at] * (K * pieces) - cta + (num_ctas - 1)
        lax.fori_loop(0, lax.div(turns, jnp.int32(num_ctas)), join_turn, None)

    ref = jax.new_ref(out)
    gpu.kernel(portable_join, out_type=(), grid={"cta": num_ctas}, scratch_types=[])(ref, partial, work, cu_q_lens)
    return jax.freeze(ref)


def _join_group(refs: _Refs, K: int, split_rows: int, piece, head, seq, first, count) -> None:
    """Writes a piece of the columns of one sequence's rows of one KV head, from `count` partial results from slot `first` on. The
    next one is loaded while one is joined. Rows behind a partial result's own are another's or nobody's, and are not written."""
    T, N, H = refs.out.shape
    width = gpu_threads.tile_columns(H)

    def load(i):
        rows = pl.ds((jnp.minimum(first + i, first + count - 1) * K + head) * split_rows, ROWS)

        def columns(start, size):
            return gpu.load(refs.partial.at[rows, pl.ds(start, size)], layout=gpu.WGMMA, optimized=False)

        maximum, total = (columns(H + k * (STATS // 2), STATS // 2).max(axis=1) for k in range(2))
        return (columns(piece * width, width),), maximum, total

    def fold(i, carry):
        state, following = carry
        return softmax_state.join(state, following), load(i + 1)

    state, _ = lax.fori_loop(0, count, fold, (softmax_state.empty(1, width), load(0)))
    (rows,) = softmax_state.output(state)
    token = refs.cu_q_lens[seq]
    limit = (refs.cu_q_lens[seq + 1] - token) * (N // K)
    to = Rows(token * N + head * (N // K), limit, piece * width, group=N // K, stride=N)
    gpu_threads.store_rows(rows.astype(refs.out.dtype), refs.out, to)
