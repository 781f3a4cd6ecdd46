"""Outputs that must be equal in every bit though different programs computed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from kernels.fused_matmul import cases as fused_cases
from kernels.fused_matmul.tiles import BLOCK_K, COLUMNS, Tiles, fitting_tiles
from kernels.grouped_matmul import cases as experts_cases
from kernels.ragged_paged_attention.cases import Batch, Case, Heads
from kernels.rotary_write import cases as rotary_cases
from scripts.ptx.attention import AttentionPtx, Shape, ShippedPtx, padded, shape_of
from scripts.ptx.compiled import Kernel, KernelCompiler
from scripts.ptx.contraction import contractable
from scripts.ptx.experts import ExpertsPtx
from scripts.ptx.fused import FusedPtx
from scripts.ptx.log import digest_of
from scripts.ptx.portable import PortablePtx
from scripts.ptx.rotary import RotaryPtx

HEADS = (Heads(4, 1, 128), Heads(2, 1, 128), Heads(8, 1, 128), Heads(3, 1, 64))  # of Qwen3 8B, 0.6B and 32B, of SmolLM2
PORTABLE_HEADS = (*HEADS, Heads(3, 1, 96))
BUCKETS = (8, 24, 60, 160)  # tokens: one consumer, two of few tokens, two full ones; at head_dim 64 one to four
SEQS = ((1, 130), (5, 70), (2, 64))  # 8 tokens
LONG_SEQS = ((1, 1100), (5, 600), (2, 64))  # past two chunks as they ship
SOFT_CAP = 20.0
FUSED_ROWS = 136  # of the fused matmul: two tiles of two consumers, the second one's hardly used
FEW_STEPS = 5  # of the fused matmul's sum, where few programs are compared
# Columns of the widest tile. So deep that one tile alone goes twice round a ring of eight stages.
FUSED = fused_cases.Case("rows", FUSED_ROWS, 17 * BLOCK_K, 2 * COLUMNS[-1])
# With norms, whose sums are those of a head; and without, where tiles of rows end within a token.
ROTARY_CASES = tuple(
    rotary_cases.Case(f"{N}/{K}x{H}{' with norms' if norm else ''}", 40, N, K, H, 16, norm=norm)
    for N, K, H, norm in ((4, 2, 128, True), (3, 1, 96, True), (9, 3, 64, False))
)


@dataclasses.dataclass(frozen=True)
class Output:
    """What one program computed. ptx: a hash of its kernels. contractable: products and sums of theirs that ptxas may make one, so
    that their bits are not known from the PTX."""

    program: str
    data: bytes
    ptx: str
    contractable: tuple[str, ...]

    @classmethod
    def of(cls, program: str, data: np.ndarray, kernels: dict[str, Kernel]) -> Output:
        """data: of any strides."""
        pairs = (f"{name}: {product} and {taken}" for name, k in kernels.items() for product, taken in contractable(k.program))
        return cls(program, np.ascontiguousarray(data).tobytes(), digest_of(kernels), tuple(pairs))


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The data of all outputs must be equal, and their bits known. wrong: values that are not those of float64."""

    name: str
    outputs: tuple[Output, ...]
    wrong: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        first, *others = self.outputs
        found = [f"{self.name}: {out.program} differs from {first.program}" for out in others if out.data != first.data]
        found += [f"{self.name}: {fault}" for fault in self.wrong]
        for out in self.outputs:
            if out.contractable:
                pairs = f"{len(out.contractable)} products with sums, such as {out.contractable[0]}"
                found.append(f"{self.name}: of {out.program} ptxas may contract {pairs}")
        return found


def agreements(compiler: KernelCompiler, *, few: bool) -> Iterator[Agreement]:
    """Compiles and runs one after the other."""
    for heads in HEADS[:1] if few else PORTABLE_HEADS:
        yield decode_and_prefill(compiler, heads, PortablePtx)
    if not few:
        yield buckets(compiler, HEADS[0], ptx_of=PortablePtx)
        yield from (rotary_rows(compiler, case) for case in ROTARY_CASES)
    if not compiler.hopper:
        return
    for heads in HEADS[:1] if few else HEADS:
        yield decode_and_prefill(compiler, heads)
    for norm, gated in ((True, False),) if few else ((True, False), (True, True), (False, False)):
        yield fused_tiles(compiler, norm=norm, gated=gated, few=few)
    if not few:
        yield from (buckets(compiler, heads) for heads in (*HEADS[:2], HEADS[3]))
        yield from (buckets(compiler, heads, LONG_SEQS, ShippedPtx) for heads in (HEADS[0], HEADS[3]))
        for heads in (HEADS[0], HEADS[3]):  # capped logits have code of their own where a block is masked
            yield decode_and_prefill(compiler, heads, soft_cap=SOFT_CAP)
            yield buckets(compiler, heads, soft_cap=SOFT_CAP)
        yield tile_sizes(compiler)


