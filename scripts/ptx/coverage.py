"""Which lines of our kernels' PTX have run, over all programs that a kernel was compiled to.

Two programs of a kernel differ in registers, and a loop that one leaves out (a decode has one token) another runs. So lines count
as one where they came from the same line of Python and differ in names of registers and labels alone; of equal lines within a
program the first is one with the first of another, the second with the second.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np

from scripts.ptx.program import Instruction, Literal, Program

_NAMES = re.compile(r"%[a-z]+\d+|\bP\d+\b|\$\w+|\w+_param_\d+")


class Coverage:
    """Of every kernel: its lines, and whether each has run in some program."""

    def __init__(self):
        self._ran: dict[str, dict[tuple[str, str, int], bool]] = defaultdict(dict)
        self._example: dict[tuple[str, str, int], Instruction] = {}

    def add(self, kernel: str, program: Program, covered: np.ndarray, *, demanded: bool = True) -> None:
        """The instructions of one program that ran, bool[instructions]. demanded: whether those that did not are lines at all."""
        lines, copies = self._ran[kernel], Counter()
        for i, ran in zip(program.instructions, covered.tolist(), strict=True):
            if (ran or demanded) and not _repeats_a_wait(program, i):
                text = _NAMES.sub("_", i.text)
                copies[i.source, text] += 1
                key = (i.source, text, copies[i.source, text])
                lines[key] = lines.get(key, False) or ran
                self._example.setdefault(key, i)

    def missing(self, kernel: str) -> list[Instruction]:
        """One instruction of each line that never ran."""
        return [self._example[key] for key, ran in self._ran[kernel].items() if not ran]

    def summary(self) -> dict[str, tuple[int, int]]:
        """kernel -> (lines that ran, lines)."""
        return {kernel: (sum(lines.values()), len(lines)) for kernel, lines in self._ran.items()}


def _repeats_a_wait(program: Program, i: Instruction) -> bool:
    """Whether it goes back to a wait that timed out: what follows is that wait again."""
    if not i.opcode.startswith("bra") or not isinstance(i.operands[0], Literal):
        return False
    target = program.instructions[program.labels[i.operands[0].text]]
    return target.opcode.startswith("mbarrier.try_wait")
