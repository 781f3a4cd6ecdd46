"""Programs in which one synchronising instruction is taken out, weakened or moved.

`trial` runs them, and `survivors` says why nothing misses some of them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from scripts.ptx.machine_code import registers_of
from scripts.ptx.program import Instruction, Literal, Program

_SYNCHRONISES = re.compile(
    r"bar\.sync|fence\.|mbarrier\.(init|arrive|try_wait)|wgmma\.(fence|commit|wait)|cp\.async\.(bulk\.)?(commit|wait)"
)
_RELEASES = re.compile(r"bar\.sync|fence\.proxy|mbarrier\.arrive\.release")  # weaker where they come earlier
_ACQUIRES = re.compile(r"bar\.sync|wgmma\.wait|cp\.async\.(bulk\.)?wait")  # weaker where they come later
_ACCESSES = re.compile(r"(ld|st)\.shared|(ld|st)matrix|cp\.async\.(bulk\.(tensor|global)|cg)|wgmma\.mma")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A change of one instruction. kind: what is done; index: of the instruction; start: where `instructions` replace the old."""

    kind: str
    index: int
    start: int
    instructions: tuple[Instruction, ...]

    @property
    def moves(self) -> bool:
        """Whether the instruction is still there, elsewhere."""
        return len(self.instructions) > 1

    def of(self, program: Program) -> Program:
        """The program with this change."""
        return program.replaced(self.start, *self.instructions)


def mutations(program: Program) -> Iterator[Mutation]:
    """Every one of a program."""
    for index, i in enumerate(program.instructions):
        if not _SYNCHRONISES.match(i.opcode):
            continue
        name = re.sub(r"\.(sync|aligned|release|cta|shared|b64|async|shared::cta|cluster|parity)\b.*", "", i.opcode) or i.opcode
        name = {"bar": "bar.sync", "fence.proxy": "fence.proxy.async", "cp": re.sub(r"\.read$", "", i.opcode)}.get(name, name)
        if i.opcode.startswith("mbarrier.try_wait"):
            over = dataclasses.replace(i, opcode="mov.pred", operands=(i.operands[0], Literal("1")), text=f"over at once: {i.text}")
            yield Mutation(f"{name} returns at once", index, index, (over,))
            continue
        yield Mutation(f"{name} removed", index, index, (program.without(index).instructions[index],))
        if "wait_group" in i.opcode:
            (count,) = i.operands
            assert isinstance(count, Literal)
            weaker = dataclasses.replace(i, operands=(Literal(str(int(count.text) + 1)),), text=f"one more left: {i.text}")
            yield Mutation(f"{name} waits for one less", index, index, (weaker,))
        if _RELEASES.match(i.opcode) and (to := _neighbour(program, index, -1)) is not None:
            yield Mutation(f"{name} before what it follows", index, to, (i, *program.instructions[to:index]))
        if _ACQUIRES.match(i.opcode) and (to := _neighbour(program, index, 1)) is not None:
            yield Mutation(f"{name} behind what follows it", index, index, (*program.instructions[index + 1 : to + 1], i))


def _neighbour(program: Program, index: int, step: int) -> int | None:
    """The next access of shared memory in a straight line, with no other synchronisation between and what `index` reads defined."""
    targets, reads = set(program.labels.values()), set(registers_of(program.instructions[index]))
    at = index
    while 0 <= at + step < len(program.instructions) and (at if step < 0 else at + step) not in targets:
        at += step
        i = program.instructions[at]
        if _ACCESSES.match(i.opcode):
            return at
        if _SYNCHRONISES.match(i.opcode) or i.opcode.startswith(("bra", "ret")):
            return None
        if step < 0 and reads & set(registers_of(dataclasses.replace(i, operands=i.operands[:1]))):
            return None
    return None
