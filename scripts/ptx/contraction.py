"""Products and sums in PTX that ptxas may make one: their bits are not those of the PTX as it is written.

Owns one question, asked of a kernel's text. `arithmetic` rounds a product and a sum one after the other; so does the GPU where they
carry `.rn`, or where no sum takes a product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.ptx.program import Group, Instruction, Literal, Operand, Program, PtxError, Register

# PTX ISA, 9.7.3 to 9.7.5 (add, sub, mul of floats, halves, mixed precision): "mul/add and mul/sub sequences with no rounding
# modifiers may be optimized to use fused-multiply-add instructions on the target device".
_PRODUCT = re.compile(r"mul(\.ftz|\.sat)*\.(f32|f32x2|f64|f16|f16x2|bf16|bf16x2)")
_SUM = re.compile(r"(add|sub)(\.ftz|\.sat)*\.(f32|f32x2|f64|f16|f16x2|bf16|bf16x2)")
_PASSED_ON = re.compile(r"(mov|neg)\..*")  # a multiply-add can take a negative factor


# Instructions that write their first operand, and nothing that a sum could take a product's place in.
_WRITTEN = re.compile(r"(mov|neg|fma|add|sub|mul|mad|div|ex2|rcp|rsqrt|max|min|selp|cvt|ld|shfl|wgmma|mma)\..*")
Held = dict[Register, Instruction]  # a register -> the product that it may hold


def contractable(program: Program) -> list[tuple[Instruction, Instruction]]:
    """(product, sum that takes it) of all that may become one multiply-add. What a register holds is followed along every way
    through the program. A product that others take too is not told apart: a pair may be listed that can't be, none is left out."""
    held = _held(program)
    return [
        (before[operand], i)
        for i, before in zip(program.instructions, held, strict=True)
        if _SUM.fullmatch(i.opcode)
        for operand in _registers(*i.operands[1:])
        if operand in before
    ]


def _held(program: Program) -> list[Held]:
    """What may be held where each instruction begins."""
    held: list[Held | None] = [None] * len(program.instructions)  # None: not reached yet
    held[:1] = [{}]
    todo = [0]
    while todo:
        index = todo.pop()
        before = held[index]
        assert before is not None
        after = _after(program.instructions[index], before)
        for following in _following(program, index):
            known = held[following]
            if known is None or not after.keys() <= known.keys():
                held[following] = after | (known or {})
                todo.append(following)
    return [before or {} for before in held]


def _following(program: Program, index: int) -> list[int]:
    """The instructions that may run next. Raises PtxError where a branch does not name its target: a way would be lost."""
    i = program.instructions[index]
    opcode, found = i.opcode.partition(".")[0], []
    if opcode in ("bra", "brx"):
        target = i.operands[0]
        if opcode == "brx" or not isinstance(target, Literal) or target.text not in program.labels:
            raise PtxError(f"where it goes is not known: {i}")
        found = [program.labels[target.text]]
    if opcode not in ("bra", "ret") or i.guard is not None:
        found.append(index + 1)
    return [following for following in found if following < len(program.instructions)]


def _after(i: Instruction, before: Held) -> Held:
    """What may be held behind an instruction."""
    written = list(_registers(*i.operands[:1]))
    if _PRODUCT.fullmatch(i.opcode):
        return before | dict.fromkeys(written, i)
    after = before
    if _WRITTEN.fullmatch(i.opcode) and i.guard is None and not before.keys().isdisjoint(written):
        after = {register: product for register, product in before.items() if register not in written}
    if _PASSED_ON.fullmatch(i.opcode):
        for source in [register for register in _registers(*i.operands[1:]) if register in before]:
            after = after | dict.fromkeys(written, before[source])
    return after


def _registers(*operands: Operand) -> Iterator[Register]:
    for operand in operands:
        if isinstance(operand, Group):
            yield from _registers(*operand.items)
        elif isinstance(operand, Register):
            yield operand
