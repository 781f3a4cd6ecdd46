"""The sizes of the portable kernel, and its planner: work lists cut for tiles of one warpgroup."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax

from kernels import gpu
from kernels.ragged_paged_attention.logits import ROWS
from kernels.ragged_paged_attention.work_list import BLOCK
from kernels.ragged_paged_attention.work_planner import WorkPlanner

LARGE_HEAD = 128  # past it sequences are not split: registers hold no second accumulator
UNSPLIT_CHUNK = 1 << 24  # positions: a chunk that no sequence passes
_REGISTERS = 256  # of a thread, at most


@dataclasses.dataclass(frozen=True)
class Tiles:
    """stages: blocks in shared memory, one of which is computed. chunk: positions between softmax restarts, a multiple of 64.

    Raises ValueError for values out of range.
    """

    stages: int = 2
    chunk: int = 512

    def __post_init__(self):
        if self.stages < 2:
            raise ValueError(f"tiles: stages={self.stages} must be at least 2")
        if self.chunk < BLOCK or self.chunk % BLOCK:
            raise ValueError(f"tiles: chunk={self.chunk} must be a multiple of {BLOCK} positions")

    def tile_tokens(self, group: int, max_q_len: int) -> int:
        """Query tokens of a tile, for `group` query heads a KV head."""
        return min(ROWS // group, max_q_len)

    consumer_tokens = tile_tokens

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a CTA: the blocks, and the queries."""
        return 2 * head_dim * (2 * self.stages * block_positions(head_dim) + ROWS)

    def check_smem(self, head_dim: int) -> None:
        """ValueError if a CTA needs more shared memory than the device has."""
        need, limit = self.smem_bytes(head_dim), gpu.max_smem_bytes()
        if need > limit:
            raise ValueError(f"{self} needs {need} bytes of shared memory for {head_dim=}, there are {limit}")

    def blocks_per_sm(self, head_dim: int) -> int:
        """CTAs that an SM runs at once."""
        by_smem = (gpu.max_smem_bytes() + 1024) // (self.smem_bytes(head_dim) + 1024)
        return max(1, min(by_smem, gpu.MAX_REGISTERS // (_REGISTERS * 2 * ROWS)))


def block_positions(head_dim: int) -> int:
    """KV positions of a block. With 64 of them registers spill where head_dim is more than 64, and past 128 two blocks and the
    queries would not fit 99 KiB of shared memory."""
    return BLOCK if head_dim <= 64 else BLOCK // 2


class PortablePlanner(WorkPlanner):
    """The planner of one compiled shape for the portable kernel."""

    tiles: Tiles

    @classmethod
    def make(cls, *, head_dim: int, num_ctas: int | None = None, tiles: Any = None, **sizes: Any) -> PortablePlanner:
        """Arguments as `WorkPlanner.make`. num_ctas: None is as many as the device runs at once. tiles: of this module.

        Raises ValueError for tiles of another kernel, and for those that need more shared memory than the device has.
        """
        if tiles is None:
            tiles = Tiles(chunk=Tiles.chunk if head_dim <= LARGE_HEAD else UNSPLIT_CHUNK)
        if not isinstance(tiles, Tiles):
            raise ValueError(f"{tiles=} must be a Tiles of mosaic_portable ({Tiles()}, say), or None, which chooses one")
        if num_ctas is None:
            num_ctas = gpu.num_sms() * tiles.blocks_per_sm(head_dim)
        sizes |= {"head_dim": head_dim, "num_ctas": num_ctas, "tiles": tiles}
        return super().make(**sizes)

    def check_smem(self, head_dim: int) -> None:
        self.tiles.check_smem(head_dim)

    def work(self, packed: jax.Array) -> PortableWork:
        """The work list that `plan` made, i32[size], for `ragged_paged_attention(work=...)`."""
        return PortableWork(packed, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PortableWork:
    """One step's work list on the device."""

    backend: ClassVar[str] = "mosaic_portable"  # whose plan this is

    packed: jax.Array  # i32[planner.size]
    planner: PortablePlanner = dataclasses.field(metadata={"static": True})
