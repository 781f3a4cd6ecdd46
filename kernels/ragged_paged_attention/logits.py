"""From a tile's scores to logits in units of log2, masked: what the Mosaic kernels share. Tiles are 64 rows of a warpgroup.

Row r of a tile is query token r // group, head r % group of its KV head's group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


def mask_logits(x: Any, masked: float, **where: Any) -> Any:  # f32[64, block]
    """Logits, `masked` where a row does not see the key. Most blocks are seen whole and pass as they are. where: as for `seen`."""
    rows = {"rows": where.pop("rows")} if "rows" in where else {}
    partly_seen = is_partly_seen(x.shape[1], **where)
    return lax.cond(partly_seen, lambda x: jnp.where(seen(x.shape, **where, **rows), x, masked), lambda x: x, x)


def is_partly_seen(block: int, *, begin: Any, position: Any, group: int, tokens: int, sliding_window: int | None) -> Any:
    """Whether a row of a tile does not see one of the `block` keys from position `begin` on. position: of the tile's first query
    token, of `tokens`; group: heads of a token."""
    del group
    partly_seen = begin + block > position + 1  # by the first row
    if sliding_window is not None:
        partly_seen = jnp.logical_or(partly_seen, begin <= position + tokens - 1 - sliding_window)  # by the last
    return partly_seen


def seen(
    shape: tuple[int, int],
    *,
    begin: Any,
    position: Any,
    group: int,
    tokens: int,
    sliding_window: int | None,
    rows: Callable[[], Any] = tile_rows,
) -> Any:  # bool[64, block]
    """Which of the keys from position `begin` on a row sees; otherwise as `is_partly_seen`. rows: makes i32[64], a row's number."""
    del tokens
    token = lax.div(rows(), jnp.int32(group))
    column = gpu.broadcasted_iota(jnp.int32, shape, 1, layout=gpu.WGMMA)
    # A thread's columns have these bits in common, the others are constants: it keeps one number, not all its columns.
    lane = column & THREAD_COLUMN
    last = spread(token + again(position - begin), column) - lane
    column = column & ~THREAD_COLUMN
    sees = column <= last
    if sliding_window is not None:
        sees = jnp.logical_and(sees, column > last - sliding_window)
    return sees
