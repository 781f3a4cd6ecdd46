"""The race detector: vector clocks over shared memory, and which writes the async proxy sees.

An entity is what acts in an order of its own: a warp; the wgmmas of a warp; its bulk stores; the loads that arrive at one mbarrier;
the cp.async of a warp, which are of the generic proxy.
A clock has, for every entity, how much of what it did comes before (happens-before: PTX ISA 8.8, base causality order; Fidge 1988,
Mattern 1989), and, for every warp, how much of that is behind a proxy fence (8.5 and 8.8, proxy-preserved order): the async proxy
sees what a warp wrote by ld, st, ldmatrix, stmatrix only if a fence.proxy.async lies between. Both parts travel together.

Shared memory is watched in chunks of 16 bytes: of each, the last write and every entity's last read since (as FastTrack,
Flanagan and Freund 2009, keeps them).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.ptx.program import PtxError

CHUNK = 16  # bytes
MAX_BARRIERS = 32


class Entities:
    """Numbers of entities, and the clocks' length: entities first, then the fenced part of each warp."""

    def __init__(self, num_warps: int):
        self.num_warps = num_warps
        self.count = 4 * num_warps + MAX_BARRIERS
        self.size = self.count + num_warps

    def wgmmas(self, warp: int) -> int:
        return self.num_warps + warp

    def stores(self, warp: int) -> int:
        return 2 * self.num_warps + warp

    def loads(self, barrier: int) -> int:
        return 3 * self.num_warps + barrier

    def copies(self, warp: int) -> int:
        return 3 * self.num_warps + MAX_BARRIERS + warp

    def is_asynchronous_proxy(self, entity: int) -> bool:
        return self.num_warps <= entity < 3 * self.num_warps + MAX_BARRIERS

    def name(self, entity: int) -> str:
        kind, number = divmod(entity, self.num_warps)
        if entity >= self.copies(0):
            return f"cp.async of warp {entity - self.copies(0)}"
        if kind >= 3:
            return f"TMA loads of barrier {entity - 3 * self.num_warps}"
        return (f"warp {number}", f"wgmma of warp {number}", f"bulk stores of warp {number}")[kind]

    def fence(self, clock: np.ndarray) -> None:
        """fence.proxy.async: all that comes before is seen by the async proxy."""
        np.maximum(clock[self.count :], clock[: self.num_warps], out=clock[self.count :])


class Shadow:
    """Who accessed each chunk of a block's shared memory last."""

    def __init__(self, entities: Entities, num_bytes: int):
        self.entities = entities
        chunks = -(-num_bytes // CHUNK)
        self._writer = np.zeros(chunks, np.int32)
        self._written = np.zeros(chunks, np.int32)  # the writer's clock then; 0: never
        self._reads = np.zeros((chunks, entities.count), np.int32)  # every entity's clock at its last read since; 0: none

    def read(self, entity: int, epoch: int, clock: np.ndarray, chunks: np.ndarray, what: str) -> None:
        """Notes a read by `entity` at its time `epoch`, before which comes what `clock` has. PtxError if it races, or if it is one
        by the async proxy that may not see what was written."""
        writer = self._check_write(clock, chunks, what, "reads")
        if self.entities.is_asynchronous_proxy(entity):
            self._check_proxy(clock, chunks, writer, what)
        self._reads[chunks, entity] = epoch

    def write(self, entity: int, epoch: int, clock: np.ndarray, chunks: np.ndarray, what: str) -> None:
        """The same of a write."""
        writer = self._check_write(clock, chunks, what, "writes")
        reads = self._reads[chunks]
        late = reads > clock[: self.entities.count]
        if late.any():
            chunk, reader = np.argwhere(late)[0]
            self._race(chunks[chunk], what, f"writes, unordered with a read by {self.entities.name(int(reader))}")
        if self.entities.is_asynchronous_proxy(entity):
            self._check_proxy(clock, chunks, writer, what)
            warps = self.entities.num_warps
            unfenced = reads[:, :warps] > clock[self.entities.count :]
            if unfenced.any():
                chunk, reader = np.argwhere(unfenced)[0]
                self._race(chunks[chunk], what, f"writes by the async proxy what warp {reader} read: no fence.proxy.async between")
        self._writer[chunks] = entity
        self._written[chunks] = epoch
        self._reads[chunks] = 0

    def _check_write(self, clock, chunks, what: str, does: str) -> np.ndarray:
        writer = self._writer[chunks]
        late = self._written[chunks] > clock[writer]
        if late.any():
            first = int(np.argmax(late))
            self._race(chunks[first], what, f"{does}, unordered with a write by {self.entities.name(int(writer[first]))}")
        return writer

    def _check_proxy(self, clock, chunks, writer, what: str) -> None:
        if (writer >= self.entities.copies(0)).any():
            raise PtxError(f"{what}: accesses by the async proxy what a cp.async wrote: how these are ordered is not known here")
        generic = writer < self.entities.num_warps
        if generic.any():
            of = writer[generic]
            unfenced = self._written[chunks[generic]] > clock[self.entities.count + of]
            if unfenced.any():
                first = int(np.argmax(unfenced))
                how = f"accesses by the async proxy what warp {of[first]} wrote: no fence.proxy.async between"
                self._race(chunks[generic][first], what, how)

    def _race(self, chunk: Any, what: str, how: str) -> None:
        raise PtxError(f"shared memory at {chunk * CHUNK:#x}: {what}: {how}")


def chunks_of(address: np.ndarray, size: int) -> np.ndarray:
    """The chunks that accesses of `size` bytes at these addresses touch, each once."""
    first = address >> 4
    touched = first if size <= CHUNK else (first[:, None] + np.arange(-(-size // CHUNK))).ravel()
    return np.array(sorted(set(touched.tolist())), np.int64)  # of so few, sooner than np.unique
