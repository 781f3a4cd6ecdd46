"""The entry to grouped matmuls: checks the arguments, picks a backend, and gives the result a gradient.

Owns the contract and its errors. The backends are the rows of `kernels.backends.GROUPED_MATMUL`. In the order of use:
`plan_groups` (where rows stand), `gather_rows`, any number of `grouped_matmul`s, `combine_rows`.
"""

from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels.backends import GROUPED_MATMUL, current_platform
from kernels.checks import Shapes
from kernels.fused_matmul.xla import silu_gated
from kernels.grouped_matmul import xla
from kernels.grouped_matmul.layout import ELSEWHERE, ROW_ALIGN, Groups, lay_out

DTYPES = ("bfloat16", "float16", "float32")


def plan_groups(
    group_ids: jax.Array,  # i32[T, k]
    weights: Sequence[jax.Array],  # [E, ., .] each
    *,
    num_tokens: jax.Array | None = None,  # i32[]
    backend: str = "auto",
    block_rows: int | None = None,
    num_groups: int | None = None,
) -> Groups:
    """The layout of a batch whose token t chose the groups group_ids[t], for products with all of `weights`.

    A token's choices lie in [0, E) and differ from each other, as those of a top-k do. That can't be checked inside a traced
    program: the caller must ensure it. Tokens from num_tokens on are padding: they get no rows and cost nothing. Only the shapes
    and dtypes of `weights` are used.

    backend: one of `kernels.backends.GROUPED_MATMUL.names`. "auto" is "mosaic_sm90" on a Hopper GPU and "mosaic_portable"
    on every GPU from compute capability 8.0 on, where they can take these weights, otherwise "xla".
    block_rows: most rows of a tile, for "xla", a multiple of 8; the same for every T, it keeps a row's bits from depending on T.
    None: the backend's choice by T, k and E.
    num_groups: groups in all, where `weights` holds E of them and the others are elsewhere. A choice outside of [0, E) is one of
    those then: it gets no row and adds nothing to its token. None: there are no others.

    Raises:
        ValueError: an argument's shape, dtype or value is wrong.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    shapes = Shapes()
    shapes.check("group_ids", group_ids, "T k", jnp.int32)
    for i, w in enumerate(weights):
        Shapes(**shapes.sizes).check(f"weights[{i}]", w, "E D F", weights[0].dtype)  # D and F may differ between them
        shapes.sizes["E"] = w.shape[0]
    T, k, E = (shapes[letter] for letter in ("T", "k", "E"))
    if weights[0].dtype.name not in DTYPES:
        raise ValueError(f"{weights[0].dtype=} must be one dtype of {', '.join(DTYPES)}")
    if k > (num_groups or E):
        raise ValueError(f"{group_ids.shape=} has {k} choices a token among {E} groups: they can't differ")
    if num_tokens is not None:
        shapes.check("num_tokens", num_tokens, "", jnp.int32)
    backend = resolve_backend(backend, weights)
    if block_rows is not None and (backend.startswith("mosaic") or block_rows < 1 or block_rows % ROW_ALIGN):
        raise ValueError(
            f"{block_rows=} must be a positive multiple of {ROW_ALIGN}, or None, and None with Mosaic's backends ({backend=})"
        )
    rows = block_rows or GROUPED_MATMUL[backend].functions.block_rows(T, k, num_groups or E)
    with jax.named_scope("plan_groups"):
        if num_groups is not None:
            group_ids = jnp.where((group_ids >= 0) & (group_ids < E), group_ids, ELSEWHERE)
        plan = GROUPED_MATMUL[backend].functions.lay_out if GROUPED_MATMUL[backend].lays_out else lay_out
        return plan(group_ids, E, num_tokens=num_tokens, block_rows=rows, backend=backend, some_elsewhere=num_groups is not None)


def gather_rows(x: jax.Array, groups: Groups) -> jax.Array:  # [T, D] -> [M, D]
    """Copies each token's vector to its rows. Rows that belong to no token hold the last token's, and pass nothing back to it: XLA
    needs a command more to zero them. Raises ValueError if x is not [T, D]."""
    Shapes(T=groups.row.shape[0]).check("x", x, "T D")
    with jax.named_scope("gather_rows"):
        return _gather(x, groups.token)


def grouped_matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
    *,
    gated: bool = False,
) -> jax.Array:  # [M, F], or [M, F / 2] where gated; x.dtype
    """Each row times its group's matrix, summed in float32. Rows that belong to no token may hold anything.

    Where gated, the result is silu(the first half of the columns) times the second half (SwiGLU, arXiv:2002.05202). A backend that
    does it in one kernel does not round the products before.

    Matrices of groups without rows are not read. For a given M, a row's result depends on the row and its matrix alone, not on the
    rest of the batch. Differentiable in x and w; every backend uses the gradient of "xla".

    Raises: ValueError, NotImplementedError as `plan_groups` does.
    """
    shapes = Shapes(M=groups.num_rows, E=groups.sizes.shape[0])
    shapes.check("x", x, "M D")
    shapes.check("w", w, "E D F")
    if x.dtype != w.dtype:
        raise ValueError(f"{x.dtype=} and {w.dtype=} must be the same")
    resolve_backend(groups.backend, [w])
    if gated and shapes["F"] % 2:
        raise ValueError(f"{w.shape=} has {shapes['F']} columns; must be gates and as many that they gate")
    with jax.named_scope(f"grouped_matmul_{groups.backend}"):
        if not gated:
            return _matmul(x, w, groups)
        if GROUPED_MATMUL[groups.backend].fuses_gate:
            return _gated_matmul(x, w, groups)
        return silu_gated(_matmul(x, w, groups))


def combine_rows(
    y: jax.Array,  # [M, D]
    groups: Groups,
    weights: jax.Array,  # f32[T, k]
    join: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
) -> jax.Array:  # [T, D], y.dtype
    """The weighted sum of each token's rows, in float32 and in the order of its choices; zero for padding.

    join: (rows [T, k, D], whether each is here bool[T, k]; zeros where not) -> the same of all groups, where some are elsewhere and
    their rows are to be part of the sum.

    Raises ValueError if a shape differs from what was planned, or the weights are not float32.
    """
    T, k = groups.row.shape
    shapes = Shapes(M=groups.num_rows, T=T, k=k)
    shapes.check("y", y, "M D")
    shapes.check("weights", weights, "T k", jnp.float32)
    with jax.named_scope("combine_rows"):
        rows, here = y.at[groups.row].get(mode="fill", fill_value=0), groups.row < groups.num_rows  # [T, k, D]
        if join is not None:
            rows, here = join(rows, here)
        weights = jnp.where(here, weights, 0)  # padding's may be NaN
        return (rows.astype(jnp.float32) * weights[:, :, None]).sum(axis=1).astype(y.dtype)


@jax.custom_vjp
def _gather(x: jax.Array, tokens: jax.Array) -> jax.Array:
    return x.at[tokens].get(mode="clip")


def _gather_backward(saved, dy):
    x, tokens = saved
    dx = jnp.zeros_like(x).at[tokens].add(dy, mode="drop")
    return dx, np.zeros(tokens.shape, jax.dtypes.float0)


_gather.defvjp(lambda x, tokens: (_gather(x, tokens), (x, tokens)), _gather_backward)


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array, groups: Groups) -> jax.Array:
    return GROUPED_MATMUL[groups.backend].functions.matmul(x, w, groups)


def _forward(x, w, groups):
    return _matmul(x, w, groups), (x, w, groups)


def _backward(saved, dy):
    x, w, groups = saved
    dx = xla.matmul(dy, w, groups, transposed=True)
    dw = xla.weight_gradient(x, dy, groups, w.dtype)
    no_gradient = jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), groups)
    return dx, dw, no_gradient


_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def _gated_matmul(x: jax.Array, w: jax.Array, groups: Groups) -> jax.Array:
    return GROUPED_MATMUL[groups.backend].functions.matmul(x, w, groups, gated=True)


def _gated_forward(x, w, groups):
    return _gated_matmul(x, w, groups), (x, w, groups)


def _gated_backward(saved, dy):
    _, vjp = jax.vjp(silu_gated, xla.matmul(*saved))  # the products again, which the kernel has not kept
    return _backward(saved, *vjp(dy))


_gated_matmul.defvjp(_gated_forward, _gated_backward)


def resolve_backend(backend: str, weights: Sequence[jax.Array], left_out: Collection[str] = ()) -> str:
    """The backend that runs: "auto" is the preferred one that can take all of `weights` [., D, F], of which only shapes and dtypes
    are used. left_out: backends that "auto" must not take on this device.

    Raises: ValueError, NotImplementedError as `plan_groups` does.
    """
    GROUPED_MATMUL.check(backend)
    rows = [GROUPED_MATMUL[backend]] if backend != "auto" else GROUPED_MATMUL.automatic(current_platform())
    rows = [row for row in rows if backend != "auto" or row.name not in left_out]
    for row in rows:
        lacks = next(filter(None, map(row.functions.lacks, weights)), None)
        if lacks is None:
            return row.name
    raise NotImplementedError(f"{rows[-1].name} needs {lacks}; use backend='xla'")
