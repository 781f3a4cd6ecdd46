"""Operands of an instruction as functions of a warp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.ptx.machine_code import Banks
from scripts.ptx.program import Address, Group, Instruction, Operand, Program, PtxError, Register

Action = Callable[[Any, Any], Any]
Values = Callable[[Any], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Access:
    """An instruction with what its operands are resolved by."""

    i: Instruction
    banks: Banks
    program: Program

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.i.operands

    def group(self, number: int) -> Group:
        """An operand that must be in braces."""
        operand = self.operands[number]
        if not isinstance(operand, Group):
            raise PtxError(f"{self.i}: operand {number} must be a vector")
        return operand

    def at(self, number: int) -> Address:
        """An operand that must be an address."""
        operand = self.operands[number]
        if not isinstance(operand, Address):
            raise PtxError(f"{self.i}: operand {number} must be an address")
        return operand


def make_values(a: Access, operand: Operand, t: str) -> Values:
    """A warp -> the operand's 32 values."""
    row = a.banks.row(operand, t)
    return lambda warp: warp.registers[t][row]


def address(a: Access, operand: Operand) -> Values:
    """A warp -> the 32 addresses, i64."""
    if not isinstance(operand, Address):
        raise PtxError(f"{a.i}: {operand} must be an address")
    offset = operand.offset
    narrow = isinstance(operand.base, Register) and operand.base.bank == "b32"
    values = make_values(a, operand.base, "u32" if narrow else "u64")
    return lambda warp: values(warp).astype(np.int64) + offset


def uniform(values: np.ndarray) -> int:
    """The one value that all lanes have. PtxError if they differ."""
    if (values != values[0]).any():
        raise PtxError(f"lanes of the warp differ: {sorted(set(values.tolist()))[:4]}")
    return int(values[0])


def one_lane(lanes: np.ndarray | None) -> int:
    """The one lane that is active. PtxError if there are several: each would do it again."""
    if lanes is None or lanes.sum() != 1:
        raise PtxError("more than one lane does this")
    return int(np.argmax(lanes))
