"""The grouped matmul in plain XLA: a loop over the tiles there are, so that groups without rows cost nothing and are not read.

The tiles come with `Groups`. The gradient is here too.
"""

import jax
import jax.numpy as jnp

from kernels.grouped_matmul.layout import ROW_ALIGN, Groups


def lacks(w: jax.Array) -> None:
    """What these weights lack for this backend: nothing."""


def block_rows(num_tokens: int, num_choices: int, num_groups: int) -> int:
    """Rows a tile, by a group's average share. On two cores of a CPU a tile of 8 bfloat16 rows by 1024 x 768 takes 115 us, half of
    it for the copy of the matrix that XLA makes first, and one of 32 rows 225 us."""
    average = num_tokens * num_choices // num_groups
    return 128 if average >= 128 else 32 if average >= 32 else ROW_ALIGN


def matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F], or [E, F, D] if transposed
    groups: Groups,
    *,
    transposed: bool = False,
) -> jax.Array:  # [M, F]
    """Rows of no group may hold anything that is finite, if x is finite. See api for the arguments."""
    R, axis = groups.block_rows, 1 if transposed else 0

    def tile(i, out):
        row = groups.tile_row[i]
        rows = jax.lax.dynamic_slice_in_dim(x, row, R)
        matrix = jax.lax.dynamic_index_in_dim(w, groups.tile_group[i], keepdims=False)
        y = jax.lax.dot_general(rows, matrix, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
        # A tile with fewer than R rows overwrites the next group's first rows, whose own tile comes later and writes them again.
        return jax.lax.dynamic_update_slice_in_dim(out, y.astype(x.dtype), row, 0)

    out = jnp.zeros((x.shape[0], w.shape[1 if transposed else 2]), x.dtype)
    return jax.lax.fori_loop(0, groups.num_tiles, tile, out)


def weight_gradient(
    x: jax.Array,  # [M, D]
    dy: jax.Array,  # [M, F]
    groups: Groups,
    dtype: jnp.dtype,
) -> jax.Array:  # [E, D, F]
    """For each group x.T @ dy over its own rows, summed in float32; zero for a group without rows."""
    R = groups.block_rows

    def tile(i, out):
        row, group = groups.tile_row[i], groups.tile_group[i]
        mine = jnp.arange(R) < groups.tile_rows[i]
        rows = jnp.where(mine[:, None], jax.lax.dynamic_slice_in_dim(x, row, R), 0)
        grads = jnp.where(mine[:, None], jax.lax.dynamic_slice_in_dim(dy, row, R), 0)
        part = jax.lax.dot_general(rows, grads, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return out.at[group].add(part)

    out = jnp.zeros((groups.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, groups.num_tiles, tile, out).astype(dtype)
