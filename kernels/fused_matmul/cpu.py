"""The fused matmul for CPUs: `cpu.cc` as a foreign function of XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu import library

DTYPES = ("bfloat16", "float32")


def lacks(*, depth: int, num_columns: int, gated: bool, dtype: Any) -> str | None:
    """What the kernel lacks for this dtype, or this machine for the kernel; None if it can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"{jnp.dtype(dtype).name}: it has {' and '.join(DTYPES)}"
    return library.lacks()


def matmul(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [D, F], or [F, D] where transposed
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [F]
    residual: jax.Array | None,  # [T, F]
    *,
    eps: float,
    gated: bool,
    transposed: bool = False,
    dtype: Any = None,  # of the result; None is x's
    num_rows: jax.Array | None = None,  # i32[]
) -> jax.Array:  # [T, F], or [T, F / 2]
    """See api.fused_matmul. A matrix that is not transposed is turned around at every call."""
    T, F = x.shape[0], w.shape[0 if transposed else 1]
    out = jax.ShapeDtypeStruct((T, F // 2 if gated else F), dtype or x.dtype)
    work = [] if scale is None else [jax.ShapeDtypeStruct(x.shape, x.dtype)]  # the normed rows
    given = {"has_scale": scale is not None, "has_bias": bias is not None, "has_residual": residual is not None}
    given["has_num_rows"] = num_rows is not None
    call = jax.ffi.ffi_call("jaxserve_cpu_fused_matmul", [out, *work])
    arrays = (y for y in (x, w, scale, bias, residual, num_rows) if y is not None)
    return call(*arrays, **given, eps=np.float32(eps), gated=gated, transposed=transposed)[0]
