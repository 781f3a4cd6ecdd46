"""The tile sizes of the Mosaic kernel: a frozen config that checks itself and its shared memory, and the choice of one.

A heuristic chooses; a tuned table of the device, `tuned/<device>.json`, overrides it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from kernels import gpu
from kernels.ragged_paged_attention.logits import ROWS
from kernels.ragged_paged_attention.work_list import BLOCK

TUNED = Path(__file__).with_name("tuned")
# Where several consumers compute, warpgroups trade registers (setmaxnreg) within what their block has at launch, not what the SM
# has: one that asks for more than the others gave up waits for ever. Consumers -> registers a thread (of a consumer, of the
# producer), in multiples of 8.
REGISTERS = {2: (240, 24), 3: (160, 24), 4: (112, 24)}
for _consumers, (_consumer, _producer) in REGISTERS.items():
    assert _consumers * _consumer + _producer <= (_consumers + 1) * (gpu.MAX_REGISTERS // ((_consumers + 1) * 128) // 8 * 8)
PIECE = 32  # columns of joined rows that are in registers at a time
_RESERVED_BYTES = 2048  # barriers, and alignment of the buffers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """consumers: warpgroups that compute, a tile of 64 rows each over the same KV. stages: blocks of 64 KV positions in the ring.
    chunk: positions between softmax restarts; rows agree in every bit between programs of the same chunk, so it should not
    differ between the buckets of an engine.

    Raises ValueError for values out of range.
    """

    consumers: int
    stages: int
    chunk: int = 512

    def __post_init__(self):
        if self.consumers not in (1, *REGISTERS):
            raise ValueError(f"tiles: consumers={self.consumers} must be 1 to 4")
        if self.stages < 3:
            raise ValueError(f"tiles: stages={self.stages} must be at least 3")
        if self.chunk < BLOCK or self.chunk % BLOCK:
            raise ValueError(f"tiles: chunk={self.chunk} must be a multiple of {BLOCK} positions")

    def tile_tokens(self, group: int, max_q_len: int) -> int:
        """Query tokens of a tile, for `group` query heads a KV head."""
        return self.consumers * self.consumer_tokens(group, max_q_len)

    def consumer_tokens(self, group: int, max_q_len: int) -> int:
        """Query tokens of one consumer's rows."""
        return min(ROWS // group, max_q_len)

    def smem_bytes(self, head_dim: int) -> int:
        """Shared memory of a CTA: the ring, queries as loaded and as wgmma reads them (16 bits each), and accumulators, maxima and
        totals of the chunks so far, in whose memory outputs and partial results lie too."""
        tile = ROWS * head_dim * 2
        consumer = 4 * tile + 2 * ROWS * 4
        return self.stages * 2 * BLOCK * head_dim * 2 + self.consumers * consumer + _RESERVED_BYTES

    def check_smem(self, head_dim: int) -> None:
        """ValueError if a CTA needs more shared memory than there is."""
        need = self.smem_bytes(head_dim)
        if need > gpu.MAX_SMEM_BYTES:
            raise ValueError(f"{self} needs {need} bytes of shared memory for {head_dim=}, there are {gpu.MAX_SMEM_BYTES}")


def choose_tiles(*, head_dim: int, group: int, max_q_len: int, device_kind: str) -> Tiles:
    """The tuned tiles of this device where there are any, else: one consumer where its rows hold every query (decodes, drafts), and
    as many stages as fit. A second consumer halves the KV traffic from the L2 cache of a prefill and would have no rows there. At
    head_dim 64 two more have the registers that they need."""
    decode = max_q_len * group <= ROWS
    tuned = _tuned(device_kind).get(f"head_dim={head_dim} {'decode' if decode else 'prefill'}")
    if tuned is not None:
        return Tiles(**tuned)
    if decode:
        return Tiles(consumers=1, stages=4 if head_dim > 64 else 8)
    if head_dim > 64:
        return Tiles(consumers=2, stages=3)
    return Tiles(consumers=min(4, -(-max_q_len // (ROWS // group))), stages=5)


@functools.cache
def _tuned(device_kind: str) -> dict[str, dict[str, int]]:
    """{"head_dim=128 decode": {"consumers": 1, ...}, ...} of this device; {} where it was never tuned."""
    path = TUNED / f"{device_kind.lower().replace(' ', '_')}.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text())["tiles"]
