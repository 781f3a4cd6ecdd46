"""Attention's PTX on the cases that its backends share: a program of one shape, and the batches that it is run with.

`AttentionPtx` has as many consumers as the kernel chooses, with a short ring and short chunks. `ShippedPtx` changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels.ragged_paged_attention import ragged_paged_attention
from kernels.ragged_paged_attention.cases import Batch, Case, Heads, build
from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner
from kernels.ragged_paged_attention.mosaic_sm90.tiles import ROWS, Tiles, choose_tiles
from kernels.ragged_paged_attention.work_planner import WorkPlanner
from scripts.ptx.compiled import ATTENTION, JOIN, Kernel, KernelCompiler, array
from scripts.ptx.machine import run
from scripts.ptx.program import PtxError

STAGES, CHUNK = 3, 64  # so that short sequences go round the ring, and cross boundaries and are split


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes that batches are padded to."""

    tokens: int
    seqs: int
    pages: int
    columns: int  # of the page table


def shape_of(cases: Sequence[Case]) -> Shape:
    """The least that all of them fit."""
    arrays = [build(case).arrays for case in cases]
    tables = [table.shape for _, _, table, _, _ in arrays]
    return Shape(
        max(q.shape[0] for q, *_ in arrays),
        max(seqs for seqs, _ in tables),
        max(pages.shape[0] for _, pages, *_ in arrays),
        max(columns for _, columns in tables),
    )


def padded(case: Case, shape: Shape) -> Batch:
    """The case's batch in this shape. What is added is hostile: NaN, pages that don't exist."""
    batch = build(case)
    q, pages, table, cu_q_lens, kv_lens = (np.asarray(x) for x in batch.arrays)
    seqs = shape.seqs - table.shape[0]
    arrays = (
        np.pad(q, ((0, shape.tokens - len(q)), (0, 0), (0, 0)), constant_values=np.nan),
        np.pad(pages, ((0, shape.pages - len(pages)), *[(0, 0)] * 4), constant_values=np.nan),
        np.pad(table, ((0, seqs), (0, shape.columns - table.shape[1])), constant_values=-1),
        np.pad(cu_q_lens, (0, seqs), mode="edge"),
        np.pad(kv_lens, (0, seqs)),
    )
    return dataclasses.replace(batch, **dict(zip(("q", "kv_pages", "page_table", "cu_q_lens", "kv_lens"), arrays, strict=True)))


@dataclasses.dataclass(frozen=True)
class AttentionPtx:
    """The kernels of one program and what plans for it."""

    kernels: dict[str, Kernel]
    planner: WorkPlanner
    case: Case
    shape: Shape

    @staticmethod
    def tiles_of(heads: Heads, max_q_len: int) -> Tiles:
        """The tiles that the program is compiled with."""
        return dataclasses.replace(ShippedPtx.tiles_of(heads, max_q_len), stages=STAGES, chunk=CHUNK)

    @classmethod
    def compile(
        cls, compiler: KernelCompiler, case: Case, shape: Shape, *, num_ctas: int = 3, split_q_len: int = 1
    ) -> AttentionPtx:
        """The program of `case`'s heads, pages and options in this shape."""
        heads = case.heads
        max_q_len = min(case.max_q_len or shape.tokens, shape.tokens)
        planner = Planner.make(
            num_tokens=shape.tokens,
            num_seqs=shape.seqs,
            max_q_len=max_q_len,
            num_query_heads=heads.N,
            num_kv_heads=heads.K,
            head_dim=heads.H,
            max_kv_len=shape.columns * case.page_size,
            sliding_window=case.sliding_window,
            split_q_len=split_q_len,
            num_ctas=num_ctas,
            tiles=cls.tiles_of(heads, max_q_len),
        )

        def attention(*args: Any) -> Any:
            *arrays, packed = args
            return ragged_paged_attention(*arrays, **case.options, backend="mosaic_sm90", work=planner.work(packed))

        pages = array(shape.pages, 2, heads.K, case.page_size, heads.H, dtype=case.dtype)
        lens = (array(shape.seqs, shape.columns), array(shape.seqs + 1), array(shape.seqs))
        args = (array(shape.tokens, heads.N, heads.H, dtype=case.dtype), pages, *lens, array(planner.size))
        return cls(compiler.compile(case.name, attention, args), planner, case, shape)

    def run(self, batch: Batch, *, longer: int = 0, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(out [T, N, H], the instructions of each kernel that ran). longer: by how many positions the plan passes the KV."""
        q, _, _, cu_q_lens, _ = arrays = [np.asarray(x) for x in batch.arrays]
        shape, packed = self.planner.shape, self._plan(batch, longer)
        outputs = [nothing(q.shape, q.dtype)]
        if JOIN in self.kernels:
            heads = self.case.heads
            M, rows = shape.num_slots * heads.K, shape.split_q_len * (heads.N // heads.K)
            outputs += [nothing((M, rows, heads.H), np.float32), nothing((M, 2, ROWS), np.float32)]
        first = self._launch(ATTENTION, [*arrays, packed, *outputs], seed)
        covered = {ATTENTION: first.covered}
        out = first.arrays[6]
        if JOIN in self.kernels:
            second = self._launch(JOIN, [out, *first.arrays[7:], packed, cu_q_lens], seed)
            covered[JOIN], out = second.covered, second.arrays[0]
        return out, covered

    def _plan(self, batch: Batch, longer: int) -> np.ndarray:
        """The batch's work list. longer: by how many positions it passes the KV."""
        q_lens, kv_lens = np.diff(np.asarray(batch.cu_q_lens)), np.asarray(batch.kv_lens)
        planned = np.where(q_lens > 0, np.minimum(kv_lens + longer, self.planner.shape.max_kv_len), kv_lens)
        return self.planner.plan(q_lens, planned, least_kv_lens=kv_lens)

    def _launch(self, name: str, arrays: list[np.ndarray], seed: int):
        kernel = self.kernels[name]
        try:
            return run(kernel.program, kernel.launch, arrays, seed=seed)
        except PtxError as error:
            raise PtxError(f"{name}, seed {seed}: {error}") from None


class ShippedPtx(AttentionPtx):
    """The kernels of one program in the tiles that an untuned Hopper GPU runs."""

    @staticmethod
    def tiles_of(heads: Heads, max_q_len: int) -> Tiles:
        """As `AttentionPtx.tiles_of`."""
        return choose_tiles(head_dim=heads.H, group=heads.N // heads.K, max_q_len=max_q_len, device_kind="")


def nothing(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """NaN in every element."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(b"\xff" * size, dtype).reshape(shape)
