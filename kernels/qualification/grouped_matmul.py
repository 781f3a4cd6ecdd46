"""Batches of the grouped matmul that a card is asked to compute, and what the reference makes of them.

The kernel's own cases in 16 bits that wrap its ring of blocks, leave groups empty and fill tiles partly, and a large one. For a
model, the two products of its experts at a few rows each and at many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from kernels.backends import Backend
from kernels.grouped_matmul import gather_rows, grouped_matmul, plan_groups
from kernels.grouped_matmul.cases import CASES, TOLERANCE, Batch, Case, build

_NAMED = {case.name: case for case in CASES}
_HARD = ("bfloat16_sizes", "bfloat16_nothing", "bfloat16_deep", "float16_deep", "bfloat16_gated_deep")
_SMALL = ("bfloat16", "float16", "bfloat16_gated")
_LARGE = Case("large", 512, 4, 16, D=1024, F=256, num_tokens=509, active=13, skewed=True, dtype="bfloat16")
_MOST_EXPERTS = 8  # of a model's: every one more is the same code on other rows


@dataclasses.dataclass(frozen=True)
class GroupedMatmulCheck:
    """A case of the kernel's."""

    tolerances: ClassVar[Mapping[str, float]] = TOLERANCE
    case: Case

    def lacks(self, row: Backend) -> str | None:
        """As the row's own `lacks`."""
        c = self.case
        weights: Any = jax.ShapeDtypeStruct((c.E, c.D, c.F), jnp.dtype(c.dtype))
        return row.functions.lacks(weights)

    def make(self) -> Batch:
        """See cases.build."""
        return build(self.case)

    def program(self, row: Backend, batch: Batch) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """[T, k, F], each token's products; 0 for padding."""
        return lambda batch: self._products(batch, row.name), (batch,)

    def owned(self, values: np.ndarray) -> np.ndarray:
        """All of them."""
        return values

    def reference(self, batch: Batch) -> np.ndarray:
        """f32 [T, k, F]."""
        wide = dataclasses.replace(batch, x=batch.x.astype(jnp.float32), w=batch.w.astype(jnp.float32))
        with jax.default_matmul_precision("highest"):
            return np.asarray(jax.jit(lambda batch: self._products(batch, "reference"))(wide))

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """The largest difference, over the largest value, or 1."""
        return float(np.abs(got - want).max() / max(np.abs(want).max(), 1))

    def _products(self, batch: Batch, backend: str) -> jax.Array:
        groups = plan_groups(batch.group_ids, [batch.w], num_tokens=batch.num_tokens, backend=backend)
        y = grouped_matmul(gather_rows(batch.x, groups), batch.w, groups, gated=batch.gated)
        return y.at[groups.row].get(mode="fill", fill_value=0)


def checks(shapes: Mapping[str, Any] | None, few: bool) -> list[GroupedMatmulCheck]:
    """The batches that every card is asked, or those of a model.

    shapes: num_experts, num_choices (of a token), products (a list of [D, F, gated]) and dtype. few: what an interpreter can run in
    seconds.
    """
    if shapes is None:
        cases = [_NAMED[name] for name in _SMALL] if few else [*(_NAMED[name] for name in _HARD), _LARGE]
        return [GroupedMatmulCheck(case) for case in cases]
    experts, made = min(shapes["num_experts"], _MOST_EXPERTS), []
    choices = min(shapes["num_choices"], experts)
    for D, F, gated in shapes["products"]:
        for what, T in [("decodes", 6)] if few else [("decodes", 8), ("prefill", 512)]:
            name = f"{what} of the model, {D} x {F}"
            case = Case(name, T, choices, experts, D=D, F=F, num_tokens=T - 1, dtype=shapes["dtype"], gated=gated)
            made.append(GroupedMatmulCheck(case))
    return made
