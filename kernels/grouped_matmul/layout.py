"""The layout that all backends of the grouped matmul share: the choices of a batch sorted by group and cut into tiles.

The rows of a group are consecutive, in the order of their tokens, and begin at a multiple of ROW_ALIGN; groups follow one another.
A tile is at most `block_rows` rows of one group. A group that no token chose has no rows and no tiles, so that a backend which
walks the tiles pays only for the chosen groups.
"""

import dataclasses

import jax
import jax.numpy as jnp

ROW_ALIGN = 8  # what a TMA into swizzled shared memory needs; and XLA:CPU is slow at fewer rows
ELSEWHERE = -1  # a choice of a group whose matrix is not here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """The layout of one batch: T tokens with k choices each among E groups, M rows, W tiles."""

    row: jax.Array  # i32[T, k], the row of each choice; M or more for a choice of padding, or of a group elsewhere
    token: jax.Array  # i32[M], the token of each row; T for a row of no token
    starts: jax.Array  # i32[E], a group's first row
    sizes: jax.Array  # i32[E], its rows
    tile_group: jax.Array  # i32[W]
    tile_row: jax.Array  # i32[W], the tile's first row, a multiple of ROW_ALIGN
    tile_rows: jax.Array  # i32[W], its rows; 0 for padding
    num_tiles: jax.Array  # i32[], tiles with rows; they come first, by rising row
    block_rows: int = dataclasses.field(metadata={"static": True})  # most rows of a tile
    backend: str = dataclasses.field(metadata={"static": True})  # whose block_rows this is

    @property
    def num_rows(self) -> int:
        """M: any block_rows rows from a tile's first one lie within it."""
        return self.token.shape[0]


def lay_out(
    group_ids: jax.Array,  # i32[T, k]
    num_groups: int,
    *,
    num_tokens: jax.Array | None,  # i32[]
    block_rows: int,
    backend: str,
    some_elsewhere: bool = False,
) -> Groups:
    """The layout of a batch. A token's k choices must differ from each other, as those of a top-k do; some_elsewhere: those that
    are not ELSEWHERE, which get no rows.

    num_tokens: tokens from here on are padding and get no rows; None is all are real. block_rows: most rows of a tile, a multiple
    of ROW_ALIGN. O(T * k * E) compares and a cumulative sum over [T, E], no sort.
    """
    T, k = group_ids.shape
    E, R = num_groups, block_rows
    M, W = layout_sizes(T, k, E, R)
    real = jnp.arange(T) < (T if num_tokens is None else num_tokens)
    chosen = (group_ids[:, :, None] == jnp.arange(E)) & real[:, None, None]  # [T, k, E]
    hits = chosen.any(axis=1).astype(jnp.int32)  # [T, E]
    through = jnp.cumsum(hits, axis=0)
    sizes = through[-1]
    starts = _before(-(-sizes // ROW_ALIGN) * ROW_ALIGN)

    place = starts + through - hits  # [T, E]
    choice = jnp.arange(T * k, dtype=jnp.int32).reshape(T, k)
    has_row = real[:, None] & (group_ids != ELSEWHERE) if some_elsewhere else real[:, None]
    here = jnp.maximum(group_ids, 0) if some_elsewhere else group_ids
    row = jnp.where(has_row, jnp.take_along_axis(place, here, axis=1), M + choice)  # distinct, so that scatters are plain
    token = jnp.full(M, T, jnp.int32).at[row].set(choice // k, mode="drop", unique_indices=True)

    ends = jnp.cumsum(-(-sizes // R))  # tiles up to and including each group
    tile = jnp.arange(W, dtype=jnp.int32)
    group = jnp.minimum((tile[:, None] >= ends).sum(axis=1, dtype=jnp.int32), E - 1)
    row_in_group = (tile - (ends - -(-sizes // R))[group]) * R
    tile_rows = jnp.where(tile < ends[-1], jnp.clip(sizes[group] - row_in_group, 0, R), 0)
    tile_row = jnp.where(tile < ends[-1], starts[group] + row_in_group, 0)
    return Groups(row, token, starts, sizes, group, tile_row, tile_rows, ends[-1], block_rows=R, backend=backend)


def layout_sizes(num_tokens: int, num_choices: int, num_groups: int, block_rows: int) -> tuple[int, int]:
    """(M, W): rows and tiles that any batch of these sizes fits."""
    A = num_tokens * num_choices
    G = min(num_groups, A)  # most groups with rows; a row beyond each one's first opens a new unit only with every unit-th

    def units(size: int) -> int:
        return min(G + (A - G) // size, num_groups * -(-num_tokens // size))

    return ROW_ALIGN * units(ROW_ALIGN) + block_rows - ROW_ALIGN, units(block_rows)


def _before(sizes: jax.Array) -> jax.Array:
    """The sum of all that come before each."""
    return jnp.cumsum(sizes) - sizes
