"""The fused matmul for Hopper (compute capability 9.0) in Pallas Mosaic GPU: one persistent kernel, TMA in, wgmma, TMA out.

A CTA is one or two consumer warpgroups, which compute 64 rows each, and a producer warpgroup, which issues the loads: 64 terms of
the sum at a time, through a ring that runs on from one tile to the next. A tile is the consumers' rows and one or two blocks of
columns: neighbours, or a block of gates and the block that they gate. Rows vary fastest, so that a matrix is read once.

Every element is one sum over K in one order, 16 terms a wgmma, whatever the tile, so that its bits do not depend on the bucket.

A wgmma has a consumer's rows from registers. Where rows are normed, they are loaded a stage ahead, multiplied by the norm's scale,
and their squares are added to the rows' sums of them. The factor 1 / rms(row) is the same for all terms of a row's sums: it is
multiplied in at the end.

Barriers, who arrives and who waits:
- full[slot]: the loads of a stage arrive; consumers wait. empty[slot]: a consumer done with the stage; the producer waits.
- residual: the load of what is added arrives; the consumer that issued it waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu, gpu_threads
from kernels.fused_matmul.tiles import BLOCK_K, ROWS, Tiles, choose_tiles

ROW_ALIGN = 8  # what a TMA into swizzled shared memory needs
REGISTERS = (240, 24)  # of a consumer and of the producer beside two, a thread


def lacks(*, depth: int, num_columns: int, gated: bool, dtype: Any) -> str | None:
    """What the kernel lacks for these weights [depth, num_columns], or this device for the kernel; None if it can."""
    unit = 64 if gated else 32
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}: it has bfloat16"
    if depth % BLOCK_K or num_columns % unit:
        return f"weights [{depth}, {num_columns}]: it has multiples of {BLOCK_K} and {unit}"
    missing = gpu.missing_for_sm90()
    return None if missing is None else f"a device: it needs {missing}"


class _Refs(NamedTuple):
    """The kernel's arguments in GMEM."""

    x: Any  # [T, D]
    w: Any  # [D, F]
    scale: Any  # [D] or None
    bias: Any  # [F] or None
    residual: Any  # [T, F] or None
    out: Any  # [T, F], or [T, F / 2] of a gated one


class _Scratch(NamedTuple):
    """The kernel's shared memory."""

    x: Any  # [stages, consumers, 64, BLOCK_K]
    w: Any  # [stages, blocks, BLOCK_K, columns]
    out: Any  # [consumers, blocks or 1, 64, columns]
    full: Any
    empty: Any
    scale: Any = None  # [stages, BLOCK_K]
    residual: Any = None  # a barrier a consumer
    left: Any = None  # [consumers, 64, BLOCK_K], where interpreted


