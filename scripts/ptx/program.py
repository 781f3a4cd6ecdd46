"""PTX text as instructions: opcode, operands, guard, and the line of Python that each came from.

Owns the syntax of one kernel (PTX ISA, section 4; blocks and their local registers, 4.4 and 9.2). It does not know what any
instruction does: `arithmetic` and `operations` do.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

BANKS = {"pred": "pred", "b16": "b16", "b32": "b32", "b64": "b64", "u32": "b32", "s32": "b32", "f32": "b32", "u64": "b64"}


class PtxError(Exception):
    """PTX that this package refuses, or a rule of PTX that a run broke."""


@dataclasses.dataclass(frozen=True)
class Register:
    """One register of a bank: "pred", "b16", "b32" or "b64"."""

    name: str
    bank: str


@dataclasses.dataclass(frozen=True)
class Literal:
    """A number, a special register (%tid.x), a symbol, or the sink _."""

    text: str


@dataclasses.dataclass(frozen=True)
class Group:
    """Operands in braces, or a pair a|b."""

    items: tuple[Operand, ...]


@dataclasses.dataclass(frozen=True)
class Address:
    """[base + offset], or of a tensor [base, {coordinates}]."""

    base: Operand
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


Operand = Register | Literal | Group | Address


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction. guard: the predicate register, and whether it is negated. line: of the PTX text. source: file:line of the
    Python that made it, where the PTX says so."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    line: int
    source: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line} ({self.source}): {self.text[:110]}"


NOP = "nop"  # what a mutation leaves in place of an instruction


@dataclasses.dataclass(frozen=True)
class Program:
    """One kernel. labels: name -> index of the instruction that follows. params: names in order. threads: of a block."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    params: tuple[str, ...]
    threads: int

    def replaced(self, index: int, *instructions: Instruction) -> Program:
        """The program with other instructions from `index` on, as many as are given."""
        new = self.instructions[:index] + instructions + self.instructions[index + len(instructions) :]
        return dataclasses.replace(self, instructions=new)

    def without(self, index: int) -> Program:
        """The program with a NOP at `index`."""
        old = self.instructions[index]
        return self.replaced(index, dataclasses.replace(old, opcode=NOP, operands=(), guard=None, text=f"removed: {old.text}"))


_ENTRY = re.compile(r"\.visible \.entry (?P<name>[\w$]+)\s*\((?P<params>.*?)\)(?P<head>[^{]*)\{", re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^\n]*")
_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_INSTRUCTION = re.compile(r"(?:@(?P<not>!?)(?P<guard>%?\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.S)
_IGNORED = (".shared", ".pragma")


def parse(text: str) -> Program:
    """The kernel of a PTX text that has one. Raises PtxError for a directive or an operand that is not known."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("the PTX has no .visible .entry")
    threads = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)", entry["head"])
    if threads is None:
        raise PtxError(f"{entry['name']} has no .maxntid: how many threads a block has is not known")
    reader = _Reader(text, entry.end())
    reader.read()
    params = tuple(part.split()[-1].partition("[")[0] for part in entry["params"].split(",") if part.strip())
    return Program(entry["name"], tuple(reader.instructions), reader.labels, params, int(threads[1]))


class _Reader:
    """Walks the body of a kernel. Names declared in an inner block get a suffix, so that two blocks' names differ."""

    def __init__(self, text: str, start: int):
        self.text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
        self.at = start
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.files = {number: Path(name).name for number, name in _FILE.findall(text)}
        self.source = "?"
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]  # declared name -> name
        self.banks: dict[str, str] = {}  # of single registers by name, of numbered ones by prefix
        self.num_blocks = 0

    def read(self) -> None:
        while True:
            while self.text[self.at].isspace():
                self.at += 1
            if self.text[self.at] == "}":
                self.scopes.pop()
                self.at += 1
                if not self.scopes:
                    return
            elif self.text[self.at] == "{":
                self.at += 1
                self._open_block()
            elif label := _LABEL.match(self.text, self.at):
                self.labels[self._name(label[1])] = len(self.instructions)
                self.at = label.end()
            elif loc := _LOC.match(self.text, self.at):
                if loc[2] != "0":  # line 0: made by the compiler; the last line stands
                    self.source = f"{self.files.get(loc[1], loc[1])}:{loc[2]}"
                self.at = loc.end()
            else:
                end = self.text.index(";", self.at)
                self._statement(self.text[self.at : end].strip())
                self.at = end + 1

    def _open_block(self) -> None:
        """Its labels are known at once, as a branch may come before one."""
        self.num_blocks += 1
        end = self.text.index("}", self.at)
        inner = self.text[self.at : end]
        while inner.count("{") > inner.count("}"):
            end = self.text.index("}", end + 1)
            inner = self.text[self.at : end]
        names = re.findall(r"^\s*([\w$]+)\s*:(?!:)", inner, re.M)
        self.scopes.append({name: f"{name}#{self.num_blocks}" for name in names})

    def _name(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def _statement(self, statement: str) -> None:
        if declaration := _REG.match(statement):
            return self._declare(*declaration.groups())
        if statement.startswith(_IGNORED):
            return
        match = _INSTRUCTION.fullmatch(statement)
        if match is None or statement.startswith("."):
            raise PtxError(f"line {self._line()}: not an instruction that is known: {statement[:120]!r}")
        guard = None
        if match["guard"]:
            register = self._operand(match["guard"])
            assert isinstance(register, Register)
            guard = (register, match["not"] == "!")
        operands = tuple(self._operand(part) for part in _split(match["operands"]))
        text = " ".join(statement.split())
        self.instructions.append(Instruction(match["opcode"], operands, guard, self._line(), self.source, text))

    def _line(self) -> int:
        return bisect.bisect_right(self.starts, self.at)

    def _declare(self, kind: str, names: str) -> None:
        if kind not in BANKS:
            raise PtxError(f"line {self._line()}: registers of type .{kind} are not known")
        for name in names.split(","):
            prefix, numbered, _ = name.strip().partition("<")
            if not numbered and len(self.scopes) > 1:
                self.scopes[-1][prefix] = prefix = f"{prefix}#{self.num_blocks}"
            self.banks[prefix] = BANKS[kind]

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Group(tuple(self._operand(part) for part in _split(text[1:-1])))
        if text.startswith("["):
            base, *coordinates = _split(text[1:-1])
            base, _, offset = base.partition("+")
            if coordinates and not coordinates[0].startswith("{") or len(coordinates) > 1:
                raise PtxError(f"line {self._line()}: address {text!r} is not known")
            items = self._operand(coordinates[0]) if coordinates else Group(())
            assert isinstance(items, Group)
            return Address(self._operand(base), int(offset or 0), items.items)
        if "|" in text:
            return Group(tuple(self._operand(part) for part in text.split("|")))
        name = self._name(text)
        bank = self.banks.get(name) or self.banks.get(re.sub(r"\d+$", "", name))
        return Literal(name) if bank is None else Register(name, bank)


def _split(text: str) -> Sequence[str]:
    """The parts between commas that lie in no bracket."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text.strip() else []
