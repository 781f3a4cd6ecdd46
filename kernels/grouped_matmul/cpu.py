"""The grouped matmul for CPUs: `cpu.cc` as a foreign function of XLA's."""

from __future__ import annotations

import jax

from kernels.cpu import library
from kernels.grouped_matmul.layout import Groups

DTYPES = ("bfloat16", "float32")
BLOCK_ROWS = 64  # a tile costs what its rows do, and reading a matrix once


def lacks(w: jax.Array) -> str | None:
    """What the kernel lacks for these weights, or this machine for the kernel; None if it can."""
    if w.dtype.name not in DTYPES:
        return f"{' or '.join(DTYPES)}, found {w.dtype.name}"
    return library.lacks()


def block_rows(num_tokens: int, num_choices: int, num_groups: int) -> int:
    """Rows a tile, whatever the batch."""
    return BLOCK_ROWS


def matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
    *,
    gated: bool = False,
) -> jax.Array:  # [M, F], or [M, F / 2] where gated
    """See api for the arguments."""
    F = w.shape[2]
    call = jax.ffi.ffi_call("jaxserve_cpu_grouped_matmul", jax.ShapeDtypeStruct((x.shape[0], F // 2 if gated else F), x.dtype))
    return call(x, w, groups.tile_group, groups.tile_row, groups.tile_rows, groups.num_tiles, gated=gated)
