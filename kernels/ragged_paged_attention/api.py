"""The one entry to ragged paged attention: checks the arguments and picks a backend.

Owns the contract and its errors. Does not know how any backend works, nor whose pages they are.
"""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from kernels.ragged_paged_attention import reference, xla

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
    hold anything, and so may slots past its kv_len, NaN included. Rows past cu_q_lens[-1] come back finite ("xla" and
    "reference": zero). What the arrays hold (cu_q_lens rising to at most T, q_len <= kv_len <= P * page_size, pages in range)
    can't be checked inside a traced program and is the caller's word.

    Args:
        scale: what q @ k is multiplied by; None is H ** -0.5.
        sliding_window: a query at p sees the positions p - sliding_window + 1 to p; None sees all of them.
        soft_cap: logits x become soft_cap * tanh(x / soft_cap), before masking (Gemma 2, arXiv:2408.00118, section 2).
        max_q_len: a bound on every q_len, static; None is T. A decode step says 1, which compiles to a smaller program.
        backend: one of BACKENDS. "auto" is "xla" today.
        work: what `plan_work` returned for the same cu_q_lens, kv_lens, T, max_q_len and backend, so that the layers of a
            step share it; None plans here.

    Raises:
        ValueError: an argument's shape, dtype or value is wrong, or `work` was planned for something else.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    _check_arrays(q, kv_pages, page_table, cu_q_lens, kv_lens)
    T, _, H = q.shape
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
    backend = _resolve_backend(backend)
    with jax.named_scope(f"ragged_paged_attention_{backend}"):
        if backend == "reference":
            if work is not None:
                raise ValueError(f"work={type(work).__name__}(...) was planned for another backend; reference takes None")
            return reference.attend(*arrays, **options)
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
        max_q_len, backend: as given to `ragged_paged_attention`.

    Raises: ValueError and NotImplementedError as `ragged_paged_attention` does.
    """
    _check_lens(cu_q_lens, kv_lens)
    max_q_len = _resolve_max_q_len(max_q_len, num_tokens)
    if _resolve_backend(backend) == "reference":
        return None
    with jax.named_scope("plan_work"):
        return xla.plan_work(cu_q_lens, kv_lens, num_tokens=num_tokens, max_q_len=max_q_len)


def _resolve_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}")
    if backend == "mosaic_sm90":
        raise NotImplementedError(
            "mosaic_sm90 is not written yet: there is no Hopper (compute capability 9.0) kernel; use backend='xla'"
        )
    return "xla" if backend == "auto" else backend


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
