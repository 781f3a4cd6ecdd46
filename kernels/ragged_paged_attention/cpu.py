"""Ragged paged attention for CPUs: `cpu.cc` as a foreign function of XLA's. It plans nothing ahead: a call cuts its own batch."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kernels.cpu import library

DTYPES = ("bfloat16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """The plan of a step, of which there is none: it says whose it is."""

    backend: ClassVar[str] = "cpu"


def lacks(*, dtype: Any, **_: Any) -> str | None:
    """What the kernel lacks for this dtype, or this machine for the kernel; None if it can."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"{jnp.dtype(dtype).name}: it has {' and '.join(DTYPES)}"
    return library.lacks()


def plan_work(*_: Any, **__: Any) -> Work:
    """Nothing is planned. Tiles are fixed: they never follow the shapes of a step."""
    return Work()


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[S, P]
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    max_q_len: int,
    work: Work | None = None,
) -> jax.Array:  # [T, N, H]
    """Attention of every query over its own sequence's keys; rows past cu_q_lens[-1] are zero. See api for the arguments."""
    if work is not None and not isinstance(work, Work):
        raise ValueError(f"work={type(work).__name__}(...) was not planned for this backend; cpu takes its own, or None")
    call = jax.ffi.ffi_call("jaxserve_cpu_attend", jax.ShapeDtypeStruct(q.shape, q.dtype))
    limits = {"window": np.int64(sliding_window or 0), "soft_cap": np.float32(soft_cap or 0)}
    return call(q, kv_pages, page_table, cu_q_lens, kv_lens, scale=np.float32(scale), **limits)
