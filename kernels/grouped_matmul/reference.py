"""The grouped matmul's specification: each group's matrix times all rows in float32, of which the group's own rows are kept.

Slow on purpose: short and obvious.
"""

import jax
import jax.numpy as jnp

from kernels.grouped_matmul.layout import Groups
from kernels.grouped_matmul.xla import block_rows as block_rows  # any would do: the spec does not read tiles
from kernels.grouped_matmul.xla import lacks as lacks


def matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
) -> jax.Array:  # [M, F]
    """Rows of no group are zero. See api for the arguments."""
    row = jnp.arange(x.shape[0])
    out = jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
    for e in range(w.shape[0]):
        mine = (row >= groups.starts[e]) & (row < groups.starts[e] + groups.sizes[e])
        y = jnp.dot(x.astype(jnp.float32), w[e].astype(jnp.float32), precision="highest")
        out = jnp.where(mine[:, None], y, out)
    return out.astype(x.dtype)
