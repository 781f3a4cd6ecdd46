"""The entry to grouped matmuls: checks the arguments, picks a backend, and gives the result a gradient.

Owns the contract and its errors. Does not know how any backend works, nor that the groups are experts. In the order of use:
`plan_groups` (where rows stand), `gather_rows`, any number of `grouped_matmul`s, `combine_rows`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kernels import gpu
from kernels.grouped_matmul import mosaic_sm90, reference, xla
from kernels.grouped_matmul.layout import Groups, lay_out

BACKENDS = ("auto", "reference", "xla", "mosaic_sm90")
DTYPES = ("bfloat16", "float16", "float32")


def plan_groups(
    group_ids: jax.Array,  # i32[T, k]
    weights: Sequence[jax.Array],  # [E, ., .] each
    *,
    num_tokens: jax.Array | None = None,  # i32[]
    backend: str = "auto",
) -> Groups:
    """The layout of a batch whose token t chose the groups group_ids[t], for products with all of `weights`.

    A token's choices lie in [0, E) and differ from each other, as those of a top-k do; that can't be checked inside a traced
    program and is the caller's word. Tokens from num_tokens on are padding: they get no rows and cost nothing. Only shapes and
    dtypes of `weights` are used.

    backend: one of BACKENDS. "auto" is "mosaic_sm90" on a Hopper GPU where it can take these weights, otherwise "xla".

    Raises:
        ValueError: an argument's shape, dtype or value is wrong.
        NotImplementedError: the backend can't; the message says what it lacks.
    """
    if group_ids.ndim != 2 or 0 in group_ids.shape or group_ids.dtype != jnp.int32:
        raise ValueError(f"group_ids is {group_ids.dtype}{group_ids.shape}; must be int32[T, k], neither of them 0")
    T, k = group_ids.shape
    E = weights[0].shape[0]
    for w in weights:
        if w.ndim != 3 or 0 in w.shape or w.shape[0] != E or w.dtype != weights[0].dtype or w.dtype.name not in DTYPES:
            shown = ", ".join(f"{w.dtype}{w.shape}" for w in weights)
            raise ValueError(f"weights are {shown}; must be [E, D, F] each, of one E and one dtype of {', '.join(DTYPES)}")
    if k > E:
        raise ValueError(f"{group_ids.shape=} has {k} choices a token among {E} groups: they can't differ")
    if num_tokens is not None and (num_tokens.shape != () or num_tokens.dtype != jnp.int32):
        raise ValueError(f"num_tokens is {num_tokens.dtype}{num_tokens.shape}; must be an int32 scalar or None")
    backend = _resolve_backend(backend, weights)
    rows = (mosaic_sm90 if backend == "mosaic_sm90" else xla).block_rows(T, k, E)
    with jax.named_scope("plan_groups"):
        return lay_out(group_ids, E, num_tokens=num_tokens, block_rows=rows, backend=backend)


def gather_rows(x: jax.Array, groups: Groups) -> jax.Array:  # [T, D] -> [M, D]
    """A token's vector in each of its rows; zeros in nobody's."""
    with jax.named_scope("gather_rows"):
        return x.at[groups.token].get(mode="fill", fill_value=0)


def grouped_matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
) -> jax.Array:  # [M, F], x.dtype
    """Each row times its group's matrix, summed in float32. Rows that are nobody's come back unspecified.

    Matrices of groups without rows are not read, whatever they hold. A row's result depends on the row and its matrix alone, not
    on what else is in the batch, for a given M. Differentiable in x and w; on every backend the gradient is the "xla" one.

    Raises: ValueError, NotImplementedError as `plan_groups` does.
    """
    if x.ndim != 2 or x.shape[0] != groups.num_rows:
        raise ValueError(f"{x.shape=} must be [M, D] with M={groups.num_rows}, the rows that were planned")
    E = groups.sizes.shape[0]
    if w.ndim != 3 or w.shape[:2] != (E, x.shape[1]):
        raise ValueError(f"{w.shape=} must be [E, D, F] with E={E} and D={x.shape[1]}")
    if x.dtype != w.dtype:
        raise ValueError(f"{x.dtype=} and {w.dtype=} must be the same")
    _resolve_backend(groups.backend, [w])
    with jax.named_scope(f"grouped_matmul_{groups.backend}"):
        return _matmul(x, w, groups)


def combine_rows(
    y: jax.Array,  # [M, D]
    groups: Groups,
    weights: jax.Array,  # f32[T, k]
) -> jax.Array:  # [T, D], y.dtype
    """For each token the weighted sum of its rows, in float32 and in the order of its choices; zero for padding."""
    with jax.named_scope("combine_rows"):
        rows = y.at[groups.row].get(mode="fill", fill_value=0).astype(jnp.float32)  # [T, k, D]
        weights = jnp.where(groups.row < groups.num_rows, weights, 0)  # padding's may be NaN
        return (rows * weights[:, :, None]).sum(axis=1).astype(y.dtype)


@jax.custom_vjp
def _matmul(x: jax.Array, w: jax.Array, groups: Groups) -> jax.Array:
    match groups.backend:
        case "reference":
            return reference.matmul(x, w, groups)
        case "mosaic_sm90":
            return mosaic_sm90.matmul(x, w, groups)
    return xla.matmul(x, w, groups)


def _forward(x, w, groups):
    return _matmul(x, w, groups), (x, w, groups)


def _backward(saved, dy):
    x, w, groups = saved
    dx = xla.matmul(dy, w, groups, transposed=True)
    dw = xla.weight_gradient(x, dy, groups, w.dtype)
    no_gradient = jax.tree.map(lambda i: np.zeros(i.shape, jax.dtypes.float0), groups)
    return dx, dw, no_gradient


_matmul.defvjp(_forward, _backward)


def _resolve_backend(backend: str, weights: Sequence[jax.Array]) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"{backend=} must be one of {', '.join(BACKENDS)}")
    if backend in ("auto", "mosaic_sm90"):
        lacks = next(filter(None, (mosaic_sm90.lacks(w) for w in weights)), None) or gpu.missing_for_sm90()
        if backend == "auto":
            return "xla" if lacks else "mosaic_sm90"
        if lacks:
            raise NotImplementedError(f"mosaic_sm90 needs {lacks}; use backend='xla'")
    return backend
