"""wgmma: products of a warpgroup that run asynchronously (PTX ISA 9.7.15).

Each warp computes 16 of the 64 rows. Its part reads its operands at any time from its issue until the warp has waited for its
group, and its results come then. As the warpgroup does it together, a warp's part counts as a reader of all that the instruction
reads: what any of its warps may see must be ordered for every one.

A product of 16 columns is summed in float64 in one order and added to the accumulator with one rounding. What the hardware rounds
is not defined by PTX: equal bits here say that two programs do the same in the same order, not what a GPU's bits are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np

from scripts.ptx.access import Access, Action, make_values, uniform
from scripts.ptx.arithmetic import LANES
from scripts.ptx.memory import SHARED_BASE, swizzled
from scripts.ptx.program import Group, Literal, PtxError
from scripts.ptx.shadow import CHUNK
from scripts.ptx.warp import Wgmma

DEPTH = 16  # columns of A and rows of B that one instruction multiplies: 32 bytes of 16-bit elements
_PATTERN = {1: 128, 2: 64, 3: 32, 0: 0}  # a descriptor's bits 62 and 63 -> bytes of the swizzle
_GROUP, _THREAD = LANES // 4, LANES % 4
# (row, column) of a lane's registers: of one element each within 8 columns of the accumulator, of the first of two elements each of
# A (9.7.15.5.1.1, for m64nNk16).
_ACCUMULATOR = ((0, 0), (0, 1), (8, 0), (8, 1))
_A = ((0, 0), (8, 0), (0, 8), (8, 8))


@functools.cache
def _accumulated(columns: int) -> tuple[np.ndarray, np.ndarray]:  # [columns // 2, lanes] each
    """(rows, columns) of the elements that a warp's accumulators hold."""
    places = [(_GROUP + row, 8 * j + 2 * _THREAD + column) for j in range(columns // 8) for row, column in _ACCUMULATOR]
    return np.stack([rows for rows, _ in places]), np.stack([column for _, column in places])


def operand_places(descriptor: int, rows: int, transposed: bool) -> np.ndarray:  # i64[rows, DEPTH]
    """The byte addresses of a matrix's elements (i, k) in shared memory: 16 bits each, k along DEPTH, i along M or N. transposed:
    i is the dimension that is contiguous. Descriptor: 9.7.15.5.1.2.2, canonical layouts: 9.7.15.5.1.2.1."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    pattern = _PATTERN[descriptor >> 62 & 3]
    if descriptor >> 49 & 7:
        raise PtxError(f"a wgmma descriptor with a base offset is not known: {descriptor:#x}")
    if pattern not in (128, 64):
        raise PtxError(f"a wgmma operand with a swizzle of {pattern} bytes is not known: {descriptor:#x}")
    return start + _places(start % 1024, leading, stride, rows, transposed, pattern)


@functools.cache
def _places(phase: int, leading: int, stride: int, rows: int, transposed: bool, width: int) -> np.ndarray:
    """Offsets from the start, which is `phase` bytes into 1024. width: bytes of a row of the swizzle's pattern."""
    i, k = np.arange(rows)[:, None], np.arange(DEPTH)
    if transposed:  # as many elements along i as the width has; 8 of k a core matrix
        elements = width // 2
        plain = i // elements * leading + k // 8 * stride + k % 8 * width + i % elements * 2
    else:
        plain = i // 8 * stride + i % 8 * width + k * 2
    return swizzled(phase + plain, width) - phase


def floats(bits: np.ndarray, kind: str) -> np.ndarray:
    """f64 of 16-bit elements."""
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


class _Form:
    """The parts of one mma_async: m64nNk16 with float32 accumulators and two matrices of one 16-bit type."""

    def __init__(self, a: Access):
        m = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", a.i.opcode)
        if m is None:
            raise PtxError(f"unknown instruction {a.i.opcode}: {a.i}")
        self.columns, self.kind = int(m[1]), m[2]
        self.accumulator = np.array([a.banks.row(item, "b32") for item in a.group(0).items])
        left, right, keep, *numbers = a.operands[1:]
        self.in_registers = isinstance(left, Group)
        items = left.items if isinstance(left, Group) else ()
        self.left_rows = np.array([a.banks.row(item, "b32") for item in items], np.int64)
        self.left = None if self.in_registers else make_values(a, left, "u64")
        self.right = make_values(a, right, "u64")
        self.keep = make_values(a, keep, "pred")
        texts = [n.text if isinstance(n, Literal) else "" for n in numbers]
        if len(self.accumulator) != self.columns // 2 or texts[:2] != ["1", "1"] or len(texts) != 4 - self.in_registers:
            raise PtxError(f"{a.i}: scales other than 1, or operands that are not known")
        self.left_transposed = not self.in_registers and texts[2] == "1"
        self.right_transposed = texts[-1] == "1"


def _multiply(a: Access) -> Action:
    form = _Form(a)

    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("only some lanes of the warp take part in a wgmma")
        used = np.concatenate([form.accumulator, form.left_rows])
        if warp.unfenced[used].any():
            names = warp.block.register_names(used[warp.unfenced[used]])
            raise PtxError(f"wgmma uses {', '.join(names[:4])}, accessed since the last wgmma.fence")
        if warp.accumulating[form.left_rows].any():
            raise PtxError("wgmma multiplies registers that another one still accumulates in")
        warp.wgmmas_issued += 1
        warp.wgmmas.append(_issue(form, warp))
        warp.accumulating[form.accumulator] = True
        warp.multiplying[form.left_rows] = True

    return act


def _issue(form: _Form, warp) -> Wgmma:
    """Notes what it reads, and makes what it computes; half of them compute at once, the others when they are waited for."""
    block, epoch = warp.block, warp.wgmmas_issued
    earlier = _earlier(form, warp)
    left = _read_registers(form, warp) if form.in_registers else _read_shared(form.left, form.left_transposed, 64, form, warp, "A")
    right = _read_shared(form.right, form.right_transposed, form.columns, form, warp, "B")
    keep = bool(uniform(form.keep(warp)))

    def run():
        if wgmma.results is not None:
            return
        if earlier is not None:
            earlier.run()
        rows = left()
        rows = rows if form.in_registers else rows[16 * (warp.number % 4) :][:16]
        # einsum sums each element along DEPTH by itself, in the same order whatever the shape.
        product = np.einsum("mk,nk->mn", rows, right())
        mine = product[_accumulated(form.columns)]
        if keep:
            old = warp.registers["b32"][form.accumulator] if earlier is None else earlier.results
            assert old is not None
            mine += old.view(np.float32)
        wgmma.results = mine.astype(np.float32).view(np.uint32)

    wgmma = Wgmma(run, form.accumulator, form.left_rows, epoch)
    if block.random.random() < block.eager:
        run()
    return wgmma


def _earlier(form: _Form, warp) -> Wgmma | None:
    """The wgmma on its way that accumulates in the same registers. It must have the same shape (9.7.15.7.1)."""
    for other in reversed([*(w for group in warp.wgmma_groups for w in group), *warp.wgmmas]):
        if np.array_equal(other.registers, form.accumulator):
            return other
        if np.isin(other.registers, form.accumulator).any():
            raise PtxError("wgmma accumulates in some registers of another one that is on its way")
    return None


def _read_registers(form: _Form, warp) -> Callable[[], np.ndarray]:
    bits = warp.registers["b32"][form.left_rows].copy()

    def read():
        matrix = np.empty((16, DEPTH), np.uint16)
        for value, (row, column) in zip(bits, _A, strict=True):
            matrix[_GROUP + row, 2 * _THREAD + column] = value.astype(np.uint16)
            matrix[_GROUP + row, 2 * _THREAD + column + 1] = value >> np.uint32(16)
        return floats(matrix, form.kind)

    return read


@functools.lru_cache(maxsize=1024)
def _operand(descriptor: int, rows: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(`operand_places`, the chunks that they lie in)."""
    places = operand_places(descriptor, rows, transposed)
    return places, np.unique(places[:: 1 if not transposed else 8] // CHUNK)


def _read_shared(descriptor, transposed: bool, rows: int, form: _Form, warp, name: str) -> Callable[[], np.ndarray]:
    block = warp.block
    places, chunks = _operand(int(uniform(descriptor(warp))), rows, transposed)
    if places.min() < SHARED_BASE or places.max() + 2 > block.shared.end:
        raise PtxError(f"matrix {name} of a wgmma lies outside of shared memory")
    entity = block.entities.wgmmas(warp.number)
    block.shadow.read(entity, warp.wgmmas_issued, warp.clock, chunks, f"matrix {name} of a wgmma")
    return lambda: floats(block.shared.read(places, 2).view(np.uint16)[..., 0], form.kind)


def _fence(a: Access) -> Action:
    def act(warp, lanes):
        warp.unfenced[:] = False

    return act


def _commit(a: Access) -> Action:
    def act(warp, lanes):
        warp.wgmma_groups.append(warp.wgmmas)
        warp.wgmmas = []

    return act


def _wait(a: Access) -> Action:
    """At most n of the last groups are still on their way; the others' results are there (9.7.15.7.3)."""
    (count,) = a.operands
    assert isinstance(count, Literal)
    left = int(count.text)

    def act(warp, lanes):
        while len(warp.wgmma_groups) > left:
            for wgmma in warp.wgmma_groups.pop(0):
                wgmma.run()
                warp.registers["b32"][wgmma.registers] = wgmma.results
                warp.clock[warp.block.entities.wgmmas(warp.number)] = wgmma.epoch
        warp.accumulating[:] = warp.multiplying[:] = False
        for wgmma in [*(w for group in warp.wgmma_groups for w in group), *warp.wgmmas]:
            warp.accumulating[wgmma.registers] = True
            warp.multiplying[wgmma.operands] = True

    return act


TABLE = (
    (r"wgmma\.mma_async\..*", _multiply),
    (r"wgmma\.fence\.sync\.aligned", _fence),
    (r"wgmma\.commit_group\.sync\.aligned", _commit),
    (r"wgmma\.wait_group\.sync\.aligned", _wait),
)
