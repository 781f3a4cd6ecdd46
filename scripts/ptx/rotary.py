"""The rotary write's PTX on the cases that its backends share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kernels.rotary_write import rotary_write
from kernels.rotary_write.cases import EPS, Batch, Case, build, faults
from scripts.aot.compiler import device_of
from scripts.ptx.attention import nothing
from scripts.ptx.compiled import Kernel, KernelCompiler, array
from scripts.ptx.machine import run
from scripts.ptx.program import PtxError


@dataclasses.dataclass(frozen=True)
class RotaryPtx:
    """The kernel for one case's sizes."""

    kernel: Kernel
    case: Case

    @classmethod
    def compile(cls, compiler: KernelCompiler, case: Case) -> RotaryPtx:
        """The program of the case's sizes."""
        from kernels import gpu

        batch = build(case)
        scales = {} if batch.q_scale is None else {name: array(case.H, dtype=case.dtype) for name in ("q_scale", "k_scale")}

        def write(scales: Any, *arrays: Any) -> Any:
            return rotary_write(*arrays, **scales, eps=EPS, backend="mosaic")

        args = (scales, *(array(*x.shape, dtype=x.dtype) for x in batch.arrays))
        with gpu.assume(device_of(compiler.compiler.target)):
            (kernel,) = compiler.compile(case.name, write, args).values()
        return cls(kernel, case)

    def run(self, batch: Batch, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(queries [T, N, H], pages, the instructions that ran)."""
        case = self.case
        rows = [x.reshape(-1, case.H) for x in (batch.kv_pages.copy(), batch.qkv)]
        scales = [x.reshape(1, case.H) for x in (batch.q_scale, batch.k_scale) if x is not None]
        queries = nothing((case.T * case.N, case.H), batch.qkv.dtype)
        arrays = [*rows, batch.cos, batch.sin, batch.slot_mapping, *scales, queries]
        try:
            result = run(self.kernel.program, self.kernel.launch, arrays, seed=seed)
        except PtxError as error:
            raise PtxError(f"{self.kernel.name}, seed {seed}: {error}") from None
        queries = result.arrays[-1].reshape(case.T, case.N, case.H)
        return queries, result.arrays[0].reshape(batch.kv_pages.shape), result.covered


@dataclasses.dataclass(frozen=True)
class RotaryRun:
    """One batch of a program, as suite.Run: queries and pages, one after the other."""

    name: str
    ptx: RotaryPtx
    batch: Batch

    def run(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the output, the instructions that ran)."""
        queries, pages, covered = self.ptx.run(self.batch, seed=seed)
        return np.concatenate([queries.ravel(), pages.ravel()]), {self.ptx.kernel.name: covered}

    def faults(self, out: np.ndarray) -> list[str]:
        """What is wrong with an output."""
        case, pages = self.ptx.case, self.batch.kv_pages
        queries = out[: -pages.size].reshape(case.T, case.N, case.H)
        return [
            f"{self.name}: {fault}" for fault in faults(self.batch, queries, out[-pages.size :].reshape(pages.shape), case.dtype)
        ]
