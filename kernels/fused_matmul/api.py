"""The entry to the fused matmul: it checks the arguments and looks up the backend.

Owns the contract and its errors. The backends are the rows of `kernels.backends.FUSED_MATMUL`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kernels.backends import FUSED_MATMUL, Backend
from kernels.checks import Shapes

DTYPES = ("bfloat16", "float16", "float32")


def fused_matmul(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [D, F], or [F, D] where transposed
    *,
    scale: jax.Array | None = None,  # [D]
    eps: float = 0.0,
    bias: jax.Array | None = None,  # [F]
    residual: jax.Array | None = None,  # [T, F]
    gated: bool = False,
    transposed: bool = False,
    dtype: Any = None,
    num_rows: jax.Array | None = None,  # i32[]
    backend: str = "auto",
) -> jax.Array:  # [T, F], or [T, F / 2] where gated
    """x @ w, and what a layer does before and after it, in one step: with a scale, rows are normed before (RMSNorm,
    arXiv:1910.07467: divided by the root of their mean square plus eps, times the scale); bias and residual are added; where gated,
    the result is silu(its first half of columns) times the second half (SwiGLU, arXiv:2002.05202).

    Sums are float32. How often a value is rounded on its way is the backend's: "xla" and "cpu" round where a model does that has
    these steps one by one, "mosaic_sm90" only what it multiplies, and the result. With "cpu" and "mosaic_sm90" a row's bits do not
    depend on the other rows, nor on how many there are.

    transposed: w is [F, D], as a CPU reads it fastest. dtype: of the result; None: x's. float32 keeps the sums as they are, of a
    plain product or a normed one. Both are for "xla" and "cpu".
    num_rows: rows of x from here on are padding. With "cpu" they are not computed, and are zeros; the others compute them too.
    backend: one of `kernels.backends.FUSED_MATMUL.names`; "auto" is "mosaic_sm90" on a Hopper GPU that can take these weights,
    "cpu" on a CPU where the library of kernels is, else "xla". Differentiable with "xla" alone.

    Raises:
        ValueError: an argument's shape, dtype or value is wrong.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    shapes = Shapes()
    shapes.check("x", x, "T D")
    shapes.check("w", w, "F D" if transposed else "D F", x.dtype)
    if x.dtype.name not in DTYPES:
        raise ValueError(f"{x.dtype=} must be one of {', '.join(DTYPES)}")
    for name, array, axes in (("scale", scale, "D"), ("bias", bias, "F"), ("residual", residual, "T F")):
        if array is not None:
            shapes.check(name, array, axes, x.dtype)
    if gated and shapes["F"] % 2:
        raise ValueError(f"{w.shape=} has {shapes['F']} columns; must be gates and as many that they gate")
    if gated and residual is not None:
        raise ValueError("residual must be None where gated: it would be added before the gate")
    dtype = x.dtype if dtype is None else jnp.dtype(dtype)
    if dtype not in (x.dtype, jnp.float32):
        raise ValueError(f"dtype={dtype.name} must be {x.dtype.name}, as x is, or float32")
    if dtype != x.dtype and (gated or bias is not None or residual is not None):
        raise ValueError(f"dtype={dtype.name} is of plain and normed products: leave gated, bias and residual out, or dtype")
    if num_rows is not None:
        shapes.check("num_rows", num_rows, "", jnp.int32)
    name = resolve_backend(backend, [(shapes["D"], shapes["F"], gated)], x.dtype)
    layout = {"transposed": transposed, "dtype": dtype} if FUSED_MATMUL[name].any_layout else {}
    if not layout and (transposed or dtype != x.dtype):
        raise NotImplementedError(f"{name} can't do weights [F, D], nor results of another dtype than x's; use backend='xla'")
    counted = {"num_rows": num_rows} if FUSED_MATMUL[name].skips_padding else {}
    with jax.named_scope(f"fused_matmul_{name}"):
        return FUSED_MATMUL[name].functions.matmul(x, w, scale, bias, residual, eps=eps, gated=gated, **layout, **counted)


def resolve_backend(backend: str, weights: Sequence[tuple[int, int, bool]], dtype: Any, left_out: Collection[str] = ()) -> str:
    """The backend that runs all of `weights`: (D, F, gated) of each. left_out: backends that "auto" must not take on this device.

    Raises: ValueError, NotImplementedError as `fused_matmul` does.
    """

    def lacks(row: Backend) -> str | None:
        each = (row.functions.lacks(depth=D, num_columns=F, gated=gated, dtype=dtype) for D, F, gated in weights)
        return next(filter(None, each), None)

    return FUSED_MATMUL.resolve(backend, lacks, left_out)
