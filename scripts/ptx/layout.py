"""The PTX of the grouped matmul's layout, against the layout that all backends share: every integer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.grouped_matmul import mosaic_layout
from kernels.grouped_matmul.cases import Batch, Case, build
from kernels.grouped_matmul.layout import ELSEWHERE, Groups, lay_out
from scripts.aot.compiler import device_of
from scripts.ptx.attention import nothing
from scripts.ptx.compiled import Kernel, KernelCompiler, array
from scripts.ptx.machine import run
from scripts.ptx.program import PtxError


@dataclasses.dataclass(frozen=True)
class LayoutPtx:
    """The kernel for one case's sizes, and for a grouped matmul in tiles of `block_rows`."""

    kernel: Kernel
    case: Case
    block_rows: int

    @classmethod
    def compile(cls, compiler: KernelCompiler, case: Case, block_rows: int) -> LayoutPtx:
        """The program of the case's sizes."""
        from kernels import gpu

        def plan(ids: Any, num_tokens: Any) -> Any:
            return mosaic_layout.lay_out(ids, case.E, num_tokens=num_tokens, block_rows=block_rows, backend="")

        with gpu.assume(device_of(compiler.compiler.target)):
            (kernel,) = compiler.compile(f"layout {case.name} {block_rows}", plan, (array(case.T, case.k), array())).values()
        return cls(kernel, case, block_rows)

    def run(self, batch: Batch, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """(every integer of the layout, in the order of `Groups`; the instructions that ran)."""
        given = mosaic_layout.inputs(batch.group_ids, self.case.E, batch.num_tokens)
        outputs = [nothing((x.size,), np.dtype(np.int32)) for x in _arrays(self.wanted(batch))]
        try:
            result = run(self.kernel.program, self.kernel.launch, [*map(np.asarray, given), *outputs], seed=seed)
        except PtxError as error:
            raise PtxError(f"{self.kernel.name}, seed {seed}: {error}") from None
        return np.concatenate(result.arrays[len(given) :]), result.covered

    def wanted(self, batch: Batch) -> Groups:
        """The layout that all backends share."""
        ids, rows = batch.group_ids, self.block_rows
        return lay_out(ids, self.case.E, num_tokens=batch.num_tokens, block_rows=rows, backend="", some_elsewhere=True)


@dataclasses.dataclass(frozen=True)
class LayoutRun:
    """One batch of a program, as suite.Run."""

    name: str
    ptx: LayoutPtx
    batch: Batch

    def run(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the output, the instructions that ran)."""
        out, covered = self.ptx.run(self.batch, seed=seed)
        return out, {self.ptx.kernel.name: covered}

    def faults(self, out: np.ndarray) -> list[str]:
        """What is wrong with an output."""
        want = np.concatenate([np.ravel(x) for x in _arrays(self.ptx.wanted(self.batch))])
        wrong = np.flatnonzero(out != want)
        if not len(wrong):
            return []
        return [f"{self.name}: {len(wrong)} of {len(want)} integers are wrong, the first is {out[wrong[0]]}, not {want[wrong[0]]}"]


def batches(case: Case) -> list[Batch]:
    """The case's own, and one of which every third choice is of a group elsewhere."""
    batch = build(case)
    ids = batch.group_ids
    elsewhere = jnp.where(jnp.arange(ids.size).reshape(ids.shape) % 3 == 1, ELSEWHERE, ids)
    return [batch, dataclasses.replace(batch, group_ids=elsewhere)]


def _arrays(groups: Groups) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(groups)]
