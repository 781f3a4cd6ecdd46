"""A program made ready to run: operands resolved to rows of register banks, and pure instructions batched.

A straight run of instructions that only compute can't be seen from outside its warp. So it runs as a whole; and within it, equal
operations that do not depend on each other run as one numpy operation over many registers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from scripts.ptx import arithmetic
from scripts.ptx.arithmetic import BANK_OF, DTYPES
from scripts.ptx.launch import Launch
from scripts.ptx.memory import PARAM_BASE, PARAM_STRIDE, SHARED_BASE
from scripts.ptx.program import NOP, Instruction, Literal, Operand, Program, PtxError, Register

Rows = Any  # an int, a slice or an array: rows of a bank
SHARED_SYMBOL = "__dynamic_shmem__0"
SPECIAL = {"%tid.x": "u32", "%ctaid.x": "u32", "%ctaid.y": "u32", "%ctaid.z": "u32", "%leader": "u32", "%is_leader": "pred"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A row of a bank, and the type to read it as."""

    type: str
    row: int


class Banks:
    """Rows of every bank: a row a register, a constant, a special value. A row is 32 lanes."""

    def __init__(self, program: Program, addresses: dict[int, int], launch: Launch):
        self.rows: dict[str, dict[Any, int]] = {bank: {} for bank in ("pred", "b16", "b32", "b64")}
        self.constants: list[tuple[str, int, int]] = []  # bank, row, bits
        self.specials: list[tuple[str, int, str]] = []  # bank, row, name
        self._symbols = {SHARED_SYMBOL: SHARED_BASE}
        for k, name in enumerate(program.params):
            number = launch.params[k]
            self._symbols[name] = PARAM_BASE + k * PARAM_STRIDE
            self._symbols[f"value of {name}"] = 0 if number is None else addresses[number]

    def row(self, operand: Operand, t: str) -> int:
        """The row of an operand of type t. Raises PtxError if it can't be one."""
        if isinstance(operand, Register):
            if operand.bank != BANK_OF[t]:
                raise PtxError(f"register {operand.name} of {operand.bank} is used as .{t}")
            return self._row(operand.bank, operand.name)
        if not isinstance(operand, Literal):
            raise PtxError(f"operand {operand} of type .{t} is not known")
        bank = BANK_OF[t]
        if operand.text == "_":
            return self._row(bank, "_")
        if operand.text.startswith("%"):
            if SPECIAL.get(operand.text) not in (t, "u32" if t == "b32" else t):
                raise PtxError(f"special register {operand.text} of type .{t} is not known")
            new = operand.text not in self.rows[bank]
            row = self._row(bank, operand.text)
            if new:
                self.specials.append((bank, row, operand.text))
            return row
        bits = self._symbols[operand.text] if operand.text in self._symbols else arithmetic.literal(operand.text, t)
        new = bits not in self.rows[bank]
        row = self._row(bank, bits)
        if new:
            self.constants.append((bank, row, bits))
        return row

    def source(self, operand: Operand, t: str) -> Source:
        return Source(t, self.row(operand, t))

    def _row(self, bank: str, key: Any) -> int:
        return self.rows[bank].setdefault(key, len(self.rows[bank]))

    def fill(self, specials: dict[str, Any]) -> dict[str, np.ndarray]:
        """A warp's registers, as every type: [rows, 32] each, views of one array a bank. Registers hold 0xFF at first."""
        views: dict[str, np.ndarray] = {}
        for bank, rows in self.rows.items():
            array = np.full((max(len(rows), 1), 32), -1, np.int64).astype(DTYPES[bank])
            for t, dtype in DTYPES.items():
                if BANK_OF[t] == bank:
                    views[t] = array.view(dtype)
        for bank, row, bits in self.constants:
            views[bank][row] = bits
        for bank, row, name in self.specials:
            views[bank][row] = specials[name]
        return views


@dataclasses.dataclass(frozen=True)
class Run:
    """Pure instructions [start, end) as batches. registers: the 32-bit rows that they touch."""

    start: int
    end: int
    batches: tuple[Callable[[dict[str, np.ndarray]], None], ...]
    registers: np.ndarray


@dataclasses.dataclass(frozen=True)
class Single:
    """One instruction that does more: act(warp, lanes) with lanes a bool[32], or None for all. Returns None when done, the index to
    go on at, or BLOCKED. registers: the 32-bit rows that it names; touches: whether as other instructions than wgmma do."""

    act: Callable[[Any, Any], Any]
    guard: tuple[int, bool] | None
    registers: np.ndarray
    touches: bool


