"""Ragged paged attention in plain XLA: portable, and fast enough to serve from a CPU.

The queries of a step are cut into tiles of one sequence's consecutive rows, sorted by KV length, and taken a block of tiles at
a time. A block walks its tiles' KV side by side, up to the longest of them, so that the cost follows the lengths in the batch
and never the page table's width. The softmax is online (Milakov and Gimelshein, arXiv:1805.02867) over KV tiles whose
boundaries are multiples of a fixed length from position 0. A KV tile of which a row sees nothing leaves that row's state as it
was, so a row's bits depend on its own sequence alone, not on the batch, the chunking or the block.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

# Logit of a key that a row does not see, and where a row's running maximum starts. Both finite, so that no inf - inf arises, and
# far apart, so that exp(MASKED - maximum) is exactly 0 even for a row that has seen nothing yet.
MASKED = -1e30
FIRST_MAXIMUM = -1e29

FIXED_TILES = 4, 4, 128  # rows a tile, tiles a block and KV positions, where these must not follow the step's shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """The query tiles of one step, longest KV first where there is more than one block of them."""

    backend: ClassVar[str] = "xla"  # whose plan this is

    seq: jax.Array  # i32[W], the tile's sequence
    row: jax.Array  # i32[W], its first row in q
    position: jax.Array  # i32[W], that row's position
    num_rows: jax.Array  # i32[W], 0 for padding
    num_tiles: jax.Array  # i32[], tiles with rows
    output_row: jax.Array  # i32[T], where row t of q is in [W * block_q]; W * block_q for rows past cu_q_lens[-1]
    block_q: int = dataclasses.field(metadata={"static": True})  # rows a tile
    block_tiles: int = dataclasses.field(metadata={"static": True})  # tiles a block
    fixed_tiles: bool = dataclasses.field(metadata={"static": True})  # whether they are FIXED_TILES

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(block_q, block_tiles, W, T): what the program is compiled for."""
        return self.block_q, self.block_tiles, self.seq.shape[0], self.output_row.shape[0]


def lacks(**_: Any) -> None:
    """What this backend can't do: nothing."""


