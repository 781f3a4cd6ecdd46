"""Batches of the fused matmul that a card is asked to compute, and what the reference makes of them.

The kernel's own cases with every step before and after the product, rings that are filled several times and one large batch. For a
model, its own matrices in every tile that its buckets may have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kernels import gpu
from kernels.backends import Backend
from kernels.fused_matmul import fused_matmul
from kernels.fused_matmul.cases import CASES, EPS, TOLERANCE, Batch, Case, build, expected
from kernels.fused_matmul.mosaic_sm90 import lacks
from kernels.fused_matmul.tiles import Tiles, choose_tiles

_NAMED = {case.name: case for case in CASES}
_HARD = ("qkv_bias", "gate_up_bias", "o_bias", "deep", "deep_gate_up", "prefill_gate_up", "prefill_down")
_SMALL = ("qkv", "gate_up", "down")
_ROWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_LARGE = Case("large", 1000, 1024, 2048, norm=True, gated=True)


@dataclasses.dataclass(frozen=True)
class FusedMatmulCheck:
    """A case of the kernel's."""

    tolerances: ClassVar[Mapping[str, float]] = TOLERANCE
    case: Case

    def lacks(self, row: Backend) -> str | None:
        """As the row's own `lacks`."""
        c = self.case
        return row.functions.lacks(depth=c.D, num_columns=c.F, gated=c.gated, dtype=c.dtype)

    def make(self) -> Batch:
        """See cases.build."""
        return build(self.case)

    def program(self, row: Backend, batch: Batch) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """[T, F], or [T, F / 2] where gated."""

        def product(x, w, options):
            return fused_matmul(x, w, eps=EPS, gated=self.case.gated, backend=row.name, **options)

        return product, jax.tree.map(jnp.asarray, (batch.x, batch.w, batch.options))

    def owned(self, values: np.ndarray) -> np.ndarray:
        """Of as many rows as a float64 product on a host takes no time for, in every tile of rows."""
        return values[self._rows]

    def reference(self, batch: Batch) -> np.ndarray:
        """float64."""
        residual = None if batch.residual is None else batch.residual[self._rows]
        return expected(self.case, dataclasses.replace(batch, x=batch.x[self._rows], residual=residual))

    @property
    def _rows(self) -> np.ndarray:
        """Those that are compared: 64, spread evenly, the first and the last among them."""
        return np.unique(np.linspace(0, self.case.T - 1, 64).astype(int))

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """The largest difference, over the largest value."""
        return float(np.abs(got - want).max() / np.abs(want).max())


def checks(shapes: Mapping[str, Any] | None, few: bool) -> list[FusedMatmulCheck]:
    """The batches that every card is asked, or those of a model.

    shapes: weights (a list of [D, F, step]; step is "norm", "gate" or "residual", or one of these with "+bias") and dtype. few:
    what an interpreter can run in seconds; else as many rows as it takes for every tile that buckets of up to 2,048 tokens have.
    """
    if shapes is None:
        cases = [_NAMED[name] for name in _SMALL] if few else [*(_NAMED[name] for name in _HARD), _LARGE]
        return [FusedMatmulCheck(case) for case in cases]
    made = []
    for D, F, step in shapes["weights"]:
        what, _, bias = step.partition("+")
        options = {"norm": what != "residual", "gated": what == "gate", "residual": what == "residual", "bias": bool(bias)}
        for T in (8,) if few else _rows_of_every_tile(D, F, gated=options["gated"]):
            case = Case(f"{step} of the model, {T} x {D} x {F}", T, D, F, dtype=shapes["dtype"], **options)
            made.append(FusedMatmulCheck(case))
    return made


def _rows_of_every_tile(D: int, F: int, *, gated: bool) -> list[int]:
    """Numbers of rows that get different tiles on this device."""
    first: dict[Tiles, int] = {}
    if lacks(depth=D, num_columns=F, gated=gated, dtype="bfloat16") is None:
        for T in _ROWS:
            first.setdefault(choose_tiles(T, D, F, gated=gated, num_sms=gpu.num_sms()), T)
    return list(first.values()) or [_ROWS[0]]
