"""Our own kernels as cases for a deviceless compile: the head shapes that are served, decode and prefill, each page size and dtype.

Owns the list; what a kernel is held to beside registers and shared memory is a case's own `faults`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.compiled_report import CompiledReport


@dataclass(frozen=True)
class KernelCase:
    """function(*args), args being ShapeDtypeStructs; `calls` Mosaic calls are expected of it."""

    name: str
    function: Callable
    args: tuple[Any, ...]
    calls: int = 1

    def faults(self, report: CompiledReport) -> list[str]:
        found = len(report.mosaic_calls)
        return [] if found == self.calls else [f"{self.name}: {found} Mosaic calls, expected {self.calls}"]