class _Plan(NamedTuple):
    """What is the same for every tile."""

    tiles: Tiles
    num_rows: int
    depth: int
    num_ctas: int
    num_tiles: int
    eps: float

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.depth // BLOCK_K

    @property
    def row_tiles(self) -> int:
        return -(-self.num_rows // self.tiles.rows)

    @property
    def copy_rows(self) -> int:
        """Rows of a consumer that are loaded and stored: those past the batch's end are not."""
        return min(ROWS, self.num_rows)

    def place(self, tile: Any) -> tuple[Any, Any]:
        """A tile's first row, and which of the columns it has."""
        n = jnp.int32(self.row_tiles)
        return pl.multiple_of(lax.rem(tile, n) * self.tiles.rows, ROWS), lax.div(tile, n)


def matmul(
    x: jax.Array,  # [T, D]
    w: jax.Array,  # [D, F]
    scale: jax.Array | None,  # [D]
    bias: jax.Array | None,  # [F]
    residual: jax.Array | None,  # [T, F]
    *,
    eps: float,
    gated: bool,
    tiles: Tiles | None = None,
    num_ctas: int | None = None,
) -> jax.Array:  # [T, F], or [T, F / 2]
    """See api.fused_matmul. num_ctas: at most; None is one an SM. Raises ValueError for tiles that are not for this product."""
    T, (D, F) = x.shape[0], w.shape
    padded = -(-T // ROW_ALIGN) * ROW_ALIGN
    if padded != T:
        x = jnp.pad(x, ((0, padded - T), (0, 0)))
        residual = None if residual is None else jnp.pad(residual, ((0, padded - T), (0, 0)))
    num_ctas = num_ctas or gpu.num_sms()
    tiles = tiles or choose_tiles(padded, D, F, gated=gated, num_sms=num_ctas)
    tiles.check(F, gated=gated)
    num_tiles = tiles.num_tiles(padded, F)
    plan = _Plan(tiles, padded, D, min(num_tiles, num_ctas), num_tiles, eps)
    given = [y is not None for y in (scale, bias, residual)]
    scratch = _scratch(plan, x.dtype, scale is not None, residual is not None)

    def fused_matmul(*args):
        refs, smem = _unpack(args, given, list(scratch))
        warpgroup = lax.axis_index("warpgroup")
        trade = tiles.consumers > 1 and not gpu.is_interpreted()

        @pl.when(warpgroup == tiles.consumers)
        def _():
            if trade:
                gpu.set_max_registers(REGISTERS[1], action="decrease")
            _produce(plan, refs, smem)

        @pl.when(warpgroup < tiles.consumers)
        def _():
            if trade:
                gpu.set_max_registers(REGISTERS[0], action="increase")
            _consume(plan, refs, smem, warpgroup)

    out = gpu.kernel(
        fused_matmul,
        out_type=jax.ShapeDtypeStruct((padded, F // 2 if gated else F), x.dtype),
        grid={"cta": plan.num_ctas},
        scratch_types=list(scratch.values()),
        warpgroups=tiles.consumers + 1,
    )(*(y for y in (x, w, scale, bias, residual) if y is not None))
    return out[:T]


def _scratch(plan: _Plan, dtype: Any, has_scale: bool, has_residual: bool) -> dict[str, Any]:
    """The fields of _Scratch that this kernel needs, and what they are."""
    t = plan.tiles
    transforms = gpu_threads.tiles(t.columns)
    scratch = {
        "x": gpu.SMEM((t.stages, t.consumers, ROWS, BLOCK_K), dtype, transforms=gpu.SWIZZLED),
        "w": gpu.SMEM((t.stages, t.blocks, BLOCK_K, t.columns), dtype, transforms=transforms),
        "out": gpu.SMEM((t.consumers, t.out_blocks, ROWS, t.columns), dtype, transforms=transforms),
        "full": gpu.Barrier(num_arrivals=t.consumers + t.blocks + has_scale, num_barriers=t.stages),
        "empty": gpu.Barrier(num_arrivals=t.consumers, num_barriers=t.stages),
    }
    if has_scale:
        scratch["scale"] = gpu.SMEM((t.stages, BLOCK_K), dtype)
    if gpu.is_interpreted():
        scratch["left"] = gpu.SMEM((t.consumers, ROWS, BLOCK_K), dtype, transforms=gpu.SWIZZLED)
    if has_residual:
        scratch["residual"] = gpu.Barrier(num_arrivals=t.blocks, num_barriers=t.consumers)
    return scratch


def _unpack(args: Any, given: list[bool], names: list[str]) -> tuple[_Refs, _Scratch]:
    """The kernel's arguments by name."""
    rest = list(args)
    x, w = rest.pop(0), rest.pop(0)
    scale, bias, residual = (rest.pop(0) if is_there else None for is_there in given)
    return _Refs(x, w, scale, bias, residual, rest.pop(0)), _Scratch(**dict(zip(names, rest, strict=True)))


def _columns(plan: _Plan, refs: _Refs, column: Any, block: int) -> Any:
    """Where a block's columns lie in the weights."""
    C = plan.tiles.columns
    if plan.tiles.gated:
        return pl.ds(pl.multiple_of(column * C + block * refs.out.shape[1], C), C)
    return pl.ds(pl.multiple_of((column * plan.tiles.blocks + block) * C, C), C)


def _produce(plan: _Plan, refs: _Refs, smem: _Scratch) -> None:
    """Loads every tile's stages, in order, as the ring has room."""
    t = plan.tiles

    def load_tile(tile, slot):
        row, column = plan.place(tile)

        def load_stage(k, slot):
            terms = pl.ds(pl.multiple_of(k * BLOCK_K, BLOCK_K), BLOCK_K)
            full = smem.full.at[slot]
            gpu.barrier_wait(smem.empty.at[slot])
            for block in range(t.blocks):
                gpu.copy_gmem_to_smem(refs.w.at[terms, _columns(plan, refs, column, block)], smem.w.at[slot, block], full)
            for me in range(t.consumers):
                rows = pl.ds(row + me * ROWS, plan.copy_rows)
                gpu.copy_gmem_to_smem(refs.x.at[rows, terms], smem.x.at[slot, me, pl.ds(0, plan.copy_rows)], full)
            if refs.scale is not None:
                gpu.copy_gmem_to_smem(refs.scale.at[terms], smem.scale.at[slot], full)
            return _next(plan, slot)

        return lax.fori_loop(0, plan.steps, load_stage, slot)

    _each_tile(plan, load_tile)
    for slot in range(t.stages):  # every phase of a barrier must be seen before the kernel ends
        gpu.barrier_wait(smem.empty.at[slot])


def _each_tile(plan: _Plan, body: Any) -> None:
    """body(tile, slot) -> slot for every tile of this CTA. slot: of the ring, where the tile's first stage is."""
    cta = lax.axis_index("cta")
    turns = lax.div(plan.num_tiles - cta + (plan.num_ctas - 1), jnp.int32(plan.num_ctas))
    lax.fori_loop(0, turns, lambda i, slot: body(cta + i * plan.num_ctas, slot), jnp.int32(0))


def _next(plan: _Plan, slot: Any) -> Any:
    """The slot of the ring that follows."""
    return jnp.where(slot + 1 == plan.tiles.stages, 0, slot + 1)


def _consume(plan: _Plan, refs: _Refs, smem: _Scratch, me: Any) -> None:
    """Computes 64 rows of every tile. `me`: which consumer this is."""
    t = plan.tiles
    out = smem.out.at[me]

    def compute_tile(tile, slot):
        row, column = plan.place(tile)
        row += me * ROWS
        gpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left `out`
        if refs.residual is not None:
            for block in range(t.blocks):
                there = refs.residual.at[pl.ds(row, plan.copy_rows), _columns(plan, refs, column, block)]
                gpu.copy_gmem_to_smem(there, out.at[block, pl.ds(0, plan.copy_rows)], smem.residual.at[me])
        sums, slot = _sums(plan, refs, smem, me, slot)
        if refs.bias is not None:
            sums = [y + _bias(plan, refs, column, block, y.shape) for block, y in enumerate(sums)]
        if refs.residual is not None:
            gpu.barrier_wait(smem.residual.at[me])
            sums = [y + gpu.load(out.at[b], layout=gpu.WGMMA).astype(jnp.float32) for b, y in enumerate(sums)]
        if t.gated:
            gate, up = sums
            sums = [gate / (1 + jnp.exp(-gate)) * up]
        for block, y in enumerate(sums):
            out.at[block][...] = y.astype(refs.out.dtype)
        gpu.commit_smem()
        for block in range(t.out_blocks):
            columns = pl.ds(pl.multiple_of((column * t.out_blocks + block) * t.columns, t.columns), t.columns)
            gpu.copy_smem_to_gmem(out.at[block, pl.ds(0, plan.copy_rows)], refs.out.at[pl.ds(row, plan.copy_rows), columns])
        return slot

    for slot in range(t.stages):
        gpu.barrier_arrive(smem.empty.at[slot])
    _each_tile(plan, compute_tile)
    gpu.wait_smem_to_gmem(0)


def _bias(plan: _Plan, refs: _Refs, column: Any, block: int, shape: tuple[int, ...]) -> Any:
    """A block's part of the bias, f32[64, columns]."""
    bias = gpu.load(refs.bias.at[_columns(plan, refs, column, block)], layout=gpu.WGMMA_COLUMN, optimized=False)
    return lax.broadcast_in_dim(bias.astype(jnp.float32), shape, [1])


def _sums(plan: _Plan, refs: _Refs, smem: _Scratch, me: Any, slot: Any) -> tuple[list[Any], Any]:
    """(the products of a tile's rows and each of its blocks of columns, f32[64, columns], the ring's slot after them)."""
    t = plan.tiles
    accumulators = [gpu.ACC((ROWS, t.columns), jnp.float32) for _ in range(t.blocks)]

    def scoped(*accs):
        slot_after, squares = _walk(plan, smem, me, slot, accs)
        sums = [acc[...] for acc in accs]
        if squares is not None:
            factor = lax.rsqrt(squares * (1 / plan.depth) + plan.eps)
            sums = [y * lax.broadcast_in_dim(factor, y.shape, [0]) for y in sums]
        return sums, slot_after

    return pl.run_scoped(scoped, *accumulators)


def _walk(plan: _Plan, smem: _Scratch, me: Any, slot: Any, accs: Any) -> tuple[Any, Any]:
    """Adds up a tile's products. Returns (the slot after the tile's stages, the sums of the rows' squares f32[64], None where there
    is no norm)."""
    normed = smem.scale is not None

    def load(slot):
        return gpu.load(smem.x.at[slot, me], layout=gpu.WGMMA)

    def take(slot):
        """What is read of a stage before the wgmmas of the stage before have ended: the rows and their scale, or nothing."""
        gpu.barrier_wait(smem.full.at[slot])
        return (load(slot), gpu.load(smem.scale.at[slot], layout=gpu.WGMMA_COLUMN, optimized=False)) if normed else ()

    def multiply(taken, slot, squares):
        # What a wgmma reads must not be written before it has ended: made here, not a stage ahead.
        x = taken[0] if normed else load(slot)
        a = x * lax.broadcast_in_dim(taken[1], x.shape, [1]) if normed else x
        if smem.left is not None:  # the interpreter wants both operands in shared memory
            smem.left.at[me][...] = a
            gpu.commit_smem()
            a = smem.left.at[me]
        for block, acc in enumerate(accs):
            gpu.wgmma(acc, a, smem.w.at[slot, block])
        if not normed:
            return None
        x = x.astype(jnp.float32)
        return squares + (x * x).sum(axis=1)

    def release(slot):
        gpu.wgmma_wait(0)
        gpu_threads.order_before_tma()
        gpu.barrier_arrive(smem.empty.at[slot])

    def stage(k, carry):
        slot, taken, squares = carry
        following = _next(plan, slot)
        squares = multiply(taken, slot, squares)
        taken = take(following)
        release(slot)
        return following, taken, squares

    none = None if not normed else gpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), gpu.WGMMA_ROW)
    slot, taken, squares = lax.fori_loop(0, plan.steps - 1, stage, (slot, take(slot), none))
    squares = multiply(taken, slot, squares)
    release(slot)
    return _next(plan, slot), squares
