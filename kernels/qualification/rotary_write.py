"""Batches of the rotary write that a card is asked to compute, and what the reference makes of them.

The kernel's own cases, and for a model, a step of decodes and a large one in its own heads, page size and dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kernels.backends import Backend
from kernels.rotary_write import rotary_write
from kernels.rotary_write.cases import CASES, EPS, TOLERANCE, Batch, Case, build, expected

_NAMED = {case.name: case for case in CASES}
_HARD = ("odd_heads", "head_96_norm", "head_256", "head_64_norm", "float16")
_SMALL = ("qwen3", "no_norm")
_LARGE = Case("large", 1000, 16, 8, 128, 64, padding=77, num_pages=20)


@dataclasses.dataclass(frozen=True)
class RotaryWriteCheck:
    """A case of the kernel's, with finite numbers everywhere."""

    tolerances: ClassVar[Mapping[str, float]] = TOLERANCE
    case: Case

    def lacks(self, row: Backend) -> str | None:
        """As the row's own `lacks`."""
        return row.functions.lacks(head_dim=self.case.H, dtype=self.case.dtype)

    def make(self) -> Batch:
        """See cases.build."""
        batch = build(self.case)
        return dataclasses.replace(batch, qkv=_finite(batch.qkv), kv_pages=_finite(batch.kv_pages))

    def program(self, row: Backend, batch: Batch) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """All queries and all pages, one after the other."""
        scales = {} if batch.q_scale is None else {"q_scale": batch.q_scale, "k_scale": batch.k_scale}

        def write(scales, *arrays):
            queries, pages = rotary_write(*arrays, **scales, eps=EPS, backend=row.name)
            return jnp.concatenate([queries.ravel(), pages.ravel()])

        return write, jax.tree.map(jnp.asarray, (scales, *batch.arrays))

    def owned(self, values: np.ndarray) -> np.ndarray:
        """All of them: a slot that no token has must stay as it is."""
        return values

    def reference(self, batch: Batch) -> np.ndarray:
        """float64."""
        queries, pages = expected(batch)
        return np.concatenate([queries.ravel(), pages.ravel()])

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """The largest difference over 1 + the length of the pair that was rotated: what a norm near a tie rounds to its other side
        moves by a step of the whole pair, also where the rotation leaves little of it in one value. Infinite where a value of V is
        another one: those are not rotated."""
        case = self.case
        values, given = (x[case.T * case.N * case.H :].reshape(case.num_pages, 2, case.K, -1)[:, 1] for x in (got, want))
        if not np.array_equal(values, given):
            return float("inf")
        got, want = (x.reshape(-1, 2, case.H // 2) for x in (got, want))
        return float((np.abs(got - want) / (1 + np.linalg.norm(want, axis=1, keepdims=True))).max())


def checks(shapes: Mapping[str, Any] | None, few: bool) -> list[RotaryWriteCheck]:
    """The batches that every card is asked, or those of a model.

    shapes: num_query_heads, num_kv_heads, head_dim, page_size, dtype and norm (whether heads are normed). few: what an interpreter
    can run in seconds.
    """
    if shapes is None:
        return [RotaryWriteCheck(_NAMED[name]) for name in _SMALL] if few else [*map(RotaryWriteCheck, _cases())]
    heads = shapes["num_query_heads"], shapes["num_kv_heads"], shapes["head_dim"]
    page_size, rest = shapes["page_size"], {"dtype": shapes["dtype"], "norm": shapes["norm"]}
    sizes = [("decodes", 3, 1)] if few else [("decodes", 8, 3), ("mixed", 256, 19)]
    return [
        RotaryWriteCheck(Case(f"{what} of the model", T, *heads, page_size, padding=padding, num_pages=2 + T // page_size, **rest))
        for what, T, padding in sizes
    ]


def _finite(x: np.ndarray) -> np.ndarray:
    """With zeros in place of NaN. np.nan_to_num leaves ml_dtypes' bfloat16 as it is."""
    return np.where(np.isnan(x), np.zeros((), x.dtype), x)


def _cases() -> list[Case]:
    return [*(_NAMED[name] for name in _HARD), _LARGE]
