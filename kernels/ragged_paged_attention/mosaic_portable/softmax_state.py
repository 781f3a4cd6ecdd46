"""The state of an online softmax whose accumulator is in pieces of columns, and the join of two states.

As `mosaic_sm90.softmax_state`: (pieces of f32[64, width] each, maximum f32[64], total f32[64]), maxima in
units of log2. The kernel holds all pieces of a head; a block of the join holds one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernels import gpu
from kernels.ragged_paged_attention.logits import FIRST_MAXIMUM, ROWS, spread

State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]


def zeros(columns: int) -> jax.Array:  # f32[64, columns]
    """An accumulator of nothing."""
    return gpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), gpu.WGMMA)


def empty(pieces: int, width: int) -> State:
    """The state of rows that have seen nothing: joined with any other, it changes no bit of it."""
    maximum = gpu.layout_cast(jnp.full((ROWS,), FIRST_MAXIMUM, jnp.float32), gpu.WGMMA_ROW)
    total = gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), gpu.WGMMA_ROW)
    return tuple(zeros(width) for _ in range(pieces)), maximum, total


def join(a: State, b: State) -> State:
    """The state of rows that have seen what a and b have, in this order."""
    maximum = jnp.maximum(a[1], b[1])
    from_a, from_b = jnp.exp2(a[1] - maximum), jnp.exp2(b[1] - maximum)
    pieces = tuple(x * spread(from_a, x) + y * spread(from_b, y) for x, y in zip(a[0], b[0], strict=True))
    return pieces, maximum, a[2] * from_a + b[2] * from_b


def output(state: State) -> tuple[jax.Array, ...]:
    """What the rows attend to, in pieces; 0 for one that has seen nothing."""
    pieces, _, total = state
    divisor = jnp.where(total == 0, 1.0, total)
    return tuple(x / spread(divisor, x) for x in pieces)
