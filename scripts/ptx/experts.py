"""The grouped matmul's PTX on the cases that its backends share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.backends import GROUPED_MATMUL
from kernels.grouped_matmul import gather_rows
from kernels.grouped_matmul.cases import Batch, Case
from kernels.grouped_matmul.layout import Groups, lay_out
from scripts.ptx.attention import nothing
from scripts.ptx.compiled import Kernel, KernelCompiler
from scripts.ptx.machine import run
from scripts.ptx.program import PtxError


@dataclasses.dataclass(frozen=True)
class ExpertsPtx:
    """The kernel for one case's sizes, in tiles of `block_rows`."""

    kernel: Kernel
    case: Case
    block_rows: int
    backend: str = "mosaic_sm90"

    @classmethod
    def compile(
        cls, compiler: KernelCompiler, case: Case, block_rows: int | None = None, *, backend: str = "mosaic_sm90"
    ) -> ExpertsPtx:
        """block_rows: None is what the backend chooses."""
        functions = GROUPED_MATMUL[backend].functions
        rows = block_rows or functions.block_rows(case.T, case.k, case.E)
        ids = jax.ShapeDtypeStruct((case.T, case.k), jnp.int32)
        groups = jax.eval_shape(lambda ids: _lay_out(ids, case, None, rows, backend), ids)

        def product(x: Any, w: Any, groups: Any) -> Any:
            return functions.matmul(x, w, groups, gated=True) if case.gated else functions.matmul(x, w, groups)

        array = jax.ShapeDtypeStruct
        args = (array((groups.num_rows, case.D), case.dtype), array((case.E, case.D, case.F), case.dtype), groups)
        (kernel,) = compiler.compile(f"{case.name} {rows}", product, args).values()
        return cls(kernel, case, rows, backend)

    def run(self, batch: Batch, *, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(every token's products [T, k, F], or [T, k, F / 2], 0 for padding; the instructions that ran)."""
        groups = _lay_out(batch.group_ids, self.case, batch.num_tokens, self.block_rows, self.backend)
        table = [np.asarray(x) for x in (groups.tile_group, groups.tile_row, groups.tile_rows)]
        x, w = np.asarray(gather_rows(batch.x, groups)), np.asarray(batch.w)
        out = nothing((len(x), w.shape[2] // (2 if batch.gated else 1)), w.dtype)
        try:
            result = run(self.kernel.program, self.kernel.launch, [*table, x, w, out], seed=seed)
        except PtxError as error:
            raise PtxError(f"{self.kernel.name}, seed {seed}: {error}") from None
        rows = np.asarray(groups.row)
        products = result.arrays[5][np.minimum(rows, len(x) - 1)]
        products[rows >= len(x)] = 0
        return products, {self.kernel.name: result.covered}


def _lay_out(ids: Any, case: Case, num_tokens: Any, rows: int, backend: str) -> Groups:
    return lay_out(ids, case.E, num_tokens=num_tokens, block_rows=rows, backend=backend)
