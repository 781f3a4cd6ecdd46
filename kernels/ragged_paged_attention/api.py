"""The entry to ragged paged attention: it checks the arguments and looks up the backend.

Owns the contract and its errors. The backends are the rows of `kernels.backends.ATTENTION`.
"""

import functools
import logging
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kernels.backends import ATTENTION, current_platform
from kernels.checks import Shapes

logger = logging.getLogger("jaxserve")

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
    hold anything, and so may slots past its kv_len, NaN included. Rows past cu_q_lens[-1] are zero with "xla" and "reference";
    the Mosaic backends do not write them, so that they hold anything, NaN included. The contents of the arrays can't be checked
    inside a traced program. The caller must ensure that cu_q_lens rises to at most T, q_len <= kv_len <= P * page_size, and page
    ids are in range.

    Args:
        scale: what q @ k is multiplied by; None is H ** -0.5.
        sliding_window: a query at p sees the positions p - sliding_window + 1 to p; None sees all of them.
        soft_cap: logits x become soft_cap * tanh(x / soft_cap), before masking (Gemma 2, arXiv:2408.00118, section 2).
        max_q_len: a bound on every q_len, static; None is T. A decode step says 1, which compiles to a smaller program.
        backend: one of `kernels.backends.ATTENTION.names`. "auto" is what `work` was planned for, else see `resolve_backend`.
        work: what `plan_work` returned for the same cu_q_lens, kv_lens, T, max_q_len and backend, so that the layers of a
            step share it; None plans here. The Mosaic backends are planned on the host: inside jit it needs the `work` of a planner
            that `host_planner` makes, of the same shapes and sliding window. Without it "auto" is "xla" there, which is logged
            once on a GPU.

    Raises:
        ValueError: an argument's shape, dtype or value is wrong, or `work` was planned for something else.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    _check_arrays(q, kv_pages, page_table, cu_q_lens, kv_lens)
    _check_options(scale, sliding_window, soft_cap)
    T, N, H = q.shape
    K, page_size = kv_pages.shape[2:4]
    asked = getattr(work, "backend", "auto") if backend == "auto" else backend
    shapes = {"num_query_heads": N, "num_kv_heads": K, "head_dim": H, "page_size": page_size, "dtype": q.dtype}
    # Nobody can plan on the host from lengths that are being traced.
    name = _resolve(asked, without_work=work is None and isinstance(kv_lens, Tracer), **shapes)
    with jax.named_scope(f"ragged_paged_attention_{name}"):
        return ATTENTION[name].functions.attend(
            *(q, kv_pages, page_table, cu_q_lens, kv_lens),
            scale=H**-0.5 if scale is None else float(scale),
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            max_q_len=_resolve_max_q_len(max_q_len, T),
            work=work,
        )


def plan_work(
    cu_q_lens: jax.Array,  # i32[S+1]
    kv_lens: jax.Array,  # i32[S]
    *,
    num_tokens: int,
    max_q_len: int | None = None,
    backend: str = "auto",
    fixed_tiles: bool = False,
) -> Any:
    """What all layers of a step share: a pytree to pass as `work=`. Call it inside the step's program, once.

    Args:
        num_tokens: T, the rows of q.
        max_q_len, backend: as given to `ragged_paged_attention`; "auto" is "xla" here.
        fixed_tiles: of one size for every num_tokens, number of sequences and max_q_len, so that a row's bits depend on none of
            them. Some shapes take longer then.

    Raises:
        ValueError: as `ragged_paged_attention`.
        NotImplementedError: the Mosaic backends are planned on the host; "reference" has no tiles to fix.
    """
    _check_lens(Shapes(), cu_q_lens, kv_lens)
    max_q_len = _resolve_max_q_len(max_q_len, num_tokens)
    row = ATTENTION["xla" if backend == "auto" else backend]
    if row.plans_on_host:
        raise NotImplementedError(f"{row.name} can't plan on the device: plan on the host with host_planner({row.name!r})")
    fixed = {"fixed_tiles": True} if fixed_tiles else {}
    if fixed_tiles and not row.fixed_tiles:
        raise NotImplementedError(f"{row.name} has no fixed tiles; use backend='xla'")
    with jax.named_scope("plan_work"):
        return row.functions.plan_work(cu_q_lens, kv_lens, num_tokens=num_tokens, max_q_len=max_q_len, **fixed)


