"""The one entry to ragged paged attention: checks the arguments and picks a backend.

Owns the contract and its errors. Does not know how any backend works, nor whose pages they are.
"""

import functools
import logging
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kernels.ragged_paged_attention import reference, xla

logger = logging.getLogger("jaxserve")

BACKENDS = ("auto", "reference", "xla", "mosaic_sm90")
DTYPES = ("bfloat16", "float16", "float32")


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2, K, page_size, H]
    page_table: jax.Array,  # i32[S, P]
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    max_q_len: int | None = None,
    backend: str = "auto",
    work: Any = None,
) -> jax.Array:  # [T, N, H], q.dtype
    """Causal grouped-query attention of a ragged batch (prefill chunks and decodes together) over paged keys and values.

    Sequence s owns the query rows cu_q_lens[s] to cu_q_lens[s+1] and the keys at positions 0 to kv_lens[s] - 1, this step's
    tokens included and already written. Its query i stands at position kv_lens[s] - q_len + i and sees the keys at its own
    position and before. Position p lives in page page_table[s, p // page_size] at offset p % page_size. Query head n reads
    KV head n // (N // K).

    A sequence without queries (q_len 0) costs nothing, whatever its kv_len. Page-table entries past a sequence's pages may
    hold anything, and so may slots past its kv_len, NaN included. Rows past cu_q_lens[-1] come back zero from "xla" and
    "reference"; "mosaic_sm90" does not write them, so that they hold anything, NaN included. What the arrays hold (cu_q_lens
    rising to at most T, q_len <= kv_len <= P * page_size, pages in range) can't be checked inside a traced program and is the
    caller's word.

    Args:
        scale: what q @ k is multiplied by; None is H ** -0.5.
        sliding_window: a query at p sees the positions p - sliding_window + 1 to p; None sees all of them.
        soft_cap: logits x become soft_cap * tanh(x / soft_cap), before masking (Gemma 2, arXiv:2408.00118, section 2).
        max_q_len: a bound on every q_len, static; None is T. A decode step says 1, which compiles to a smaller program.
        backend: one of BACKENDS. "auto" is what `work` was planned for, else see `resolve_backend`.
        work: what `plan_work` returned for the same cu_q_lens, kv_lens, T, max_q_len and backend, so that the layers of a
            step share it; None plans here. "mosaic_sm90" is planned on the host: inside jit it needs `planner.Planner.work`,
            of a planner of the same shapes and sliding window (without it "auto" is "xla" there, logged once on a Hopper GPU).

    Raises:
        ValueError: an argument's shape, dtype or value is wrong, or `work` was planned for something else.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    _check_arrays(q, kv_pages, page_table, cu_q_lens, kv_lens)
    T, N, H = q.shape
    max_q_len = _resolve_max_q_len(max_q_len, T)
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"{scale=} must be a finite number or None")
    if sliding_window is not None and not (_is_int(sliding_window) and sliding_window >= 1):
        raise ValueError(f"{sliding_window=} must be an integer of at least 1, or None")
    if soft_cap is not None and not (isinstance(soft_cap, numbers.Real) and 0 < soft_cap < math.inf):
        raise ValueError(f"{soft_cap=} must be a positive number or None")

    options = {
        "scale": H**-0.5 if scale is None else float(scale),
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
    }
    arrays = (q, kv_pages, page_table, cu_q_lens, kv_lens)
    _, _, K, page_size, _ = kv_pages.shape
    asked = "xla" if backend == "auto" and isinstance(work, xla.Work) else backend
    backend = resolve_backend(asked, num_query_heads=N, num_kv_heads=K, head_dim=H, page_size=page_size, dtype=q.dtype)
    if asked == "auto" and backend == "mosaic_sm90" and work is None and isinstance(kv_lens, Tracer):
        _say_fallback("a call inside jit without work=: plan with planner.Planner")
        backend = "xla"
    with jax.named_scope(f"ragged_paged_attention_{backend}"):
        if backend == "reference":
            if work is not None:
                raise ValueError(f"work={type(work).__name__}(...) was planned for another backend; reference takes None")
            return reference.attend(*arrays, **options)
        if backend == "mosaic_sm90":
            from kernels.ragged_paged_attention.mosaic_sm90 import planner

            return planner.attend(*arrays, max_q_len=max_q_len, work=work, **options)
        return xla.attend(*arrays, max_q_len=max_q_len, work=work, **options)


def plan_work(
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    num_tokens: int,
    max_q_len: int | None = None,
    backend: str = "auto",
) -> Any:
    """What all layers of a step share: a pytree to pass as `work=`. Call it inside the step's program, once.

    Args:
        num_tokens: T, the rows of q.
        max_q_len, backend: as given to `ragged_paged_attention`; "auto" is "xla" here.

    Raises: ValueError as `ragged_paged_attention` does; NotImplementedError for "mosaic_sm90", which is planned on the host.
    """
    _check_lens(cu_q_lens, kv_lens)
    max_q_len = _resolve_max_q_len(max_q_len, num_tokens)
    _check_backend(backend)
    if backend == "reference":
        return None
    if backend == "mosaic_sm90":
        raise NotImplementedError("mosaic_sm90 can't plan on the device: plan on the host with planner.Planner.plan")
    with jax.named_scope("plan_work"):
        return xla.plan_work(cu_q_lens, kv_lens, num_tokens=num_tokens, max_q_len=max_q_len)


def resolve_backend(backend: str, *, num_query_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any) -> str:
    """The backend that runs: "auto" is "mosaic_sm90" on a Hopper GPU where the shapes and dtype fit it, else "xla".

    On a GPU, falling back to "xla" is logged once for each reason.

    Raises:
        ValueError: not one of BACKENDS.
        NotImplementedError: "mosaic_sm90" can't; the message says what it lacks.
    """
    _check_backend(backend)
    if backend in ("reference", "xla") or backend == "auto" and jax.default_backend() != "gpu":
        return "xla" if backend == "auto" else backend
    from kernels.ragged_paged_attention.mosaic_sm90 import planner  # imports Pallas, which a CPU has no use for

    lacks = planner.unsupported(
        num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype
    )
    if lacks is None:
        return "mosaic_sm90"
    if backend == "mosaic_sm90":
        raise NotImplementedError(f"mosaic_sm90 can't do {lacks}; use backend='xla'")
    _say_fallback(lacks)
    return "xla"


@functools.cache
def _say_fallback(lacks: str) -> None:
    logger.warning("attention runs on xla: mosaic_sm90 can't do %s", lacks)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}")


def _resolve_max_q_len(max_q_len: int | None, num_tokens: int) -> int:
    if max_q_len is None:
        return num_tokens
    if not (_is_int(max_q_len) and max_q_len >= 1):
        raise ValueError(f"{max_q_len=} must be an integer of at least 1, or None")
    return min(int(max_q_len), num_tokens)


def _check_arrays(q, kv_pages, page_table, cu_q_lens, kv_lens) -> None:
    if q.ndim != 3 or 0 in q.shape:
        raise ValueError(f"{q.shape=} must be [T, N, H], none of them 0")
    if kv_pages.ndim != 5 or kv_pages.shape[1] != 2 or 0 in kv_pages.shape:
        raise ValueError(f"{kv_pages.shape=} must be [num_pages, 2, K, page_size, H], none of them 0")
    _, N, H = q.shape
    _, _, K, _, kv_H = kv_pages.shape
    if H != kv_H:
        raise ValueError(f"head_dim differs: {q.shape=} has H={H}, {kv_pages.shape=} has H={kv_H}")
    if N % K:
        raise ValueError(f"{N} query heads ({q.shape=}) must be a multiple of {K} KV heads ({kv_pages.shape=})")
    if q.dtype != kv_pages.dtype or q.dtype.name not in DTYPES:
        raise ValueError(f"{q.dtype=} and {kv_pages.dtype=} must be the same, one of {', '.join(DTYPES)}")
    S = _check_lens(cu_q_lens, kv_lens)
    if page_table.ndim != 2 or page_table.shape[0] != S or page_table.shape[1] == 0 or page_table.dtype != jnp.int32:
        raise ValueError(f"page_table is {page_table.dtype}{page_table.shape}; must be int32[S, P] with S={S} and P > 0")


def _check_lens(cu_q_lens, kv_lens) -> int:
    if kv_lens.ndim != 1 or kv_lens.shape[0] == 0 or kv_lens.dtype != jnp.int32:
        raise ValueError(f"kv_lens is {kv_lens.dtype}{kv_lens.shape}; must be int32[S] with S > 0")
    S = kv_lens.shape[0]
    if cu_q_lens.shape != (S + 1,) or cu_q_lens.dtype != jnp.int32:
        raise ValueError(f"cu_q_lens is {cu_q_lens.dtype}{cu_q_lens.shape}; must be int32[S+1] with S={S}")
    return S


def _is_int(x) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)