def decode_and_prefill(
    compiler: KernelCompiler, heads: Heads, ptx_of: type[AttentionPtx] = AttentionPtx, soft_cap: float | None = None
) -> Agreement:
    """The last row of a prefill of 64 tokens, and the same query as a decode whose KV is split over thread blocks and joined."""
    chunk = Case("chunk", ((64, 200),), heads, 64, "bfloat16", padding_tokens=0, padding_seqs=0, soft_cap=soft_cap)
    shape = shape_of([chunk])
    batch = padded(chunk, shape)
    chunks = ptx_of.compile(compiler, chunk, shape)
    prefill, _ = chunks.run(batch)
    decode = dataclasses.replace(chunk, name="decode", seqs=((1, 200),), max_q_len=1)
    one = Batch(batch.q[63:], batch.kv_pages, batch.page_table, jnp.array([0, 1], jnp.int32), batch.kv_lens, keys=(), values=())
    program = ptx_of.compile(compiler, decode, dataclasses.replace(shape, tokens=1))
    row, _ = program.run(one)
    split = program.planner.shape.unpack(program.planner.plan([1], [200]))["num_split"][0]
    if split != 1:
        raise RuntimeError("the decode that is to be compared is not split")
    outputs = Output.of("prefill", prefill[63], chunks.kernels), Output.of("decode", row[0], program.kernels)
    return Agreement(f"{_kind(ptx_of)}decode and prefill of {_name(heads, soft_cap)}", outputs)


def buckets(
    compiler: KernelCompiler,
    heads: Heads,
    seqs: tuple[tuple[int, int], ...] = SEQS,
    ptx_of: type[AttentionPtx] = AttentionPtx,
    soft_cap: float | None = None,
) -> Agreement:
    """One batch of 8 tokens in buckets of several sizes."""
    case = Case("bucket", seqs, heads, 64, "bfloat16", padding_tokens=0, soft_cap=soft_cap)
    least = shape_of([case])
    outputs = []
    for tokens in BUCKETS:
        shape = Shape(tokens, least.seqs + tokens // 24, least.pages + tokens, least.columns)
        program = ptx_of.compile(compiler, case, shape)
        out, _ = program.run(padded(case, shape))
        outputs.append(Output.of(f"the bucket of {tokens} tokens, {program.planner.tiles}", out[:8], program.kernels))
    return Agreement(f"{_kind(ptx_of)}buckets of {_name(heads, soft_cap)}", tuple(outputs))


def fused_tilings(*, gated: bool, few: bool) -> list[tuple[int, Tiles]]:
    """(rows, tiles): every tile of the kernel with its ring, among other rows, and those for eight rows alone. few: one of each."""
    among, alone = (fitting_tiles(rows, FUSED.F, gated=gated) for rows in (FUSED_ROWS, 8))
    wanted = [*((FUSED_ROWS, tiles) for tiles in among), *((8, tiles) for tiles in alone)]
    return [wanted[0], wanted[-1]] if few else wanted


def fused_tiles(compiler: KernelCompiler, *, norm: bool, gated: bool, few: bool) -> Agreement:
    """Eight rows of a fused matmul, alone and among others, in `fused_tilings`."""
    depth = FEW_STEPS * BLOCK_K if few else FUSED.D
    case = dataclasses.replace(FUSED, D=depth, norm=norm, residual=not gated, gated=gated)
    batch = fused_cases.build(case)
    alone = dataclasses.replace(batch, x=batch.x[:8], residual=None if batch.residual is None else batch.residual[:8])
    outputs, wrong = [], []
    for rows, tiles in fused_tilings(gated=gated, few=few):
        program = FusedPtx.compile(compiler, dataclasses.replace(case, T=rows), tiles)
        out, _ = program.run(batch if rows > 8 else alone)
        name = f"{tiles}, {rows} rows"
        outputs.append(Output.of(name, out[:8], {program.kernel.name: program.kernel}))
        wrong += [f"{name}: {fault}" for fault in fused_cases.faults(case, batch if rows > 8 else alone, out)]
    name = f"tiles of the fused matmul{' with norm' if norm else ''}{', gated' if gated else ''}"
    return Agreement(name, tuple(outputs), tuple(wrong))


def tile_sizes(compiler: KernelCompiler) -> Agreement:
    """One grouped matmul in tiles of 64 and of 128 rows."""
    case = next(case for case in experts_cases.CASES if case.name == "float16_deep")
    batch = experts_cases.build(case)
    outputs = []
    for rows in (64, 128):
        program = ExpertsPtx.compile(compiler, case, rows)
        out, _ = program.run(batch)
        outputs.append(Output.of(f"tiles of {rows} rows", out, {program.kernel.name: program.kernel}))
    return Agreement("experts", tuple(outputs))


def rotary_rows(compiler: KernelCompiler, case: rotary_cases.Case) -> Agreement:
    """The first eight tokens of a rotary write, alone and among others: their queries, and what lies in their slots."""
    batch, outputs = rotary_cases.build(case), []
    for tokens in (8, case.T):
        of_tokens = {name: getattr(batch, name)[:tokens] for name in ("qkv", "cos", "sin", "slot_mapping")}
        program = RotaryPtx.compile(compiler, dataclasses.replace(case, T=tokens))
        queries, pages, _ = program.run(dataclasses.replace(batch, **of_tokens))
        slots = batch.slot_mapping[:8]
        rows = pages[slots // case.page_size, :, :, slots % case.page_size]
        data = np.concatenate([queries[:8].reshape(8, -1), rows.reshape(8, -1)], axis=1)
        outputs.append(Output.of(f"{tokens} tokens", data, {program.kernel.name: program.kernel}))
    return Agreement(f"rotary write, {case.name}", tuple(outputs))


def _kind(ptx_of: type[AttentionPtx]) -> str:
    return "portable " if ptx_of is PortablePtx else ""


def _name(heads: Heads, soft_cap: float | None = None) -> str:
    return f"{heads.N}/{heads.K}x{heads.H}{'' if soft_cap is None else f', {soft_cap=}'}"
