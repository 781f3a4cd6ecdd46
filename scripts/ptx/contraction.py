"""Products and sums in PTX that ptxas may make one: their bits are not those of the PTX as it is written.

Owns one question, asked of a kernel's text. `arithmetic` rounds a product and a sum one after the other; so does the GPU where they
carry `.rn`, or where no sum takes a product.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.ptx.program import Group, Instruction, Operand, Program, Register

# PTX ISA, 9.7.3 to 9.7.5 (add, sub, mul of floats, halves, mixed precision): "mul/add and mul/sub sequences with no rounding
# modifiers may be optimized to use fused-multiply-add instructions on the target device".
_PRODUCT = re.compile(r"mul(\.ftz|\.sat)*\.(f32|f32x2|f64|f16|f16x2|bf16|bf16x2)")
_SUM = re.compile(r"(add|sub)(\.ftz|\.sat)*\.(f32|f32x2|f64|f16|f16x2|bf16|bf16x2)")
_PASSED_ON = re.compile(r"(mov|neg)\..*")  # a multiply-add can take a negative factor


def contractable(program: Program) -> list[tuple[Instruction, Instruction]]:
    """(product, sum that takes it) of all that may become one multiply-add. A register that two instructions write, and a product
    that others take too, are not told apart: a pair may be listed that can't be, and none is left out."""
    products: dict[Register, Instruction] = {}
    for i in program.instructions:
        if _PRODUCT.fullmatch(i.opcode):
            products |= dict.fromkeys(_registers(i.operands[0]), i)
    size = -1
    while size != len(products):
        size = len(products)
        for i in program.instructions:
            if _PASSED_ON.fullmatch(i.opcode):
                for source in [register for register in _registers(*i.operands[1:]) if register in products]:
                    for register in _registers(i.operands[0]):
                        products.setdefault(register, products[source])
    return [
        (products[operand], i)
        for i in program.instructions
        if _SUM.fullmatch(i.opcode)
        for operand in _registers(*i.operands[1:])
        if operand in products
    ]


def _registers(*operands: Operand) -> Iterator[Register]:
    for operand in operands:
        if isinstance(operand, Group):
            yield from _registers(*operand.items)
        elif isinstance(operand, Register):
            yield operand
