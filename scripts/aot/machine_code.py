"""A GPU kernel's machine code (SASS) as Mosaic's dump has it: instructions with their control codes, and the loops they lie in.

A line of the dump is `waits:read:write:yield:stall /*address*/ @guard OPCODE operands`. The control codes are the compiler's: which
of six scoreboard barriers must be down before the instruction issues, which one it holds until it has read its operands, which
until its result is there, and for how many cycles the warp then issues nothing (Jia et al., "Dissecting the NVIDIA Volta GPU
architecture via microbenchmarking", 2018, section 2.1).

Works on text alone. Owns the parser, the loops, and the ways through one.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(
    r"^\s*(?P<waits>-|0x[\da-f]+|[\d&]+):(?P<read>[\d-]):(?P<write>[\d-]):[Y-]:(?P<stall>\d\d)\s+/\*(?P<address>[0-9a-f]+)\*/\s+"
    r"(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;\n]*?)\s*;?\s*$"
)
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_UNKNOWN_CONTROL = ("BRX", "JMP", "JMX", "CALL", "RET")  # none in what Mosaic makes, but for the next one
_JUMP = "CALL.REL.NOINC"  # before sm_90: a branch that convergence does not follow; no RET goes back
_MAX_WAYS = 256


@dataclass(frozen=True)
class Sass:
    """One instruction. waits, read, write: scoreboard barriers (0 to 5), see above; stall: cycles."""

    address: int
    guard: str
    opcode: str
    operands: str
    waits: tuple[int, ...]
    read: int | None
    write: int | None
    stall: int

    @property
    def base(self) -> str:
        """The opcode without its modifiers: HGMMA of HGMMA.64x64x16.F32.BF16."""
        return self.opcode.partition(".")[0]

    def __str__(self) -> str:
        return f"/*{self.address:04x}*/ {self.guard} {self.opcode} {self.operands}".replace("  ", " ")


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another, and the blocks that may follow, by index; a branch's target is the last."""

    instructions: tuple[Sass, ...]
    following: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """Blocks of a natural loop. own: those in no loop within it."""

    header: int
    blocks: frozenset[int]
    own: frozenset[int]
    depth: int  # 1: in no other loop

    @property
    def innermost(self) -> bool:
        return self.own == self.blocks


