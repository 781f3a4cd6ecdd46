"""What instructions do that others can see: memory, barriers, branches, and the start and end of what runs asynchronously.

Owns the table of these instructions; one that is in neither it nor `arithmetic` is refused by name. TMA and bulk stores are in
`tma`, wgmma in `wgmma`, mma.sync and cp.async in `ampere`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.ptx import ampere, tma, wgmma
from scripts.ptx.access import Access, Action, address, make_values, one_lane, uniform
from scripts.ptx.arithmetic import DTYPES, LANES
from scripts.ptx.machine_code import BLOCKED, Banks
from scripts.ptx.program import Group, Instruction, Literal, Program, PtxError
from scripts.ptx.shadow import chunks_of

TRY_AGAIN = 0.3  # of the waits that find a phase going on, those that time out and loop


def operation(i: Instruction, banks: Banks, program: Program) -> Action:
    """What an instruction does. Raises PtxError for one that is not known."""
    for pattern, make in _TABLE:
        if pattern.fullmatch(i.opcode):
            return make(Access(i, banks, program))
    raise PtxError(f"unknown instruction {i.opcode}: {i}")


# Control flow: 9.7.12.


def _branch(a: Access) -> Action:
    (label,) = a.operands
    assert isinstance(label, Literal)
    if label.text not in a.program.labels:
        raise PtxError(f"{a.i}: no label {label.text}")
    to = a.program.labels[label.text]

    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("a branch that only some lanes of the warp take is not known")
        return to

    return act


def _return(a: Access) -> Action:
    def act(warp, lanes):
        if lanes is not None:
            raise PtxError("a return of only some lanes is not known")
        warp.check_end()
        warp.ended = True

    return act


def _nothing(a: Access) -> Action:
    return lambda warp, lanes: None


# Loads and stores: 9.7.9.


def _vector(a: Access, operand, prefix: str) -> tuple[list[int], str]:
    """The rows of a scalar or a vector, and its elements' type."""
    t = a.i.opcode.rsplit(".", 1)[1]
    items = operand.items if isinstance(operand, Group) else (operand,)
    return [a.banks.row(item, t) for item in items], t


def _load_global(a: Access) -> Action:
    to, _ = a.operands
    at = address(a, a.operands[1])
    memory_type = a.i.opcode.rsplit(".", 1)[1]
    t = memory_type
    if memory_type == "s32" and not isinstance(to, Group) and getattr(to, "bank", "") == "b64":
        t = "s64"  # a load into a wider register extends the sign (9.7.9.8)
    rows = [a.banks.row(item, t) for item in (to.items if isinstance(to, Group) else (to,))]
    size = np.dtype(DTYPES[memory_type]).itemsize * len(rows)

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        data = warp.block.memory.read(at(warp)[on], size, "ld.global").view(DTYPES[memory_type])
        for k, row in enumerate(rows):
            warp.registers[t][row, on] = data[:, k]

    return act


def _store_global(a: Access) -> Action:
    at = address(a, a.operands[0])
    rows, t = _vector(a, a.operands[1], "st")

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        data = np.ascontiguousarray(np.stack([warp.registers[t][row, on] for row in rows], axis=1))
        warp.block.memory.write(at(warp)[on], data.view(np.uint8), "st.global")

    return act


def _load_shared(a: Access) -> Action:
    at = address(a, a.operands[1])
    rows, t = _vector(a, a.operands[0], "ld")
    size = np.dtype(DTYPES[t]).itemsize * len(rows)

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        data = read_shared(warp, at(warp)[on], size, "ld.shared").view(DTYPES[t])
        for k, row in enumerate(rows):
            warp.registers[t][row, on] = data[:, k]

    return act


def _store_shared(a: Access) -> Action:
    at = address(a, a.operands[0])
    rows, t = _vector(a, a.operands[1], "st")

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        data = np.ascontiguousarray(np.stack([warp.registers[t][row, on] for row in rows], axis=1))
        write_shared(warp, at(warp)[on], data.view(np.uint8), "st.shared")

    return act


def read_shared(warp, at: np.ndarray, size: int, what: str) -> np.ndarray:  # u8[n, size]
    """A read by the generic proxy."""
    warp.block.shared.check(at, size, what)
    warp.block.shadow.read(warp.number, warp.clock[warp.number], warp.clock, chunks_of(at, size), what)
    return warp.block.shared.read(at, size)


def write_shared(warp, at: np.ndarray, data: np.ndarray, what: str) -> None:
    """A write by the generic proxy."""
    warp.block.shared.check(at, data.shape[1], what)
    if len(set(at.tolist())) != len(at):
        _, first, which = np.unique(at, return_index=True, return_inverse=True)
        if (data != data[first][which]).any():
            raise PtxError(f"{what}: two lanes write different values to one place")
    warp.block.shadow.write(warp.number, warp.clock[warp.number], warp.clock, chunks_of(at, data.shape[1]), what)
    warp.block.shared.write(at, data)


# Matrices of 8x8 halves: 9.7.14.5.15 and .16. Lane l has elements [l / 4][2 (l % 4)] and the next.


def _matrices(a: Access, values: Group) -> tuple[int, bool, np.ndarray]:
    m = re.fullmatch(r"(?:ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", a.i.opcode)
    if m is None or len(values.items) != int(m[1]):
        raise PtxError(f"{a.i}: the form {a.i.opcode} is not known")
    return int(m[1]), m[2] is not None, np.array([a.banks.row(item, "b32") for item in values.items])


