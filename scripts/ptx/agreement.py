"""Outputs that must be equal in every bit though different programs computed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from kernels.fused_matmul import cases as fused_cases
from kernels.fused_matmul.tiles import COLUMNS, Tiles, fitting_tiles
from kernels.grouped_matmul import cases as experts_cases
from kernels.ragged_paged_attention.cases import Batch, Case, Heads
from scripts.ptx.attention import AttentionPtx, Shape, ShippedPtx, padded, shape_of
from scripts.ptx.compiled import KernelCompiler
from scripts.ptx.experts import ExpertsPtx
from scripts.ptx.fused import FusedPtx
from scripts.ptx.portable import PortablePtx

HEADS = (Heads(4, 1, 128), Heads(2, 1, 128), Heads(8, 1, 128), Heads(3, 1, 64))  # of Qwen3 8B, 0.6B and 32B, of SmolLM2
PORTABLE_HEADS = (*HEADS, Heads(3, 1, 96))
BUCKETS = (8, 24, 80, 160)  # tokens: one consumer, two of few tokens, two full ones
SEQS = ((1, 130), (5, 70), (2, 64))  # 8 tokens
LONG_SEQS = ((1, 1100), (5, 600), (2, 64))  # past two chunks as they ship
FUSED_ROWS = 136  # of the fused matmul: two tiles of two consumers, the second one's hardly used
FUSED = fused_cases.Case("rows", FUSED_ROWS, 320, 2 * COLUMNS[-1])  # columns of the widest tile


@dataclasses.dataclass(frozen=True)
class Agreement:
    """outputs: (which program, its bytes); all bytes must be equal."""

    name: str
    outputs: tuple[tuple[str, bytes], ...]

    @property
    def faults(self) -> list[str]:
        first, *others = self.outputs
        return [f"{self.name}: {who} differs from {first[0]}" for who, out in others if out != first[1]]


def agreements(compiler: KernelCompiler, *, few: bool) -> Iterator[Agreement]:
    """Compiles and runs one after the other."""
    for heads in HEADS[:1] if few else PORTABLE_HEADS:
        yield decode_and_prefill(compiler, heads, PortablePtx)
    if not compiler.hopper:
        return
    for heads in HEADS[:1] if few else HEADS:
        yield decode_and_prefill(compiler, heads)
    for norm, gated in ((True, False),) if few else ((True, False), (True, True), (False, False)):
        yield fused_tiles(compiler, norm=norm, gated=gated, few=few)
    if not few:
        yield from (buckets(compiler, heads) for heads in (*HEADS[:2], HEADS[3]))
        yield from (buckets(compiler, heads, LONG_SEQS, ShippedPtx) for heads in (HEADS[0], HEADS[3]))
        yield tile_sizes(compiler)


def decode_and_prefill(compiler: KernelCompiler, heads: Heads, ptx_of: type[AttentionPtx] = AttentionPtx) -> Agreement:
    """The last row of a prefill of 64 tokens, and the same query as a decode whose KV is split over thread blocks and joined."""
    chunk = Case("chunk", ((64, 200),), heads, 64, "bfloat16", padding_tokens=0, padding_seqs=0)
    shape = shape_of([chunk])
    batch = padded(chunk, shape)
    prefill, _ = ptx_of.compile(compiler, chunk, shape).run(batch)
    decode = dataclasses.replace(chunk, name="decode", seqs=((1, 200),), max_q_len=1)
    one = Batch(batch.q[63:], batch.kv_pages, batch.page_table, jnp.array([0, 1], jnp.int32), batch.kv_lens, keys=(), values=())
    program = ptx_of.compile(compiler, decode, dataclasses.replace(shape, tokens=1))
    row, _ = program.run(one)
    split = program.planner.shape.unpack(program.planner.plan([1], [200]))["num_split"][0]
    if split != 1:
        raise RuntimeError("the decode that is to be compared is not split")
    kind = "portable " if ptx_of is PortablePtx else ""
    return Agreement(
        f"{kind}decode and prefill of {_name(heads)}", (("prefill", prefill[63].tobytes()), ("decode", row[0].tobytes()))
    )


def buckets(
    compiler: KernelCompiler,
    heads: Heads,
    seqs: tuple[tuple[int, int], ...] = SEQS,
    ptx_of: type[AttentionPtx] = AttentionPtx,
) -> Agreement:
    """One batch of 8 tokens in buckets of several sizes."""
    case = Case("bucket", seqs, heads, 64, "bfloat16", padding_tokens=0)
    least = shape_of([case])
    outputs = []
    for tokens in BUCKETS:
        shape = Shape(tokens, least.seqs + tokens // 24, least.pages + tokens, least.columns)
        program = ptx_of.compile(compiler, case, shape)
        out, _ = program.run(padded(case, shape))
        outputs.append((f"the bucket of {tokens} tokens, {program.planner.tiles}", out[:8].tobytes()))
    return Agreement(f"buckets of {_name(heads)}", tuple(outputs))


def fused_tilings(*, gated: bool, few: bool) -> list[tuple[int, Tiles]]:
    """(rows, tiles): every tile of the kernel with its ring, among other rows, and those for eight rows alone. few: one of each."""
    among, alone = (fitting_tiles(rows, FUSED.F, gated=gated) for rows in (FUSED_ROWS, 8))
    wanted = [*((FUSED_ROWS, tiles) for tiles in among), *((8, tiles) for tiles in alone)]
    return [wanted[0], wanted[-1]] if few else wanted


def fused_tiles(compiler: KernelCompiler, *, norm: bool, gated: bool, few: bool) -> Agreement:
    """Eight rows of a fused matmul, alone and among others, in `fused_tilings`."""
    case = dataclasses.replace(FUSED, norm=norm, residual=not gated, gated=gated)
    batch = fused_cases.build(case)
    alone = dataclasses.replace(batch, x=batch.x[:8], residual=None if batch.residual is None else batch.residual[:8])
    outputs = []
    for rows, tiles in fused_tilings(gated=gated, few=few):
        program = FusedPtx.compile(compiler, dataclasses.replace(case, T=rows), tiles)
        out, _ = program.run(batch if rows > 8 else alone)
        outputs.append((f"{tiles}, {rows} rows", out[:8].tobytes()))
    return Agreement(f"tiles of the fused matmul{' with norm' if norm else ''}{', gated' if gated else ''}", tuple(outputs))


def tile_sizes(compiler: KernelCompiler) -> Agreement:
    """One grouped matmul in tiles of 64 and of 128 rows."""
    case = next(case for case in experts_cases.CASES if case.name == "float16_deep")
    batch = experts_cases.build(case)
    outputs = [(f"tiles of {rows} rows", ExpertsPtx.compile(compiler, case, rows).run(batch)[0]) for rows in (64, 128)]
    return Agreement("experts", tuple((name, np.ascontiguousarray(out).tobytes()) for name, out in outputs))


def _name(heads: Heads) -> str:
    return f"{heads.N}/{heads.K}x{heads.H}"
