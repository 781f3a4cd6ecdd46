"""The grouped matmul by mma.sync and cp.async, for every NVIDIA GPU from sm_80 on: a CTA a tile of rows and block of columns.

The kernel reads the table of tiles that `layout` made on the device, so that routing never visits the host. It gave right values on
an H100; for other cards its PTX is run on a CPU.

A CTA is one warpgroup, whose four warps have 16 rows each of a tile of 64. All of them load: 64 columns of the tile's rows and of
their group's matrix at a time, `stages` - 1 of these ahead. One barrier a step: behind it every thread's copies have come, and
nobody reads the slot that is loaded next. A CTA whose tile has no rows ends at once. Rows behind a tile's own are zeros in shared
memory, and are not stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import gpu, gpu_threads
from kernels.gpu_threads import Rows
from kernels.grouped_matmul.layout import Groups
from kernels.grouped_matmul.mosaic_layout import lay_out as lay_out

ROWS = 64  # of a tile: what one warpgroup computes
PIECE = 64  # columns of an accumulator's piece, and of x at a time


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes. Raises ValueError where they do not fit the kernel or a CTA's shared memory on this device."""

    block_columns: int = 128
    stages: int = 4  # blocks in shared memory, one of which is computed

    def __post_init__(self):
        if self.block_columns < PIECE or self.block_columns % PIECE:
            raise ValueError(f"block_columns={self.block_columns} must be a multiple of {PIECE}")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        limit = gpu.max_smem_bytes()
        if self.smem_bytes > limit:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, a CTA may have {limit}")

    @property
    def smem_bytes(self) -> int:
        return 2 * self.stages * (ROWS + self.block_columns) * PIECE


def block_rows(num_tokens: int, num_choices: int, num_groups: int) -> int:
    """Rows a tile."""
    return ROWS


def lacks(w: jax.Array) -> str | None:  # [E, D, F]
    """What these weights lack for the kernel, or this device; None if nothing."""
    columns = Config.block_columns
    if w.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weights in bfloat16 or float16, found {w.dtype}"
    if w.shape[1] % PIECE or w.shape[2] % columns:
        return f"weights [E, D, F] with D a multiple of {PIECE} and F of {columns}, found {list(w.shape)}"
    return gpu.missing_for_mma()


def matmul(
    x: jax.Array,  # [M, D]
    w: jax.Array,  # [E, D, F]
    groups: Groups,
    *,
    config: Config | None = None,
) -> jax.Array:  # [M, F]
    """Rows of no group may hold anything, NaN included. See api for the arguments."""
    config = config or Config()
    M, F, C = x.shape[0], w.shape[2], config.block_columns
    if groups.block_rows != ROWS:
        raise ValueError(f"mosaic_portable has tiles of {ROWS} rows, these groups were planned for {groups.block_rows}")

    def portable_grouped_matmul(*refs):
        _tile(config, *refs)

    return gpu.kernel(
        portable_grouped_matmul,
        out_type=jax.ShapeDtypeStruct((M, F), x.dtype),
        grid={"tile": groups.tile_group.shape[0], "column": F // C},
        scratch_types=[
            gpu.SMEM((config.stages, ROWS, PIECE), x.dtype, transforms=gpu_threads.tiles(PIECE)),
            gpu.SMEM((config.stages, PIECE, C), x.dtype, transforms=gpu_threads.tiles(C)),
        ],
    )(groups.tile_group, groups.tile_row, groups.tile_rows, x, w)


def _tile(
    config: Config,
    tile_group,  # GMEM i32[W]
    tile_row,  # GMEM i32[W]
    tile_rows,  # GMEM i32[W]
    x,  # GMEM [M, D]
    w,  # GMEM [E, D, F]
    out,  # GMEM [M, F]
    x_smem,  # SMEM [stages, 64, 64]
    w_smem,  # SMEM [stages, 64, block_columns]
) -> None:
    """One CTA: a tile's rows times block_columns columns of its group's matrix."""
    tile, column = lax.axis_index("tile"), lax.axis_index("column") * config.block_columns
    num_rows, num_steps = tile_rows[tile], x.shape[1] // PIECE

    @pl.when(num_rows > 0)
    def _():
        row, first_row = tile_row[tile], tile_group[tile] * x.shape[1]

        def load(step):
            slot = lax.rem(step, jnp.int32(config.stages))
            gpu_threads.copy_rows(x, x_smem.at[slot], Rows(row, num_rows, step * PIECE))
            gpu_threads.copy_rows(w, w_smem.at[slot], Rows(first_row + step * PIECE, PIECE, column))

        def fold(step, pieces):
            gpu_threads.wait_copies(config.stages - 2)
            gpu_threads.barrier()
            following = step + (config.stages - 1)
            pl.when(following < num_steps)(lambda: load(following))
            gpu_threads.commit_copies()
            slot = lax.rem(step, jnp.int32(config.stages))
            left = gpu.load(x_smem.at[slot], layout=gpu.MMA_LHS)
            return tuple(
                gpu.mma(piece, left, gpu.load(w_smem.at[slot, :, pl.ds(i * PIECE, PIECE)], layout=gpu.MMA_RHS))
                for i, piece in enumerate(pieces)
            )

        for step in range(config.stages - 1):
            if step < num_steps:
                load(jnp.int32(step))
            gpu_threads.commit_copies()
        zeros = gpu.layout_cast(jnp.zeros((ROWS, PIECE), jnp.float32), gpu.WGMMA)
        pieces = lax.fori_loop(0, num_steps, fold, (zeros,) * (config.block_columns // PIECE))
        for i, piece in enumerate(pieces):
            gpu_threads.store_rows(piece.astype(out.dtype), out, Rows(row, num_rows, column + i * PIECE))
