"""Row-wise computations tile by tile, so that a row's bits do not follow how many rows there are.

A compiler chooses how it multiplies, sums and vectorises by the shapes of a program. What is computed here has one shape, a tile's,
in every program, and is fenced off from what surrounds it. A row's result then depends on the row alone, as far as its place in the
tile does not count, which holds for XLA:CPU and is tested. Owns the loop; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# map_rows(f, *xs, num_rows=None): f(*xs), where each row of its results is made of that row of xs [T, ...] alone. num_rows i32[]:
# rows from here on are padding, whose results are finite and mean nothing.
MapRows = Callable[..., Any]


def whole(f: Callable[..., Any], *xs: jax.Array, num_rows: jax.Array | None = None) -> Any:
    """A MapRows: all rows at once."""
    return f(*xs)


@dataclass(frozen=True)
class RowTiles:
    """A MapRows: tiles of this many rows, one after the other. Tiles without rows are not computed."""

    rows: int

    def __call__(self, f: Callable[..., Any], *xs: jax.Array, num_rows: jax.Array | None = None) -> Any:
        R, T = self.rows, xs[0].shape[0]
        num_tiles = -(-T // R)
        padded = [jnp.pad(x, ((0, num_tiles * R - T),) + ((0, 0),) * (x.ndim - 1)) for x in xs]
        tiles = [jax.ShapeDtypeStruct((R, *x.shape[1:]), x.dtype) for x in xs]
        out = jax.tree.map(lambda y: jnp.zeros((num_tiles * R, *y.shape[1:]), y.dtype), jax.eval_shape(f, *tiles))

        def tile(i: jax.Array, out: Any) -> Any:
            rows = lax.optimization_barrier(tuple(lax.dynamic_slice_in_dim(x, i * R, R) for x in padded))
            # One barrier each: of one around both results of a top_k XLA's compiler for several devices aborts.
            y = jax.tree.map(lax.optimization_barrier, f(*rows))
            return jax.tree.map(lambda all_rows, rows: lax.dynamic_update_slice_in_dim(all_rows, rows, i * R, 0), out, y)

        # Behind a barrier: a loop whose length is known may be unrolled, and its code then differs between shapes.
        count = lax.optimization_barrier(jnp.int32(num_tiles) if num_rows is None else (num_rows + R - 1) // R)
        out = lax.fori_loop(0, count, tile, out)
        return jax.tree.map(lambda y: y[:T], out)
