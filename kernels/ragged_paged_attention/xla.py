"""Ragged paged attention in plain XLA: portable, and fast enough to serve from a CPU.

Owns the tiles, their order and the loop over them. Does not know the page pool: it reads the pages it is told to.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that MASKED - MASKED is 0 and a tile that a row sees nothing of leaves its state as it was


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["seq", "row", "position", "num_rows", "num_tiles", "output_row"],
    meta_fields=["block_q", "block_tiles", "block_kv"],
)
@dataclasses.dataclass(frozen=True)
class Work:
    """Query tiles of one step, longest KV first. Tile w holds up to block_q consecutive queries of one sequence."""

    seq: jax.Array  # i32[W], the tile's sequence
    row: jax.Array  # i32[W], its first row in q
    position: jax.Array  # i32[W], that row's position
    num_rows: jax.Array  # i32[W], 0 for padding
    num_tiles: jax.Array  # i32[], tiles that hold anything; they come first
    output_row: jax.Array  # i32[T], where token t stands in [W * block_q]; W * block_q for rows nobody owns
    block_q: int  # rows a tile
    block_tiles: int  # tiles that walk their KV side by side
    block_kv: int  # positions a step of that walk


def plan_work(
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    num_tokens: int,
    max_q_len: int,
) -> Work:
    S, T = kv_lens.shape[0], num_tokens
    R, B, block_kv = (1, min(S, 8), 128) if max_q_len == 1 else (16, 2, 128)
    owners = min(S, T)
    W = -(-(owners + (T - owners) // R) // B) * B  # sum of ceil(q_len / R), at most, in whole blocks

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    last_tile = jnp.cumsum(-(-q_lens // R))  # i32[S]
    tile = jnp.arange(W)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= last_tile, axis=1), S - 1)
    row_in_seq = (tile - (last_tile[seq] - -(-q_lens[seq] // R))) * R
    num_rows = jnp.clip(q_lens[seq] - row_in_seq, 0, R)
    position = kv_lens[seq] - q_lens[seq] + row_in_seq
    order = jnp.argsort(-jnp.where(num_rows > 0, position + num_rows, 0))
    rank = jnp.argsort(order)

    t = jnp.arange(T)
    seq_of_t = jnp.minimum(jnp.sum(t[:, None] >= cu_q_lens[1:], axis=1), S - 1)
    t_in_seq = t - cu_q_lens[seq_of_t]
    tile_of_t = last_tile[seq_of_t] - -(-q_lens[seq_of_t] // R) + t_in_seq // R
    output_row = jnp.where(t < cu_q_lens[-1], rank[jnp.clip(tile_of_t, 0, W - 1)] * R + t_in_seq % R, W * R)
    return Work(
        seq=seq[order],
        row=(cu_q_lens[seq] + row_in_seq)[order],
        position=position[order],
        num_rows=num_rows[order],
        num_tiles=last_tile[-1],
        output_row=output_row,
        block_q=R,
        block_tiles=B,
        block_kv=block_kv,
    )


def attend(q, kv_pages, page_table, cu_q_lens, kv_lens, *, scale, sliding_window, soft_cap, max_q_len, work):
    T, N, H = q.shape
    num_pages, _, K, page_size, _ = kv_pages.shape
    P = page_table.shape[1]
    G = N // K
    if work is None:
        work = plan_work(cu_q_lens, kv_lens, num_tokens=T, max_q_len=max_q_len)
    R, B = work.block_q, work.block_tiles
    pages = max(1, work.block_kv // page_size)  # of a KV tile
    C = pages * page_size
    W = work.seq.shape[0]

    def block(i, out):
        at = lambda x: jax.lax.dynamic_slice_in_dim(x, i * B, B)
        seq, row, position, num_rows = at(work.seq), at(work.row), at(work.position), at(work.num_rows)
        rows = jnp.minimum(row[:, None] + jnp.arange(R), T - 1)
        q_tile = q[rows].astype(jnp.float32) * scale  # [B, R, N, H]
        q_tile = q_tile.reshape(B, R, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, R * G, H)
        q_pos = (position[:, None] + jnp.arange(R)).repeat(G, axis=1)  # [B, R * G]
        end = jnp.where(num_rows > 0, position + num_rows, 0)
        first = jnp.zeros_like(end) if sliding_window is None else jnp.maximum(position - sliding_window + 1, 0) // C
        table = page_table[seq]

        def step(j, state):
            m, l, acc = state
            tile = first + j
            column = jnp.minimum(tile[:, None] * pages + jnp.arange(pages), P - 1)
            ids = jnp.clip(jnp.take_along_axis(table, column, axis=1), 0, num_pages - 1)  # [B, pages]
            kv = kv_pages[ids].transpose(2, 0, 3, 1, 4, 5).reshape(2, B, K, C, H).astype(jnp.float32)
            k_pos = tile[:, None] * C + jnp.arange(C)  # [B, C]
            v = jnp.where((k_pos < end[:, None])[:, None, :, None], kv[1], 0)
            x = jnp.einsum("bkrh,bkch->bkrc", q_tile, kv[0])
            if soft_cap is not None:
                x = soft_cap * jnp.tanh(x / soft_cap)
            seen = k_pos[:, None] <= q_pos[:, :, None]
            if sliding_window is not None:
                seen &= k_pos[:, None] > q_pos[:, :, None] - sliding_window
            seen = seen[:, None]
            m_new = jnp.maximum(m, jnp.max(jnp.where(seen, x, MASKED), axis=-1, keepdims=True))
            p = jnp.where(seen, jnp.exp(x - m_new), 0)
            alpha = jnp.exp(m - m_new)
            l = l * alpha + jnp.sum(p, axis=-1, keepdims=True)
            acc = acc * alpha + jnp.einsum("bkrc,bkch->bkrh", p, v)
            return m_new, l, acc

        n = jnp.max(-(-end // C) - first)
        state = (
            jnp.full((B, K, R * G, 1), MASKED),
            jnp.zeros((B, K, R * G, 1)),
            jnp.zeros((B, K, R * G, H)),
        )
        _, l, acc = jax.lax.fori_loop(0, n, step, state)
        o = (acc / jnp.where(l > 0, l, 1)).astype(q.dtype)
        o = o.reshape(B, K, R, G, H).transpose(0, 2, 1, 3, 4).reshape(B, R, N, H)
        return jax.lax.dynamic_update_slice_in_dim(out, o, i * B, axis=0)

    out = jax.lax.fori_loop(0, -(-work.num_tiles // B), block, jnp.zeros((W, R, N, H), q.dtype))
    return jnp.take(out.reshape(W * R, N, H), work.output_row, axis=0, mode="fill", fill_value=0)
