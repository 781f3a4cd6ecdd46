"""The portable attention's PTX on the cases that the backends share: a program of one shape, and the batches that it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kernels.ragged_paged_attention import ragged_paged_attention
from kernels.ragged_paged_attention.cases import Batch, Case
from kernels.ragged_paged_attention.mosaic_portable.kernel import STATS
from kernels.ragged_paged_attention.mosaic_portable.tiles import LARGE_HEAD, PortablePlanner, Tiles
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS
from scripts.aot.compiler import device_of
from scripts.ptx.attention import CHUNK, AttentionPtx, Shape, nothing
from scripts.ptx.compiled import PORTABLE_ATTENTION, PORTABLE_JOIN, KernelCompiler, array


@dataclasses.dataclass(frozen=True)
class PortablePtx(AttentionPtx):
    """The kernels of one program and what plans for it."""

    @classmethod
    def compile(cls, compiler: KernelCompiler, case: Case, shape: Shape, *, num_ctas: int = 3, split_q_len: int = 1) -> PortablePtx:
        """The program of `case`'s heads, pages and options in this shape."""
        from kernels import gpu

        heads = case.heads
        with gpu.assume(device_of(compiler.compiler.target)):
            planner = PortablePlanner.make(
                num_tokens=shape.tokens,
                num_seqs=shape.seqs,
                max_q_len=min(case.max_q_len or shape.tokens, shape.tokens),
                num_query_heads=heads.N,
                num_kv_heads=heads.K,
                head_dim=heads.H,
                max_kv_len=shape.columns * case.page_size,
                sliding_window=case.sliding_window,
                split_q_len=split_q_len,
                num_ctas=num_ctas,
                tiles=Tiles(chunk=CHUNK) if heads.H <= LARGE_HEAD else None,
            )

        def attention(*args: Any) -> Any:
            *arrays, packed = args
            return ragged_paged_attention(*arrays, **case.options, backend="mosaic_portable", work=planner.work(packed))

        pages = array(shape.pages, 2, heads.K, case.page_size, heads.H, dtype=case.dtype)
        lens = (array(shape.seqs, shape.columns), array(shape.seqs + 1), array(shape.seqs))
        args = (array(shape.tokens, heads.N, heads.H, dtype=case.dtype), pages, *lens, array(planner.size))
        return cls(compiler.compile(case.name, attention, args), planner, case, shape)

    def run(self, batch: Batch, *, longer: int = 0, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """As `AttentionPtx.run`."""
        q, _, _, cu_q_lens, _ = arrays = [np.asarray(x) for x in batch.arrays]
        packed, outputs = self._plan(batch, longer), [nothing(q.shape, q.dtype)]
        shape, heads = self.planner.shape, self.case.heads
        if PORTABLE_JOIN in self.kernels:
            rows = shape.num_slots * heads.K * shape.split_q_len * (heads.N // heads.K)
            outputs.append(nothing((rows + ROWS, heads.H + STATS), np.float32))
        first = self._launch(PORTABLE_ATTENTION, [*arrays, packed, *outputs], seed)
        covered, out = {PORTABLE_ATTENTION: first.covered}, first.arrays[6]
        if PORTABLE_JOIN in self.kernels:
            second = self._launch(PORTABLE_JOIN, [out, first.arrays[7], packed, cu_q_lens], seed)
            covered[PORTABLE_JOIN], out = second.covered, second.arrays[0]
        return out, covered
