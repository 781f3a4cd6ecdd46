"""One unit of a plan, tried: each batch compiled, run twice and compared with the reference in full precision.

Owns the comparison and the order of what may go wrong. Which batches there are is the kernels' own modules'.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from kernels import gpu
from kernels.backends import Backend
from kernels.qualification import attention, fused_matmul, grouped_matmul, rotary_write
from kernels.qualification.plan import (
    DIFFERS,
    ERROR,
    NO_MEMORY,
    NOT_MEANT,
    NOT_TRIED,
    PASSED,
    TABLES,
    UNCOMPILED,
    WRONG,
    Plan,
    Unit,
    Verdict,
)


class NamedCase(Protocol):
    """What is asked of a kernel's case here."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...


class Check(Protocol):
    """A batch of a kernel. tolerances: of each dtype the most error, as `error` has it."""

    tolerances: ClassVar[Mapping[str, float]]

    @property
    def case(self) -> NamedCase: ...

    def lacks(self, row: Backend) -> str | None:
        """What a backend lacks for it."""
        ...

    def make(self) -> Any:
        """The batch's arrays."""
        ...

    def program(self, row: Backend, batch: Any) -> tuple[Callable[..., jax.Array], tuple[Any, ...]]:
        """A function to compile and its arguments. All that the kernel writes is its result: what is left out, XLA would."""
        ...

    def owned(self, values: np.ndarray) -> np.ndarray:
        """Those of its values that are compared; the others may be anything."""
        ...

    def reference(self, batch: Any) -> np.ndarray:
        """The values that are compared by the reference, in float32 with matmuls in full precision."""
        ...

    def error(self, got: np.ndarray, want: np.ndarray) -> float:
        """How far they are apart."""
        ...


# Modules with `checks(shapes, small)`.
CHECKS: dict[str, Any] = {
    "attention": attention,
    "rotary_write": rotary_write,
    "fused_matmul": fused_matmul,
    "grouped_matmul": grouped_matmul,
}


def run_unit(plan: Plan, unit: Unit, begin: Callable[[str], None] = lambda name: None) -> Verdict:
    """The verdict on a unit, on JAX's default device. begin: is told each batch's name before it runs."""
    row, start = TABLES[unit.kernel][unit.backend], time.perf_counter()
    checks: Sequence[Check] = CHECKS[unit.kernel].checks(unit.shapes, plan.small)
    result, reason = PASSED, ""
    with gpu.interpreted() if plan.interpreted else contextlib.nullcontext():
        lacking = [check.lacks(row) for check in checks]
        if None not in lacking:
            result, reason = NOT_MEANT, str(lacking[0])
        for check, lacks in zip(checks, lacking, strict=True):
            if lacks is None and result == PASSED:
                begin(check.case.name)
                result, reason = run_check(check, row)
    return Verdict(unit.kernel, unit.backend, result, reason, round(time.perf_counter() - start, 2))


def run_check(check: Check, row: Backend) -> tuple[str, str]:
    """(result, reason) of one batch on one backend."""
    try:
        batch = check.make()
        want = check.reference(batch)
    except Exception as error:  # of XLA's own programs: it says nothing of the kernel
        return (NO_MEMORY if _is_memory(error) else NOT_TRIED), f"{check.case.name}: no reference: {_in_a_line(error)}"
    try:
        function, arguments = check.program(row, batch)
        program = jax.jit(function).lower(*arguments).compile()
    except Exception as error:  # whatever a tracer, Mosaic, ptxas or XLA raises
        return (NO_MEMORY if _is_memory(error) else UNCOMPILED), f"{check.case.name}: {_in_a_line(error)}"
    try:
        got, again = (check.owned(np.asarray(program(*arguments))) for _ in range(2))
    except Exception as error:
        return (NO_MEMORY if _is_memory(error) else ERROR), f"{check.case.name}: {_in_a_line(error)}"
    return compare(check, got, again, want)


def compare(check: Check, got: np.ndarray, again: np.ndarray, want: np.ndarray) -> tuple[str, str]:
    """(result, reason) of two runs and what they should have been."""
    wide, tolerance = np.asarray(got, np.float64), check.tolerances[check.case.dtype]
    if not np.isfinite(wide).all():
        return WRONG, f"{check.case.name}: {int((~np.isfinite(wide)).sum())} of {wide.size} values are not finite"
    error = check.error(wide, np.asarray(want, np.float64)) if wide.size else 0.0
    if not error <= tolerance:
        return WRONG, f"{check.case.name}: off by {error:.2g}, at most {tolerance:.2g} is right"
    if (differ := num_differing(got, again)) > 0:
        return DIFFERS, f"{check.case.name}: {differ} of {wide.size} values differ between two runs"
    return PASSED, ""


def num_differing(one: np.ndarray, other: np.ndarray) -> int:
    """Values whose bits differ."""
    bits = f"u{one.dtype.itemsize}"
    return int((np.ascontiguousarray(one).view(bits) != np.ascontiguousarray(other).view(bits)).sum())


def _is_memory(error: Exception) -> bool:
    said = str(error).lower().replace("_", " ")
    return isinstance(error, MemoryError) or any(words in said for words in ("resource exhausted", "out of memory", "alloc failed"))


def _in_a_line(error: Exception) -> str:
    """Its type, its first line and its last one."""
    lines = [line.strip()[:150] for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))}"