def _tile_sizes(num_tokens: int, num_seqs: int, max_q_len: int, fixed_tiles: bool) -> tuple[int, int, int]:
    """(block_q, block_tiles, W): rows a tile, tiles a block, and tiles in all, whole blocks, that any batch fits.

    block_q is the average q_len the shape was made for: a decode in a mixed program computes block_q rows to use one, and a
    chunk reads its KV once a tile. At (256, 128), 100 decodes and a chunk of 156 took 15, 21 and 32 ms of one core for block_q
    4, 8 and 16; at (512, 128), two chunks of 256 took 8.4, 7.4 and 6.7 (9/3 heads of 64, bf16).
    """
    owners = min(num_seqs, num_tokens)
    if fixed_tiles:
        block_q, block_tiles, _ = FIXED_TILES
    elif max_q_len == 1:
        block_q, block_tiles = 1, min(owners, 8)
    else:
        block_q = 16 if num_tokens >= 16 * num_seqs else 8 if num_tokens >= 8 * num_seqs else 4
        block_tiles = 4
    # sum of ceil(q_len / block_q) is at most owners + (num_tokens - owners) // block_q.
    tiles = min(owners + (num_tokens - owners) // block_q, num_seqs * -(-max_q_len // block_q))
    if not fixed_tiles:
        block_tiles = min(block_tiles, tiles)
    return block_q, block_tiles, -(-tiles // block_tiles) * block_tiles


def _tile_positions(num_seqs: int, max_q_len: int, page_size: int, fixed_tiles: bool) -> int:
    """KV positions a tile: whole pages, about 128, or 256 where many decodes share the overhead of a loop's iteration."""
    target = FIXED_TILES[2] if fixed_tiles else 256 if max_q_len == 1 and num_seqs >= 16 else 128
    return max(1, target // page_size) * page_size


def plan_work(
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    num_tokens: int,
    max_q_len: int,
    fixed_tiles: bool = False,
) -> Work:
    """Cuts the step's queries into tiles. O(W * S + T * S) compares, no loop."""
    S, T = kv_lens.shape[0], num_tokens
    R, B, W = _tile_sizes(T, S, max_q_len, fixed_tiles)

    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    end_tile = jnp.cumsum((q_lens + R - 1) // R)  # i32[S]
    first_tile = end_tile - (q_lens + R - 1) // R

    tile = jnp.arange(W, dtype=jnp.int32)
    seq = _owner(tile, end_tile)
    row_in_seq = (tile - first_tile[seq]) * R
    num_rows = jnp.clip(q_lens[seq] - row_in_seq, 0, R)
    position = kv_lens[seq] - q_lens[seq] + row_in_seq
    row = cu_q_lens[seq] + row_in_seq

    t = jnp.arange(T, dtype=jnp.int32)
    seq_of_t = _owner(t, cu_q_lens[1:])
    row_of_t = t - cu_q_lens[seq_of_t]
    tile_of_t = jnp.clip(first_tile[seq_of_t] + row_of_t // R, 0, W - 1)

    if W > B:
        order = jnp.argsort(-jnp.where(num_rows > 0, position + num_rows, 0))
        seq, row, position, num_rows = seq[order], row[order], position[order], num_rows[order]
        tile_of_t = jnp.argsort(order)[tile_of_t].astype(jnp.int32)
    return Work(
        seq=seq,
        row=row,
        position=position,
        num_rows=num_rows,
        num_tiles=end_tile[-1],
        output_row=jnp.where(t < cu_q_lens[-1], tile_of_t * R + row_of_t % R, W * R),
        block_q=R,
        block_tiles=B,
        fixed_tiles=fixed_tiles,
    )


def _owner(index: jax.Array, ends: jax.Array) -> jax.Array:
    """The sequence that index falls in, ends being the sequences' rising ends; the last one for what lies past them all."""
    return jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), ends.shape[0] - 1)


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[S, P]
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_q_len: int,
    work: Any,  # Work or None
) -> jax.Array:  # [T, N, H]
    """See api.ragged_paged_attention. Rows past cu_q_lens[-1] are zero."""
    T, N, H = q.shape
    S = kv_lens.shape[0]
    K, page_size = kv_pages.shape[2:4]
    fixed_tiles = isinstance(work, Work) and work.fixed_tiles
    R, B, W = _tile_sizes(T, S, max_q_len, fixed_tiles)
    C = _tile_positions(S, max_q_len, page_size, fixed_tiles)
    G = N // K
    if work is None:
        work = plan_work(cu_q_lens, kv_lens, num_tokens=T, max_q_len=max_q_len)
    elif not isinstance(work, Work) or work.shape != (R, B, W, T):
        raise ValueError(f"{work=} was not planned by plan_work for T={T}, S={S}, {max_q_len=} and this backend")

    def block(i, out):  # out: [W, R, N, H]
        seq, row, position, num_rows = (
            jax.lax.dynamic_slice_in_dim(x, i * B, B) for x in (work.seq, work.row, work.position, work.num_rows)
        )
        rows = jnp.minimum(row[:, None] + jnp.arange(R), T - 1)
        q_tile = q[rows].astype(jnp.float32).reshape(B, R, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, R * G, H)
        o = _walk(
            q_tile * scale,
            (position[:, None] + jnp.arange(R)).repeat(G, axis=1),
            jnp.where(num_rows > 0, position + num_rows, 0),
            seq,
            kv_pages,
            page_table,
            tile_positions=C,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        o = o.astype(q.dtype).reshape(B, K, R, G, H).transpose(0, 2, 1, 3, 4).reshape(B, R, N, H)
        return jax.lax.dynamic_update_slice_in_dim(out, o, i * B, axis=0)

    out = jnp.zeros((W, R, N, H), q.dtype)
    out = block(0, out) if W == B and not fixed_tiles else jax.lax.fori_loop(0, (work.num_tiles + B - 1) // B, block, out)
    return jnp.take(out.reshape(W * R, N, H), work.output_row, axis=0, mode="fill", fill_value=0)


def _walk(
    q,  # f32[B, K, M, H], scaled; M = rows * query heads a KV head
    q_position,  # i32[B, M]
    end,  # i32[B], one past the last position that a row of the tile sees; 0 for a tile without rows
    seq,  # i32[B]
    kv_pages,  # [num_pages, 2, K, page_size, H]
    page_table,  # i32[S, P]
    *,
    tile_positions,  # C, positions a KV tile: whole pages
    sliding_window,
    soft_cap,
):  # f32[B, K, M, H]
    """Online softmax of B query tiles over their KV, tile by tile. Each starts at its own window and they go on together."""
    B, K, M, H = q.shape
    page_size = kv_pages.shape[3]
    C, n = tile_positions, tile_positions // page_size
    last_column = page_table.shape[1] - 1
    # The first position any row of the tile sees. Before it pages may be gone, and NaN may stand where they were.
    begin = jnp.zeros_like(end) if sliding_window is None else jnp.maximum(q_position[:, 0] - sliding_window + 1, 0)

    def step(i, state):
        maximum, total, acc = state
        tile = begin // C + i  # i32[B]
        column = jnp.minimum(tile[:, None] * n + jnp.arange(n), last_column)
        ids = page_table[seq[:, None], column]  # i32[B, n]; past a sequence's pages, anything

        def read(k_or_v):  # converting while gathering costs nothing, and float32 dots are the faster ones on a CPU
            x = kv_pages.at[ids, k_or_v].get(mode="clip")  # [B, n, K, page_size, H]
            return x.transpose(0, 2, 1, 3, 4).reshape(B, K, C, H).astype(jnp.float32)

        position = tile[:, None] * C + jnp.arange(C)  # i32[B, C]
        owned = (position >= begin[:, None]) & (position < end[:, None])
        v = jnp.where(owned[:, None, :, None], read(1), 0)  # 0 * NaN is NaN: masking the weights is not enough
        seen = position[:, None] <= q_position[:, :, None]  # [B, M, C]
        if sliding_window is not None:
            seen &= position[:, None] > q_position[:, :, None] - sliding_window

        x = jnp.einsum("BKMH,BKCH->BKMC", q, read(0), precision="highest")
        if soft_cap is not None:
            x = soft_cap * jnp.tanh(x / soft_cap)
        x = jnp.where((seen & owned[:, None])[:, None], x, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(x, axis=-1, keepdims=True))
        weights = jnp.exp(x - new_maximum)
        shrink = jnp.exp(maximum - new_maximum)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * shrink + jnp.einsum("BKMC,BKCH->BKMH", weights, v, precision="highest")
        return new_maximum, total, acc

    state = (jnp.full((B, K, M, 1), FIRST_MAXIMUM), jnp.zeros((B, K, M, 1)), jnp.zeros((B, K, M, H)))
    num_steps = jnp.max((end + C - 1) // C - begin // C)
    _, total, acc = jax.lax.fori_loop(0, num_steps, step, state)
    return acc / jnp.where(total > 0, total, 1)
