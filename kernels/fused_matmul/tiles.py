"""The tile sizes of the Mosaic kernel, and the choice of one. Whatever is chosen, an element's bits are the same."""

from __future__ import annotations

import dataclasses
import math

from kernels import gpu

ROWS = 64  # of a consumer: what one warpgroup computes
BLOCK_K = 64  # of the sum: what one stage holds
COLUMNS = (32, 64, 128)  # of a block
# What the choice weighs, in cycles of an SM: of a stage's wgmmas, of reading it from the L2 cache, of a tile's end. Estimates.
_CYCLES_A_COLUMN = 2  # 64 rows x 64 of the sum x 1 column, at 2,048 multiply-adds a cycle
_BYTES_A_CYCLE = 48
_CYCLES_A_TILE = 1500
_RESERVED_BYTES = 2048  # barriers, and alignment of the buffers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """consumers: warpgroups that compute, 64 rows each. columns: of a block; blocks: of a tile, one beside the other; where
    gated, one of gates and one of what they gate, of which one block is made. stages: of the ring.

    Raises ValueError for values out of range.
    """

    consumers: int
    columns: int
    blocks: int
    stages: int
    gated: bool = False

    def __post_init__(self):
        for name, values in (("consumers", (1, 2)), ("columns", COLUMNS), ("blocks", (1, 2))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {', '.join(map(str, values))}")
        if self.gated and self.blocks != 2:
            raise ValueError(f"blocks={self.blocks} must be 2 where gated")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.smem_bytes > gpu.MAX_SMEM_BYTES:
            raise ValueError(f"{self} needs {self.smem_bytes} bytes of shared memory, a CTA may have {gpu.MAX_SMEM_BYTES}")

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.consumers * ROWS

    @property
    def stage_bytes(self) -> int:
        """Of one stage: rows, columns and a part of the norm's scale."""
        return 2 * BLOCK_K * (self.rows + self.blocks * self.columns + 1)

    @property
    def smem_bytes(self) -> int:
        """Of a CTA: the ring, and the tile as it leaves."""
        return self.stages * self.stage_bytes + 2 * self.rows * self.out_blocks * self.columns + _RESERVED_BYTES

    @property
    def out_blocks(self) -> int:
        """Blocks of columns that leave a tile."""
        return 1 if self.gated else self.blocks

    def check(self, num_columns: int, *, gated: bool) -> None:
        """ValueError if these are not tiles of a matrix of so many columns."""
        if self.gated != gated:
            raise ValueError(f"{self} has gated={self.gated}, and the product's {gated}")
        if num_columns % (self.blocks * self.columns):
            raise ValueError(f"tiles of {self.blocks * self.columns} columns do not divide {num_columns}")

    def num_tiles(self, num_rows: int, num_columns: int) -> int:
        """num_columns: of the weights."""
        return math.ceil(num_rows / self.rows) * (num_columns // (self.blocks * self.columns))

    def cycles(self, num_rows: int, depth: int, num_columns: int, num_sms: int) -> float:
        """An estimate of the kernel's time. depth: terms of each sum."""
        loads = self.stage_bytes - 2 * BLOCK_K * (self.rows - min(self.rows, num_rows))
        stage = max(_CYCLES_A_COLUMN * self.consumers * self.blocks * self.columns, loads / _BYTES_A_CYCLE)
        turns = math.ceil(self.num_tiles(num_rows, num_columns) / num_sms)
        return turns * (depth // BLOCK_K * stage + _CYCLES_A_TILE)


def choose_tiles(num_rows: int, depth: int, num_columns: int, *, gated: bool, num_sms: int) -> Tiles:
    """The tiles that the estimate prefers: large ones where there are many rows, and where there are few, as many as keep the SMs
    at work. Raises ValueError if no tile fits."""
    found = fitting_tiles(num_rows, num_columns, gated=gated)
    if not found:
        raise ValueError(f"{num_columns=} must be a multiple of {COLUMNS[0] * (2 if gated else 1)}")
    return min(found, key=lambda tiles: tiles.cycles(num_rows, depth, num_columns, num_sms))


def fitting_tiles(num_rows: int, num_columns: int, *, gated: bool) -> list[Tiles]:
    """All tiles of a product, each with as many stages as fit; two consumers where one does not hold all rows."""
    found = []
    for consumers in (2, 1):
        for columns in COLUMNS:
            for blocks in (2,) if gated else (1, 2):
                if num_columns % (columns * blocks) == 0 and (consumers == 1 or num_rows > ROWS):
                    found.append(_deepest(consumers, columns, blocks, gated))
    return found


def _deepest(consumers: int, columns: int, blocks: int, gated: bool) -> Tiles:
    """As many stages as fit, up to 8."""
    two = Tiles(consumers, columns, blocks, 2, gated)
    return dataclasses.replace(two, stages=min(8, 2 + (gpu.MAX_SMEM_BYTES - two.smem_bytes) // two.stage_bytes))