def host_planner(backend: str) -> Callable[..., Any] | None:
    """What makes the planner of a compiled shape, for a backend whose work is planned on the host; None for the others.

    Arguments and methods as `work_planner.WorkPlanner.make`. Raises ValueError if `backend` is "auto" or unknown.
    """
    row = ATTENTION[backend]
    return row.functions.make_planner if row.plans_on_host else None


def resolve_backend(
    backend: str,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Any,
    left_out: Collection[str] = (),
) -> str:
    """The backend that runs. "auto" is "mosaic_sm90" on a Hopper GPU and "mosaic_portable" on every GPU from compute capability 8.0
    on, where shapes and dtype fit, else "xla".

    On a GPU, falling back to "xla" is logged once for each reason; one kernel in place of another is not.

    Args:
        left_out: backends that "auto" must not take on this device.

    Raises:
        ValueError: not one of `kernels.backends.ATTENTION.names`.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    shapes: dict[str, Any] = {"num_query_heads": num_query_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return _resolve(backend, without_work=False, left_out=left_out, page_size=page_size, dtype=dtype, **shapes)


def _resolve(backend: str, *, without_work: bool = False, left_out: Collection[str] = (), **shapes: Any) -> str:
    """As `resolve_backend`; without_work: "auto" leaves out backends that plan on the host."""
    ATTENTION.check(backend)
    if backend != "auto":
        lacks = ATTENTION[backend].functions.lacks(**shapes)
        if lacks is not None:
            raise NotImplementedError(f"{backend} can't do {lacks}; use backend='xla'")
        return backend
    passed_over: list[tuple[str, str]] = []
    for row in ATTENTION.automatic(current_platform()):
        if row.name in left_out:
            continue
        lacks = row.functions.lacks(**shapes)
        if lacks is None and without_work and row.plans_on_host:
            lacks = "a call inside jit without work=: plan with host_planner"
        if lacks is None:
            for name, reason in passed_over if row.plain_xla else ():
                _say_fallback(row.name, name, reason)
            return row.name
        passed_over.append((row.name, lacks))
    raise NotImplementedError("; ".join(f"{name} can't do {lacks}" for name, lacks in passed_over))


@functools.cache
def _say_fallback(chosen: str, backend: str, lacks: str) -> None:
    logger.warning("attention runs on %s: %s can't do %s", chosen, backend, lacks)


def _resolve_max_q_len(max_q_len: int | None, num_tokens: int) -> int:
    if max_q_len is None:
        return num_tokens
    if not (_is_int(max_q_len) and max_q_len >= 1):
        raise ValueError(f"{max_q_len=} must be an integer of at least 1, or None")
    return min(int(max_q_len), num_tokens)


def _check_options(scale: float | None, sliding_window: int | None, soft_cap: float | None) -> None:
    if scale is not None and not (isinstance(scale, numbers.Real) and math.isfinite(scale)):
        raise ValueError(f"{scale=} must be a finite number or None")
    if sliding_window is not None and not (_is_int(sliding_window) and sliding_window >= 1):
        raise ValueError(f"{sliding_window=} must be an integer of at least 1, or None")
    if soft_cap is not None and not (isinstance(soft_cap, numbers.Real) and 0 < soft_cap < math.inf):
        raise ValueError(f"{soft_cap=} must be a positive number or None")


def _check_arrays(q, kv_pages, page_table, cu_q_lens, kv_lens) -> None:
    shapes = Shapes()
    shapes.check("kv_pages", kv_pages, "num_pages 2 K page_size H")
    shapes.check("q", q, "T N H")
    if shapes["N"] % shapes["K"]:
        raise ValueError(
            f"{q.shape=} has {shapes['N']} query heads; must be a multiple of {shapes['K']} KV heads ({kv_pages.shape=})"
        )
    if q.dtype != kv_pages.dtype or q.dtype.name not in DTYPES:
        raise ValueError(f"{q.dtype=} and {kv_pages.dtype=} must be the same, one of {', '.join(DTYPES)}")
    _check_lens(shapes, cu_q_lens, kv_lens)
    shapes.check("page_table", page_table, "S P", jnp.int32)


def _check_lens(shapes: Shapes, cu_q_lens, kv_lens) -> None:
    shapes.check("kv_lens", kv_lens, "S", jnp.int32)
    shapes.check("cu_q_lens", cu_q_lens, "S+1", jnp.int32)


def _is_int(x) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)
