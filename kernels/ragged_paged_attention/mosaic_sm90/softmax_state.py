"""The state of an online softmax in a warpgroup's registers, and the join of two states.

The attention kernel and the kernel that joins partial results both use it, so that they do the same arithmetic.

A state is (acc f32[64, H], maximum f32[64], total f32[64]), with maxima in units of log2.
"""

import jax
import jax.numpy as jnp

from kernels import gpu
from kernels.ragged_paged_attention.logits import FIRST_MAXIMUM, ROWS, spread

State = tuple[jax.Array, jax.Array, jax.Array]


def empty(head_dim: int) -> State:
    """The state of rows that have seen nothing: joined with any other, it changes no bit of it."""
    acc = gpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), gpu.WGMMA)
    maximum = gpu.layout_cast(jnp.full((ROWS,), FIRST_MAXIMUM, jnp.float32), gpu.WGMMA_ROW)
    total = gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), gpu.WGMMA_ROW)
    return acc, maximum, total


def join(a: State, b: State) -> State:
    """The state of rows that have seen what a and b have, in this order."""
    maximum, from_a, from_b = shares(a[1], b[1])
    return join_acc(a[0], b[0], from_a, from_b), maximum, a[2] * from_a + b[2] * from_b


def shares(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of two states' maxima: the joined one, and what either state is multiplied by."""
    maximum = jnp.maximum(a, b)
    return maximum, jnp.exp2(a - maximum), jnp.exp2(b - maximum)


def join_acc(a: jax.Array, b: jax.Array, from_a: jax.Array, from_b: jax.Array) -> jax.Array:
    """The joined accumulator."""
    return a * spread(from_a, a) + b * spread(from_b, b)


def output(acc: jax.Array, total: jax.Array) -> jax.Array:  # f32[64, H]
    """What the rows of a state attend to; 0 for one that has seen nothing."""
    return acc / spread(jnp.where(total == 0, 1.0, total), acc)