def _load_matrix(a: Access) -> Action:
    count, transposed, rows = _matrices(a, a.group(0))
    at = address(a, a.operands[1])

    def act(warp, lanes):
        whole(lanes)
        data = read_shared(warp, at(warp)[: 8 * count], 16, "ldmatrix").view(np.uint16).reshape(count, 8, 8)
        data = np.ascontiguousarray(data.swapaxes(1, 2)) if transposed else data
        warp.registers["b32"][rows] = data.view(np.uint32).reshape(count, len(LANES))

    return act


def _store_matrix(a: Access) -> Action:
    count, transposed, rows = _matrices(a, a.group(1))
    at = address(a, a.operands[0])

    def act(warp, lanes):
        whole(lanes)
        data = warp.registers["b32"][rows].view(np.uint16).reshape(count, 8, 8)
        data = np.ascontiguousarray(data.swapaxes(1, 2)) if transposed else data
        write_shared(warp, at(warp)[: 8 * count], data.reshape(8 * count, 8).view(np.uint8), "stmatrix")

    return act


def whole(lanes: np.ndarray | None) -> None:
    """PtxError unless the whole warp takes part, as `.aligned` asks for."""
    if lanes is not None:
        raise PtxError("only some lanes of the warp take part")


# Barriers of the block: 9.7.13.1.


def _bar_sync(a: Access) -> Action:
    number = make_values(a, a.operands[0], "u32")
    count = make_values(a, a.operands[1], "u32") if len(a.operands) > 1 else None

    def act(warp, lanes):
        whole(lanes)
        block = warp.block
        threads = 32 * len(block.warps) if count is None else uniform(count(warp))
        block.named_barrier(uniform(number(warp)), threads, warp)
        return BLOCKED

    return act


# Mbarriers: 9.7.13.15.


def _init(a: Access) -> Action:
    at, count = address(a, a.operands[0]), make_values(a, a.operands[1], "u32")

    def act(warp, lanes):
        lane = one_lane(lanes)
        warp.block.make_barrier(warp, int(at(warp)[lane]), int(count(warp)[lane]), a.i.source)

    return act


def _fence_init(a: Access) -> Action:
    """fence.mbarrier_init (9.7.13.4) and fence.proxy.async alike make an initialised barrier visible to TMA."""

    def act(warp, lanes):
        whole(lanes)
        warp.block.fence_barriers(warp)

    return act


def _fence_proxy(a: Access) -> Action:
    def act(warp, lanes):
        whole(lanes)
        warp.block.entities.fence(warp.clock)
        warp.block.fence_barriers(warp)
        warp.tick()  # what the warp does from here on is not behind this fence

    return act


def _arrive(a: Access) -> Action:
    """By every active lane, each for itself: the warp's sum."""
    at = address(a, a.operands[1])
    expects = ".expect_tx." in a.i.opcode
    amount = make_values(a, a.operands[2], "u32") if len(a.operands) > 2 else None

    def act(warp, lanes):
        on = LANES if lanes is None else np.flatnonzero(lanes)
        total = len(on) if amount is None else int(amount(warp)[on].astype(np.int64).sum())
        barrier = warp.block.barrier(warp, uniform(at(warp)[on]))
        barrier.arrive(len(on) if expects else total, total if expects else 0, warp.clock)
        warp.tick()

    return act


def _wait(a: Access) -> Action:
    """try_wait: returns true when the phase is over, or false after a time, which may come at any moment."""
    done, at, parity = a.banks.row(a.operands[0], "pred"), address(a, a.operands[1]), make_values(a, a.operands[2], "u32")

    def act(warp, lanes):
        whole(lanes)
        block = warp.block
        barrier, which = block.barrier(warp, uniform(at(warp))), uniform(parity(warp))
        over = barrier.is_over(which)
        if not over and block.random.random() >= TRY_AGAIN:
            warp.waiting = lambda: barrier.is_over(which)
            return BLOCKED
        if over:
            barrier.see(warp.number, which)
            np.maximum(warp.clock, barrier.clock, out=warp.clock)
        warp.registers["pred"][done] = over
        return None

    return act


_TABLE: tuple[tuple[re.Pattern[str], Callable[[Access], Any]], ...] = tuple(
    (re.compile(pattern), make)
    for pattern, make in (
        (r"bra(\.uni)?", _branch),
        (r"ret", _return),
        # Hints; and what only moves registers between warps, which `aot_check` adds up.
        (r"prefetch\.tensormap|setmaxnreg\.(inc|dec)\.sync\.aligned\.u32", _nothing),
        (r"ld\.global(\.v[24])?\.[bus](16|32|64)", _load_global),
        (r"st\.global(\.v[24])?\.[bus](16|32|64)", _store_global),
        (r"ld\.shared(\.v[24])?\.b(16|32|64)", _load_shared),
        (r"st\.shared(\.v[24])?\.b(16|32|64)", _store_shared),
        (r"ldmatrix\..*", _load_matrix),
        (r"stmatrix\..*", _store_matrix),
        (r"bar\.sync", _bar_sync),
        (r"mbarrier\.init\.shared\.b64", _init),
        (r"fence\.mbarrier_init\.release\.cluster", _fence_init),
        (r"fence\.proxy\.async(\.shared::cta)?", _fence_proxy),
        (r"mbarrier\.arrive(\.release\.cta)?(\.expect_tx)?\.shared(::cta)?\.b64", _arrive),
        (r"mbarrier\.try_wait\.parity\.shared\.b64", _wait),
        (r"ld(\.v[24])?\.[bus](16|32|64)", _load_global),  # a generic address, which is one of global memory here
        *ampere.TABLE,
        *tma.TABLE,
        *wgmma.TABLE,
    )
)