BLOCKED = object()


def assemble(
    program: Program, banks: Banks, operation: Callable[[Instruction, Banks, Program], Callable[[Any, Any], Any]]
) -> dict[int, Run | Single]:
    """What runs at every index that control can reach. `operation` makes what an impure instruction does."""
    pure = [[] if i.opcode == NOP else arithmetic.steps(i) for i in program.instructions]
    targets, units, at = set(program.labels.values()), {}, 0
    while at < len(program.instructions):
        end = at
        while end < len(pure) and pure[end] is not None and (end == at or end not in targets):
            end += 1
        if end > at:
            units[at] = _run(program, banks, pure, at, end)
            at = end
            continue
        i = program.instructions[at]
        guard = None if i.guard is None else (banks.row(i.guard[0], "pred"), i.guard[1])
        touches = not i.opcode.startswith("wgmma.mma_async")
        units[at] = Single(operation(i, banks, program), guard, _rows(banks, registers_of(i)), touches)
        at += 1
    return units


def registers_of(i: Instruction) -> Iterable[str]:
    """The 32-bit registers that an instruction names."""
    todo: list[Any] = list(i.operands)
    while todo:
        operand = todo.pop()
        if isinstance(operand, Register):
            if operand.bank == "b32":
                yield operand.name
        else:
            todo += [*getattr(operand, "items", ()), *getattr(operand, "coordinates", ())]
            if hasattr(operand, "base"):
                todo.append(operand.base)


def _rows(banks: Banks, names: Iterable[str]) -> np.ndarray:
    return np.array(sorted({banks.row(Register(name, "b32"), "b32") for name in names}), np.int64)


def _run(program: Program, banks: Banks, pure: list, start: int, end: int) -> Run:
    """The batches of a run, by level: one more than that of everything that must come before."""
    written: dict[tuple[str, int], int] = {}
    read: dict[tuple[str, int], int] = {}
    batches: dict[tuple, list] = defaultdict(list)
    names: set[str] = set()
    for index in range(start, end):
        i = program.instructions[index]
        names.update(registers_of(i))
        for step in pure[index]:
            sources = [banks.source(operand, t) for operand, t in step.sources]
            to = Source(step.type, banks.row(step.destination, step.type))
            guard = () if i.guard is None else (banks.source(i.guard[0], "pred"),)
            used = [(BANK_OF[s.type], s.row) for s in (*sources, *guard, *((to,) if guard else ()))]
            target = (BANK_OF[to.type], to.row)
            level = max([written.get(k, -1) + 1 for k in (*used, target)] + [read.get(target, -1) + 1])
            written[target] = level
            for key in used:
                read[key] = max(read.get(key, -1), level)
            key = (level, step.name, step.type, tuple(s.type for s in sources), 0 if i.guard is None else 1 + i.guard[1])
            batches[key].append((step.function, to.row, [s.row for s in sources], [g.row for g in guard]))
    ordered = sorted(batches.items(), key=lambda item: item[0][0])
    return Run(start, end, tuple(_batch(key, entries) for key, entries in ordered), _rows(banks, names))


def _batch(key: tuple, entries: list) -> Callable[[dict[str, np.ndarray]], None]:
    _, _, to_type, types, guarded = key
    function = entries[0][0]
    to = _index([entry[1] for entry in entries])
    sources = [(t, _index([entry[2][k] for entry in entries])) for k, t in enumerate(types)]
    if not guarded:
        if len(sources) == 1:
            ((t, rows),) = sources

            def one(views):
                views[to_type][to] = function(views[t][rows])

            return one

        def several(views):
            views[to_type][to] = function(*[views[t][rows] for t, rows in sources])

        return several
    lanes = _index([entry[3][0] for entry in entries])

    def some(views):
        on = views["pred"][lanes] == (guarded == 1)
        new = function(*[views[t][rows] for t, rows in sources])
        views[to_type][to] = np.where(on, new, views[to_type][to])

    return some


def _index(rows: list[int]) -> Rows:
    """One row as an int, evenly spaced ones as a slice (which copies nothing), others as an array."""
    if len(rows) == 1:
        return rows[0]
    step = rows[1] - rows[0]
    if step > 0 and all(b - a == step for a, b in zip(rows, rows[1:], strict=False)):
        return slice(rows[0], rows[-1] + 1, step)
    return np.array(rows)
