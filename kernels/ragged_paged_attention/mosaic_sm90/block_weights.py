"""From a block's scores to its keys' weights, and what they add to a tile's rows: online, or bounded.

Online is any softmax: a row's weights are relative to its largest logit so far, and what it has summed is scaled where that rises.
Capped logits lie between two numbers. Where these are near enough, weights are relative to a constant: no maximum is looked for,
and nothing is scaled.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from kernels import gpu, gpu_tiles
from kernels.ragged_paged_attention.geometry import Geometry
from kernels.ragged_paged_attention.logits import (
    LOG2E,
    MASKED,
    ROWS,
    again,
    is_partly_seen,
    mask_logits,
    scale_logits,
    seen,
    spread,
)
from kernels.ragged_paged_attention.work_list import BLOCK

PARTS = 8  # of a row's total: columns of which each of the row's four threads has two, as of all columns of a block
# Of capped logits, in units of log2: the largest cap whose weights need no maximum, and how far below 1 weights may be. Past that
# the largest are above 1, at most 2^72. So weights and sums of them are normal numbers of bfloat16's range, and sums of 2^17 values
# below 2^37, so weighted, are below 2^126.
MAX_CAP, LEAST_WEIGHT = 90.0, 108.0
BY_PRODUCTS = 16  # columns of a block whose bounded weights take no exponential: the unit for these bounds a kernel that caps
ROUNDING = 1.5 * 2**23  # added to an f32 and taken away again, it rounds to an integer
# 2^x from -1/2 to 1/2, by the powers of x: of degree 5, the first one exact, with a relative error of at most 2^-23.1.
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)


def is_bounded(soft_cap: float | None, dtype: Any) -> bool:
    """Whether weights need no maximum. float16's range is too small for any cap that a model has."""
    return soft_cap is not None and soft_cap * LOG2E <= MAX_CAP and dtype == jnp.bfloat16


def no_parts() -> Any:  # f32[64, PARTS]
    """Totals of rows that have seen nothing."""
    return gpu.layout_cast(jnp.zeros((ROWS, PARTS), jnp.float32), gpu.WGMMA)


def online(g: Geometry, position: Any, block: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """(the state with the block's weights in it but not yet its values; those weights, f32[64, BLOCK]). x: the block's scores."""
    acc, maximum, totals = state
    mask = functools.partial(mask_logits, rows=gpu_tiles.tile_rows, **_where(g, position, block))
    if g.soft_cap is None:
        x, unit = scale_logits(x, scale=g.scale, soft_cap=None)
    else:  # less a constant that a softmax does not see
        x, unit = -halves(mask(exponents(g, x), 0.0)), 2 * g.soft_cap * LOG2E
    x = mask(x, MASKED / unit)
    new_maximum = jnp.maximum(maximum, x.max(axis=1) * unit)
    shrink = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(x * unit - spread(new_maximum, x))
    return (acc * spread(shrink, acc), new_maximum, totals * spread(shrink, totals) + _parts(weights)), weights


def exponents(g: Geometry, x: Any) -> Any:
    """log2 of exp(2 y), y being what tanh is taken of. x: scores."""
    assert g.soft_cap is not None
    return x * (2 * g.scale * LOG2E / g.soft_cap)


def bounded(g: Geometry, position: Any, block: Any, totals: Any, y: Any, dtype: Any) -> tuple[Any, Any]:
    """(the rows' totals with the block's weights, those weights in `dtype`). y: the block's `exponents`."""
    assert g.soft_cap is not None
    cap = g.soft_cap * LOG2E
    largest = max(0.0, 2 * cap - LEAST_WEIGHT)
    where = _where(g, position, block)

    def weigh(y):
        x = halves(y) * (-2 * cap) + largest
        return jnp.concatenate([exp2_by_products(x[:, :BY_PRODUCTS]), jnp.exp2(x[:, BY_PRODUCTS:])], axis=1)

    def add_up(weights):
        return totals + _parts(weights), weights.astype(dtype)

    def masked(y):
        sees = seen(y.shape, rows=gpu_tiles.tile_rows, **where)
        return add_up(jnp.where(sees, weigh(jnp.where(sees, y, 0.0)), 0.0))

    return lax.cond(is_partly_seen(BLOCK, **where), masked, lambda y: add_up(weigh(y)), y)


def _where(g: Geometry, position: Any, block: Any) -> dict[str, Any]:
    """Which keys the block has, and who sees them."""
    return {
        "begin": block * BLOCK,
        "position": position,
        "group": g.group,
        "tokens": g.tokens,
        "sliding_window": g.sliding_window,
    }


def _parts(weights: Any) -> Any:  # f32[64, PARTS]
    """Weights, added up in parts."""
    parts = [weights[:, column : column + PARTS] for column in range(0, BLOCK, PARTS)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def halves(y: Any) -> Any:
    """r = 1 / (exp2(y) + 1), of which tanh is 1 - 2 r: the hardware's own tanh has 11 bits. One reciprocal does for four columns,
    from the product of their denominators (Montgomery, Math. Comp. 48 (1987), 10.3.1). A NaN reaches three other columns: scores
    of keys that a row does not see must be numbers. Of a denominator past 2^30 r is 2^-30."""
    columns = y.shape[1] // 4
    d = jnp.exp2(jnp.minimum(y, 30.0)) + 1  # the product of four is finite
    a, b, c, e = (d[:, i * columns : (i + 1) * columns] for i in range(4))
    ab, ce = a * b, c * e
    inverse = gpu_tiles.reciprocal(ab * ce)
    of_ab, of_ce = inverse * ce, inverse * ab
    return jnp.concatenate([of_ab * b, of_ab * a, of_ce * e, of_ce * c], axis=1)


def exp2_by_products(x: Any) -> Any:
    """exp2 of f32 up to a magnitude of 125 by multiply-adds: 2^i times a polynomial in what is left, as FlashAttention-4 does it.
    The relative error is at most 2^-22.5. Of a GPU's NaN, 0x7FFFFFFF, it is the largest number, which is infinite in bfloat16."""
    shifted = x + ROUNDING  # i in its lowest bits
    if gpu.is_interpreted():
        shifted = again(shifted)  # XLA would take away again what was added
    left = x - (shifted - ROUNDING)
    power = EXP2[-1] * left + EXP2[-2]
    for coefficient in EXP2[-3::-1]:
        power = power * left + coefficient
    exponent = lax.bitcast_convert_type(shifted, jnp.int32) << 23
    return lax.bitcast_convert_type(exponent + lax.bitcast_convert_type(power, jnp.int32), jnp.float32)
