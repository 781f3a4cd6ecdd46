"""One warp: its registers, its clock, and the wgmmas, bulk stores and cp.async that it has under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.ptx.machine_code import BLOCKED, Run, Single
from scripts.ptx.program import PtxError


@dataclasses.dataclass(eq=False)
class Wgmma:
    """One wgmma of one warp on its way. run: computes `results` (rows of registers -> bits) once. registers: accumulators' rows,
    operands: those of an A in registers."""

    run: Callable[[], None]
    registers: np.ndarray
    operands: np.ndarray
    epoch: int
    results: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Store:
    """One bulk store of a warp, or one cp.async, on its way."""

    finish: Callable[[], None]
    done: bool = False


class Warp:
    """A warp of a block. The lanes of a warp go in step; a branch that would part them is refused.

    waiting: None, or whether what it waits for has come. leader: the lane that elect.sync elects.
    """

    def __init__(self, block: Any, number: int, registers: dict[str, np.ndarray], num_32: int):
        self.block, self.number, self.registers = block, number, registers
        self.at = 0
        self.ended = False
        self.waiting: Callable[[], bool] | None = None
        self.clock = np.zeros(block.entities.size, np.int32)
        self.clock[number] = 1
        self.wgmmas: list[Wgmma] = []  # not yet committed
        self.wgmma_groups: list[list[Wgmma]] = []
        self.wgmmas_issued = 0
        self.stores: list[Store] = []  # not yet committed
        self.store_groups: list[list[Store]] = []
        self.stores_committed = 0
        self.stores_read = 0  # groups known to have read shared memory
        self.copies: list[Store] = []  # cp.async, not yet committed
        self.copy_groups: list[list[Store]] = []
        self.copies_committed = 0
        self.copies_waited = 0  # groups whose copies each thread has seen: its own
        self.accumulating = np.zeros(num_32, bool)  # registers of wgmmas that were not waited for
        self.multiplying = np.zeros(num_32, bool)
        self.unfenced = np.ones(num_32, bool)  # touched since the last wgmma.fence

    def tick(self) -> None:
        """What follows is not covered by what was released so far."""
        self.clock[self.number] += 1

    def touch(self, rows: np.ndarray) -> None:
        """Registers are read or written by another instruction than wgmma (9.7.15.7.1, 9.7.15.5.1)."""
        if self.wgmmas or self.wgmma_groups:
            for busy, what in ((self.accumulating, "accumulates in"), (self.multiplying, "multiplies")):
                if busy[rows].any():
                    names = self.block.register_names(rows[busy[rows]])
                    raise PtxError(f"{', '.join(names[:4])} accessed while a wgmma that {what} them is in flight")
        self.unfenced[rows] = True

    def step(self) -> bool:
        """Runs up to and with the next instruction that others can see. False if it is blocked before that, or has ended."""
        block = self.block
        while True:
            unit = block.units[self.at]
            try:
                if isinstance(unit, Run):
                    self.touch(unit.registers)
                    for batch in unit.batches:
                        batch(self.registers)
                    block.covered[unit.start : unit.end] = True
                    self.at = unit.end
                    continue
                return self._act(unit)
            except PtxError as error:
                i = block.program.instructions[self.at]
                raise PtxError(f"warp {self.number} of block {block.index}, {i}: {error}") from None

    def _act(self, unit: Single) -> bool:
        lanes = None
        if unit.guard is not None:
            row, negated = unit.guard
            lanes = self.registers["pred"][row] != negated
            if lanes.all():
                lanes = None
            elif not lanes.any():
                self.block.covered[self.at] = True
                self.touch(unit.registers)
                self.at += 1
                return True
        if unit.touches:
            self.touch(unit.registers)
        to = unit.act(self, lanes)
        if to is BLOCKED:
            return False
        self.block.covered[self.at] = True
        self.at = self.at + 1 if to is None else to
        return not self.ended

    def check_end(self) -> None:
        """PtxError if it ends with something under way that uses its registers or the block's shared memory."""
        if self.wgmmas or self.wgmma_groups:
            raise PtxError("the warp ends with wgmmas that it did not wait for")
        if self.stores or self.stores_read < self.stores_committed:
            raise PtxError("the warp ends with bulk stores that it did not wait for")
        if self.copies or any(self.copy_groups):
            raise PtxError("the warp ends with cp.async that it did not wait for")
