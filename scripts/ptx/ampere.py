"""What GPUs before Hopper multiply and copy with: mma.sync (PTX ISA 9.7.14.5), cp.async of 4 to 16 bytes (9.7.9.25.3).

A cp.async starts when it is issued, and its bytes move at any time after that. It is ordered before nothing, not even before
another one of its thread, until its thread has waited for its group (8.9.1.1: what a program must wait for). It belongs to the
generic proxy: no fence is needed between it and ld, st or ldmatrix.
"""

from __future__ import annotations

import re

import numpy as np

from scripts.ptx.access import Access, Action, address, make_values
from scripts.ptx.arithmetic import LANES
from scripts.ptx.machine_code import BLOCKED
from scripts.ptx.program import Literal, PtxError
from scripts.ptx.shadow import chunks_of
from scripts.ptx.warp import Store
from scripts.ptx.wgmma import floats

# m16n8k16 (9.7.14.5.8): of each register of a lane, the rows and columns of its two halves. B is held by columns.
_GROUP, _THREAD = LANES // 4, 2 * (LANES % 4)  # of a lane: its row of a fragment, its first column


def _places(shifts: tuple[tuple[int, int], ...], halves: int) -> tuple[np.ndarray, np.ndarray]:  # [registers, lanes, halves] each
    """(rows, columns) of registers. shifts: of each, what is added to its lane's row and column."""
    rows = np.stack([_GROUP + down for down, _ in shifts])[..., None] + np.zeros(halves, int)
    return rows, np.stack([_THREAD + along for _, along in shifts])[..., None] + np.arange(halves)


_A = _places(((0, 0), (8, 0), (0, 8), (8, 8)), 2)
_B = _places(((0, 0), (0, 8)), 2)
_D = tuple(place[..., 0] for place in _places(((0, 0), (0, 1), (8, 0), (8, 1)), 1))  # float32: one element a register
_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")


def _multiply(a: Access) -> Action:
    """D = A B + C: exact products, summed in float64 and rounded once. (9.7.14.5.14 leaves order and rounding of the sum open.)"""
    form = _MMA.fullmatch(a.i.opcode)
    if form is None:
        raise PtxError(f"{a.i}: the form {a.i.opcode} is not known")
    kind = form[1]
    groups = [a.group(number).items for number in range(4)]
    if [len(items) for items in groups] != [4, 4, 2, 4]:
        raise PtxError(f"{a.i}: registers of m16n8k16 are 4, 4, 2 and 4")
    types = zip(groups, ("f32", "b32", "b32", "f32"), strict=True)
    to, left, right, old = (np.array([a.banks.row(item, t) for item in items]) for items, t in types)

    def halves(words):  # uint32[registers, lanes] -> float64[registers, lanes, 2], the lower half first
        return floats(words.view(np.uint16).reshape(*words.shape, 2), kind)

    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("only some lanes of the warp take part")
        words, numbers = warp.registers["b32"], warp.registers["f32"]
        A, B = np.empty((16, 16)), np.empty((8, 16))
        A[_A], B[_B] = halves(words[left]), halves(words[right])
        product = np.einsum("mk,nk->mn", A, B)  # each element by itself, in the same order
        numbers[to] = (product[_D] + numbers[old].astype(np.float64)).astype(np.float32)

    return act


def _copy(a: Access) -> Action:
    """cp.async (9.7.9.25.3.1) by each active lane; bytes past src-size are zeros."""
    to, of = address(a, a.operands[0]), address(a, a.operands[1])
    size_operand = a.operands[2]
    if not isinstance(size_operand, Literal):
        raise PtxError(f"{a.i}: cp-size must be a constant")
    size = int(size_operand.text)
    if size not in ((16,) if ".cg." in a.i.opcode else (4, 8, 16)):
        raise PtxError(f"{a.i}: cp-size {size} is not known")
    read_size = make_values(a, a.operands[3], "u32") if len(a.operands) > 3 else None

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        block, target, source = warp.block, to(warp)[on], of(warp)[on]
        reads = np.full(len(on), size) if read_size is None else read_size(warp)[on].astype(np.int64)
        if ((reads != 0) & (reads != size)).any():
            raise PtxError(f"cp.async with src-size {sorted(set(reads.tolist()))} of {size} is not known")
        if len(np.unique(target)) != len(target):
            raise PtxError("cp.async: two lanes write one place")
        block.shared.check(target, size, "cp.async")
        chunks = chunks_of(target, size)
        block.shadow.write(block.entities.copies(warp.number), warp.copies_committed + 1, warp.clock, chunks, "cp.async")

        def finish():
            data, some = np.zeros((len(on), size), np.uint8), reads > 0
            data[some] = block.memory.read(source[some], size, "cp.async")
            block.shared.write(target, data)
            copy.done = True

        copy = Store(finish)
        warp.copies.append(copy)
        block.start(finish)

    return act


def _commit(a: Access) -> Action:
    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("cp.async.commit_group of only some lanes is not known")
        warp.copy_groups.append(warp.copies)
        warp.copies = []
        warp.copies_committed += 1

    return act


def _wait(a: Access) -> Action:
    """At most n of the last groups are still on their way (9.7.9.25.3.3). Each thread sees its own copies alone: the warp sees all
    of its behind the next barrier (`Block.named_barrier`)."""
    (count,) = a.operands
    assert isinstance(count, Literal)
    left = int(count.text)

    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("cp.async.wait_group of only some lanes is not known")
        old = warp.copy_groups[: max(len(warp.copy_groups) - left, 0)]
        if not all(copy.done for group in old for copy in group):
            warp.waiting = lambda: all(copy.done for group in old for copy in group)
            return BLOCKED
        warp.copy_groups = warp.copy_groups[len(old) :]
        warp.copies_waited = max(warp.copies_waited, warp.copies_committed - left)
        return None

    return act


TABLE = (
    (r"mma\.sync\..*", _multiply),
    (r"cp\.async\.(ca|cg)\.shared\.global", _copy),
    (r"cp\.async\.commit_group", _commit),
    (r"cp\.async\.wait_group", _wait),
)
