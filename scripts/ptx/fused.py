"""The fused matmul's PTX on the cases that its backends share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kernels.fused_matmul import mosaic_sm90
from kernels.fused_matmul.cases import EPS, Batch, Case, build
from kernels.fused_matmul.tiles import Tiles
from scripts.ptx.attention import nothing
from scripts.ptx.compiled import Kernel, KernelCompiler, array
from scripts.ptx.machine import run
from scripts.ptx.program import PtxError


@dataclasses.dataclass(frozen=True)
class FusedPtx:
    """The kernel for one case's sizes, in some tiles."""

    kernel: Kernel
    case: Case

    @classmethod
    def compile(cls, compiler: KernelCompiler, case: Case, tiles: Tiles | None = None, num_ctas: int | None = 3) -> FusedPtx:
        """tiles: None is what the kernel chooses. num_ctas: few, so that each has several tiles."""
        batch = build(case)

        def product(x: Any, w: Any, options: Any) -> Any:
            given = (options.get(name) for name in ("scale", "bias", "residual"))
            return mosaic_sm90.matmul(x, w, *given, eps=EPS, gated=case.gated, tiles=tiles, num_ctas=num_ctas)

        abstract = {name: array(*y.shape, dtype=y.dtype) for name, y in batch.options.items()}
        args = (*(array(*y.shape, dtype=y.dtype) for y in (batch.x, batch.w)), abstract)
        (kernel,) = compiler.compile(f"{case.name} {tiles} {num_ctas}", product, args).values()
        return cls(kernel, case)

    def run(self, batch: Batch, *, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the result [T, F], or [T, F / 2]; the instructions that ran)."""
        case, padding = self.case, -self.case.T % mosaic_sm90.ROW_ALIGN
        rows = [np.pad(y, ((0, padding), (0, 0))) for y in (batch.x, batch.residual) if y is not None]
        columns = [y for y in (batch.scale, batch.bias) if y is not None]
        arrays = [rows[0], batch.w, *columns, *rows[1:]]
        out = nothing((case.T + padding, case.F // 2 if case.gated else case.F), batch.x.dtype)
        try:
            result = run(self.kernel.program, self.kernel.launch, [*arrays, out], seed=seed)
        except PtxError as error:
            raise PtxError(f"{self.kernel.name}, seed {seed}: {error}") from None
        return result.arrays[-1][: case.T], {self.kernel.name: result.covered}
