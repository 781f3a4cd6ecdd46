"""From a tile's scores to logits in units of log2, masked: what the Mosaic kernels share. Tiles are 64 rows of a warpgroup.

Row r of a tile is query token r // group, head r % group of its KV head's group.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from kernels import gpu

ROWS = 64  # of a tile: what one warpgroup computes
# Logit of a key that a row does not see, and where a row's running maximum starts. Both finite, so that no inf - inf arises, and
# far apart, so that exp2(MASKED - maximum) is exactly 0 even for a row that has seen nothing yet.
MASKED = -1e30
FIRST_MAXIMUM = -1e29
LOG2E = math.log2(math.e)
LEAST_UNIT = 1e-6  # below it a scale is multiplied in at once
THREAD_COLUMN = 0b110  # a thread of the WGMMA layout has columns 8 i + c and 8 i + c + 1, c being 0, 2, 4 or 6


def again(value: Any) -> Any:
    """The value, which the compiler doesn't know to be the same one: what is computed from it, such as addresses, is computed where
    it is used and not kept in registers through the walk."""
    return lax.optimization_barrier(value)


def tile_rows() -> Any:
    """i32[64]: 0 to 63, a value a row."""
    return again(gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=gpu.WGMMA_ROW))


def spread(x: Any, like: Any) -> Any:
    """A value a row, over the row's columns."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def scale_logits(x: Any, *, scale: float, soft_cap: float | None) -> tuple[Any, float]:
    """(logits, unit): times unit, a positive number, they are in units of log2. A key then costs one fused multiply-add where its
    weight is computed, instead of a multiplication here and a subtraction there."""
    unit = scale * LOG2E
    if soft_cap is not None:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), as the hardware's own tanh has 11 bits.
        cap = soft_cap * LOG2E
        return cap - (2 * cap) / (jnp.exp2(x * (2 * unit / soft_cap)) + 1), 1.0
    if unit < LEAST_UNIT:  # of a negative one the largest product is not the largest score's; MASKED / unit would not be finite
        return x * unit + 0.0, 1.0  # +0.0: of two zeros of which one is negative, threads of a row would keep either as its maximum
    return x, unit


def cap_logits(x: Any, *, scale: float, soft_cap: float) -> tuple[Any, float]:
    """`scale_logits` with a soft cap, less a constant that a softmax does not see, and with one division for four columns: the unit
    for reciprocals and exponentials bounds a kernel that caps. tanh(y) = 1 - 2 r, r = 1 / (exp(2 y) + 1), and four such r come from
    the reciprocal of their denominators' product (Montgomery, Math. Comp. 48 (1987), 10.3.1). A NaN reaches three other columns:
    scores of keys that a row does not see must be numbers. Of a denominator past 2^30 r is 2^-30."""
    columns = x.shape[1] // 4
    d = jnp.exp2(jnp.minimum(x * (2 * scale * LOG2E / soft_cap), 30.0)) + 1  # the product of four is finite
    a, b, c, e = (d[:, i * columns : (i + 1) * columns] for i in range(4))
    ab, ce = a * b, c * e
    inverse = -1 / (ab * ce)
    of_ab, of_ce = inverse * ce, inverse * ab
    return jnp.concatenate([of_ab * b, of_ab * a, of_ce * e, of_ce * c], axis=1), 2 * soft_cap * LOG2E


def mask_logits(
    x: Any, masked: float, *, begin: Any, position: Any, group: int, tokens: int, sliding_window: int | None
) -> Any:  # f32[64, block]
    """Logits of the keys from position `begin` on, `masked` where a row does not see the key. Most blocks are seen whole and pass
    as they are. position: of the tile's first query token, of `tokens`."""

    def mask(x):
        token = lax.div(tile_rows(), jnp.int32(group))
        column = gpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=gpu.WGMMA)
        # A thread's columns have these bits in common, the others are constants: it keeps one number, not all its columns.
        lane = column & THREAD_COLUMN
        last = spread(token + again(position - begin), column) - lane
        column = column & ~THREAD_COLUMN
        seen = column <= last
        if sliding_window is not None:
            seen = jnp.logical_and(seen, column > last - sliding_window)
        return jnp.where(seen, x, masked)

    partly_seen = begin + x.shape[1] > position + 1  # by the first row
    if sliding_window is not None:
        partly_seen = jnp.logical_or(partly_seen, begin <= position + tokens - 1 - sliding_window)  # by the last
    return lax.cond(partly_seen, mask, lambda x: x, x)
