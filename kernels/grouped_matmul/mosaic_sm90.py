"""The grouped matmul on Hopper (compute capability 9.0): a CTA a tile of rows and block of columns, TMA in, wgmma, TMA out.

The kernel reads the table of tiles that `layout` made on the device, so that routing never visits the host. It is not yet timed on
a GPU; what it compiles to is checked without one.

A CTA whose tile has no rows ends at once. Others load `block_k` columns of their rows and of their group's matrix at a time,
several loads ahead. Columns vary fastest, so that CTAs that run together share rows, and the tiles of one group their matrix, in
L2. A tile's loads may reach into the next group's rows, whose products are not stored: rows leave by powers of two, since a TMA's
shape is static.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import gpu
from kernels.grouped_matmul.layout import ROW_ALIGN, Groups
from kernels.grouped_matmul.mosaic_layout import lay_out as lay_out


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes. Raises ValueError where wgmma can't have them or they need more shared memory than a CTA may have."""

    block_rows: int = 64
    block_columns: int = 128
    block_k: int = 64
    stages: int = 4  # loads in flight

    def __post_init__(self):
        for name, unit in (("block_rows", 64), ("block_columns", 64), ("block_k", 64), ("stages", 1)):
            if getattr(self, name) < unit or getattr(self, name) % unit:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {unit}")
        if self.block_rows & (self.block_rows - 1):
            raise ValueError(f"block_rows={self.block_rows} must be a power of two: rows are stored by powers of two")
        if self.smem_bytes > gpu.MAX_SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, a CTA may have {gpu.MAX_SMEM_BYTES}")

    @property
    def smem_bytes(self) -> int:
        stage = (self.block_rows + self.block_columns) * self.block_k
        return 2 * (self.stages * stage + self.block_rows * self.block_columns) + 16 * self.stages


def block_rows(num_tokens: int, num_choices: int, num_groups: int) -> int:
    """Rows a tile: 128 (154 registers, 160 KB: one CTA an SM) where a group's average share fills it, else 64 (90 registers,
    112 KB: two CTAs an SM), where reading the matrices is what takes time."""
    return 128 if num_tokens * num_choices >= 128 * num_groups else 64


def lacks(w: jax.Array) -> str | None:  # [E, D, F]
    """What these weights lack for the kernel, or this device; None if nothing."""
    config = Config()
    if w.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weights in bfloat16 or float16, found {w.dtype}"
    if w.shape[1] % config.block_k or w.shape[2] % config.block_columns:
        return f"weights [E, D, F] with D a multiple of {config.block_k} and F of {config.block_columns}, found {list(w.shape)}"
    return gpu.missing_for_sm90()


def matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
    *,
    gated: bool = False,
    config: Config | None = None,
) -> jax.Array:  # [M, F], or [M, F / 2]
    """Rows of no group may hold anything, NaN included. See api for the arguments. Where gated, a CTA has half a block of gates and
    half a block of what they gate."""
    config = config or Config(block_rows=groups.block_rows)
    M, F = x.shape[0], w.shape[2]
    R, C = config.block_rows, config.block_columns
    if R != groups.block_rows:
        raise ValueError(f"{config} is not for tiles of {groups.block_rows} rows")

    def grouped_matmul(*refs):
        _tile(config, gated, *refs)

    made = 2 if gated else 1  # columns of the weights for one of the result
    return gpu.kernel(
        grouped_matmul,
        out_type=jax.ShapeDtypeStruct((M, F // made), x.dtype),
        grid={"tile": groups.tile_group.shape[0], "column": F // C},
        scratch_types=[gpu.SMEM((R, C // made), x.dtype, transforms=gpu.SWIZZLED)],
    )(groups.tile_group, groups.tile_row, groups.tile_rows, x, w)


def _tile(
    config: Config,
    gated: bool,
    tile_group,  # GMEM i32[W]
    tile_row,  # GMEM i32[W]
    tile_rows,  # GMEM i32[W]
    x,  # GMEM [M, D]
    w,  # GMEM [E, D, F]
    out,  # GMEM [M, F], or [M, F / 2]
    staged,  # SMEM [block_rows, block_columns], or half the columns
) -> None:
    """One CTA: a tile's rows times block_columns columns of its group's matrix."""
    (R, C), K = staged.shape, config.block_k
    blocks = config.block_columns // C
    tile, column = jax.lax.axis_index("tile"), jax.lax.axis_index("column")
    num_rows = tile_rows[tile]

    @pl.when(num_rows > 0)
    def _():
        row = pl.multiple_of(tile_row[tile], ROW_ALIGN)

        def accumulate(*accs):
            def step(_, x_block, *w_blocks):
                for acc, w_block in zip(accs, w_blocks, strict=True):
                    gpu.wgmma(acc, x_block, w_block)
                gpu.wgmma_wait(blocks)  # the step before has read its blocks, which the pipeline loads into next

            def columns(block):  # of the weights: those of the gates, then those of what they gate
                return column + block * (out.shape[1] // C)

            w_specs = [
                gpu.BlockSpec((K, C), lambda k, b=b: (k, columns(b)), delay_release=1, transforms=gpu.SWIZZLED)
                for b in range(blocks)
            ]
            matrix = w.at[tile_group[tile]]
            gpu.emit_pipeline(
                step,
                grid=(x.shape[1] // K,),
                # delay_release: a block is still being read when the next step's wgmma is issued
                in_specs=[gpu.BlockSpec((R, K), lambda k: (0, k), delay_release=1, transforms=gpu.SWIZZLED), *w_specs],
                max_concurrent_steps=config.stages,
            )(x.at[pl.ds(row, R)], *[matrix] * blocks)
            return [acc[...] for acc in accs]

        sums = pl.run_scoped(accumulate, *[gpu.ACC((R, C))] * blocks)
        y = sums[0] / (1 + jnp.exp(-sums[0])) * sums[1] if gated else sums[0]
        staged[...] = y.astype(staged.dtype)
        gpu.commit_smem()
        _store_rows(staged, out, row, num_rows, pl.ds(column * C, C))
        gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_rows(staged, out, row, num_rows, columns) -> None:
    """staged[:num_rows], rounded up to whole units of ROW_ALIGN rows, which the group owns, to out[row:, columns]."""
    num_rows = (num_rows + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN
    size = staged.shape[0]
    while size >= ROW_ALIGN:
        first = pl.multiple_of(num_rows & -(2 * size), ROW_ALIGN)  # behind the larger powers

        @pl.when((num_rows & size) != 0)
        def _(first=first, size=size):
            rows = pl.ds(pl.multiple_of(row + first, ROW_ALIGN), size)
            gpu.copy_smem_to_gmem(staged.at[pl.ds(first, size)], out.at[rows, columns])

        size //= 2