@dataclass(frozen=True)
class MachineCode:
    """A kernel's blocks in order."""

    blocks: tuple[Block, ...]

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Its loops, outermost first, then by place; those that only repeat a wait which timed out are not loops here."""
        backwards = defaultdict(set)
        dominators = self._dominators()
        for index, block in enumerate(self.blocks):
            for target in block.following:
                if target in dominators.get(index, ()):
                    backwards[target] |= self._natural(index, target)
        bodies = {header: frozenset(body) for header, body in backwards.items() if not self._repeats_a_wait(body)}
        loops = []
        for header, body in bodies.items():
            within = [other for inner, other in bodies.items() if inner != header and inner in body]
            depth = sum(header in other for other in bodies.values())
            loops.append(Loop(header, body, body.difference(*within), depth))
        return tuple(sorted(loops, key=lambda loop: (loop.depth, loop.header)))

    def instructions(self, blocks: frozenset[int]) -> list[Sass]:
        """Those of some blocks, in order."""
        return [i for index in sorted(blocks) for i in self.blocks[index].instructions]

    def ways(self, loop: Loop) -> list[list[Sass]]:
        """Each way once round a loop that has none within it, from its header to its header. No wait times out on it.

        Raises:
          ValueError: there is a loop within, or there are more ways than anybody would look at.
        """
        if not loop.innermost:
            raise ValueError(f"the loop at {self.blocks[loop.header].instructions[0]} has another within it")
        found = []
        for way in self._walk(loop, [loop.header]):
            found.append([i for index in way for i in self.blocks[index].instructions])
            if len(found) > _MAX_WAYS:
                raise ValueError(
                    f"the loop at {self.blocks[loop.header].instructions[0]} can be gone round in over {_MAX_WAYS} ways"
                )
        return found

    def _walk(self, loop: Loop, way: list[int]) -> Iterator[list[int]]:
        for target in self.blocks[way[-1]].following:
            if target == loop.header:
                yield way
            elif target in loop.blocks and target not in self.waiting and target not in way:
                yield from self._walk(loop, [*way, target])

    @functools.cached_property
    def waiting(self) -> frozenset[int]:
        """Blocks that are entered where a wait has timed out: they wait again, and go back to where it went on. One that a block
        always leads to is no such block, but the wait itself."""
        waiting = set()
        for index, block in enumerate(self.blocks):
            always = any(self.blocks[before].following == (index,) for before in self._before[index])
            if index in block.following and self._repeats_a_wait({index}) and not always:
                waiting |= {index, *(to for to in block.following if to != index and len(self.blocks[to].instructions) == 1)}
        return frozenset(waiting)

    def _repeats_a_wait(self, body: set[int]) -> bool:
        return len(body) == 1 and any("TRYWAIT" in i.opcode for i in self.blocks[next(iter(body))].instructions)

    def _natural(self, latch: int, header: int) -> set[int]:
        """Blocks from which the latch is reached without passing the header."""
        body, todo = {header, latch}, [latch]
        while todo:
            index = todo.pop()
            if index != header:
                new = self._before[index] - body
                body |= new
                todo += new
        return body

    @functools.cached_property
    def _before(self) -> dict[int, set[int]]:
        before = defaultdict(set)
        for index, block in enumerate(self.blocks):
            for target in block.following:
                before[target].add(index)
        return before

    def _dominators(self) -> dict[int, set[int]]:
        """Of each block that can be reached: those that every way to it passes."""
        reached, todo = {0}, [0]
        while todo:
            new = set(self.blocks[todo.pop()].following) - reached
            reached |= new
            todo += new
        found = {index: set(reached) for index in reached}
        found[0] = {0}
        changed = True
        while changed:
            changed = False
            for index in sorted(reached - {0}):
                new = {index} | set.intersection(*(found[b] for b in self._before[index] if b in reached))
                if new != found[index]:
                    found[index], changed = new, True
        return found


def parse_sass(text: str) -> MachineCode:
    """The machine code of one kernel, from Mosaic's dump with control codes.

    Raises:
      ValueError: a line of it is not known, or the text has no instruction.
    """
    instructions, labels = [], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif "/*" in line and "*/" in line and not line.lstrip().startswith("//"):
            instructions.append(_instruction(line))
    if not instructions:
        raise ValueError("the dump has no instruction; its format has changed")
    return MachineCode(tuple(_blocks(instructions, labels)))


def _instruction(line: str) -> Sass:
    match = _LINE.match(line)
    if match is None:
        raise ValueError(f"not a line of machine code with control codes: {line.strip()!r}")
    read, write = (None if match[name] == "-" else int(match[name]) for name in ("read", "write"))
    waits = _barriers(match["waits"])
    opcode = match["opcode"]
    guard = match["guard"] or ""
    if opcode == "BRA.U" and not guard and (uniform := re.match(r"!?UP\d", match["operands"].strip())):
        guard = f"@{uniform[0]}"  # from sm_100 on: one predicate for the whole warp, among the operands
    # Another unguarded branch that a predicate among its operands decides would go on below, too.
    by_operand = opcode.startswith("BRA") and not guard and re.match(r"!?U?P\d", match["operands"].strip())
    if opcode.partition(".")[0] in _UNKNOWN_CONTROL and opcode != _JUMP or by_operand or opcode.startswith("BRA.DIV"):
        raise ValueError(f"control flow that is not known here: {line.strip()!r}")
    return Sass(int(match["address"], 16), guard, opcode, match["operands"].strip(), waits, read, write, int(match["stall"]))


def _barriers(text: str) -> tuple[int, ...]:
    """Scoreboard barriers as the dump has them: "-", "2&1", or, of more than two, a mask such as 0x0e."""
    if text.startswith("0x"):
        mask = int(text, 16)
        return tuple(k for k in range(6) if mask >> k & 1)
    return tuple(int(wait) for wait in text.split("&") if wait != "-")


def _blocks(instructions: list[Sass], labels: dict[str, int]) -> Iterator[Block]:
    """A block begins at a branch's target and after a branch or an exit. BSYNC goes on below, where its BSSY says."""
    jumps = [k for k, i in enumerate(instructions) if i.base == "BRA" or i.opcode == _JUMP]
    targets = {k: _TARGET.search(instructions[k].operands)[1] for k in jumps}  # pyright: ignore[reportOptionalSubscript]
    for k, target in targets.items():
        if target not in labels:
            raise ValueError(f"control flow that is not known here: {instructions[k]} goes out of the kernel")
    branches = {k: labels[target] for k, target in targets.items()}
    ends = {k for k, i in enumerate(instructions) if k in branches or i.base == "EXIT"}
    starts = sorted({0, *branches.values(), *(k + 1 for k in ends)} - {len(instructions)})
    number = {start: index for index, start in enumerate(starts)}
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last = instructions[end - 1]
        follows = last.guard not in ("", "@PT") or end - 1 not in ends
        following = [number[end]] if follows and end in number else []
        if end - 1 in branches:
            following.append(number[branches[end - 1]])
        yield Block(tuple(instructions[start:end]), tuple(following))
