"""Mbarriers: phases, arrivals and transaction bytes (PTX ISA 9.7.13.15), and who has seen which phase.

A phase ends when its arrivals and its bytes are all there; the next begins. A thread that tests a parity can't tell two phases of
one parity apart. So a barrier that runs ahead of a warp that waits for it, or a phase that nobody waits for, is a fault.
"""

from __future__ import annotations

import numpy as np

from scripts.ptx.program import PtxError
from scripts.ptx.shadow import Entities


class Mbarrier:
    """One barrier. phase: phases that are complete. clock: what comes before the end of the last one."""

    def __init__(self, number: int, address: int, count: int, entities: Entities, where: str):
        self.number, self.address, self.count, self.where = number, address, count, where
        self.entity = entities.loads(number)
        self.pending, self.bytes, self.phase = count, 0, 0
        self.loads: list[int] = []  # of every load that is on its way: the phase that it was issued in
        self.clock, self._next = np.zeros(entities.size, np.int32), np.zeros(entities.size, np.int32)
        self.seen: dict[int, int] = {}  # warp -> the last phase that it waited for, from 0
        self.made_by: tuple[int, int] = (0, 0)  # the warp that initialised it, and its time then
        self.fenced: list[tuple[int, int]] = []  # the fences since: what knows of one may use it in a TMA

    def __str__(self) -> str:
        return f"barrier {self.number} (at {self.address:#x}, of {self.where})"

    def arrive(self, arrivals: int, num_bytes: int, clock: np.ndarray) -> None:
        """arrive, with bytes to expect before."""
        if arrivals > self.pending:
            raise PtxError(f"{self}: {arrivals} arrivals where {self.pending} were left of phase {self.phase}")
        self.bytes += num_bytes
        self.pending -= arrivals
        np.maximum(self._next, clock, out=self._next)
        self._advance()

    def issue(self) -> int:
        """A load that will arrive here; the phase that it was issued in."""
        self.loads.append(self.phase)
        return self.phase

    def complete(self, phase: int, num_bytes: int) -> None:
        """A load has arrived. Its own writes come before what waits for it, and nothing else that its issuer did."""
        self.loads.remove(phase)
        self.bytes -= num_bytes
        self._next[self.entity] = max(self._next[self.entity], phase + 1)
        self._advance()

    def _advance(self) -> None:
        if self.pending or self.bytes:
            return
        if any(phase <= self.phase for phase in self.loads):
            raise PtxError(f"{self}: phase {self.phase} ended while a load that was issued in it is on its way")
        late = [warp for warp, seen in self.seen.items() if seen < self.phase - 1]
        if late:
            raise PtxError(
                f"{self}: phase {self.phase} ended and warp {late[0]} had not seen phase {self.phase - 1}: it was skipped"
            )
        self.clock, self._next = self._next, self._next.copy()
        self.phase += 1
        self.pending = self.count

    def is_over(self, parity: int) -> bool:
        """Whether the phase of this parity has ended: the current one or the one before (9.7.13.15.16)."""
        return self.phase % 2 != parity

    def see(self, warp: int, parity: int) -> None:
        """A warp's wait for this parity has returned."""
        last = self.seen.get(warp, -1)
        expected = last if last % 2 == parity else last + 1
        if self.phase - 1 != expected:
            raise PtxError(f"{self}: warp {warp} waited for phase {expected} and found {self.phase - 1} ended: a phase was skipped")
        self.seen[warp] = expected

    def check_end(self) -> None:
        """PtxError if the block ends with bytes expected, a load on its way, or a phase that nobody waited for."""
        if self.bytes or self.loads:
            raise PtxError(f"{self}: the block ended with {self.bytes} bytes expected, {len(self.loads)} loads on their way")
        if self.phase and max(self.seen.values(), default=-1) < self.phase - 1:
            raise PtxError(f"{self}: the block ended and nobody had waited for phase {self.phase - 1}")
