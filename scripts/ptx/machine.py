"""Runs a launch: thread blocks one after the other, a block's warps in an adversarial order.

A schedule is made from a seed. It says whose turn it is, for how long, when what is asynchronous moves its bytes, and which lane
elect.sync elects. One seed in five draws all of that at random; the others keep to an extreme: one warp, or one warpgroup, far
ahead of the others (random priorities, as probabilistic concurrency testing has them: Burckhardt et al. 2010), what is asynchronous
as late as can be, or as early.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np

from scripts.ptx.barriers import Mbarrier
from scripts.ptx.launch import Launch
from scripts.ptx.machine_code import Banks, assemble
from scripts.ptx.memory import GlobalMemory, SharedMemory
from scripts.ptx.operations import operation
from scripts.ptx.program import Program, PtxError
from scripts.ptx.shadow import MAX_BARRIERS, Entities, Shadow
from scripts.ptx.warp import Warp

MAX_STEPS = 3_000_000  # of a block: past that it is taken to hang


@dataclasses.dataclass(frozen=True)
class Result:
    """arrays: what the launch's arrays hold. covered: bool[instructions], those that ran."""

    arrays: list[np.ndarray]
    covered: np.ndarray


@dataclasses.dataclass(frozen=True)
class Schedule:
    """turns: how many steps a warp may have before another's turn, drawn from these. ahead: whether the turn is always that of the
    highest priority that can go. asynchronous: chance before a turn that a copy ends. eager: chance that a wgmma computes at once.
    """

    turns: tuple[int, ...]
    ahead: bool
    asynchronous: float
    eager: float


SCHEDULES = (
    Schedule(turns=(1, 3, 10, 60), ahead=False, asynchronous=0.2, eager=0.5),
    Schedule(turns=(1, 10, 60), ahead=True, asynchronous=1.0, eager=1.0),
    Schedule(turns=(1000,), ahead=True, asynchronous=0.05, eager=0.5),
    Schedule(turns=(1, 3, 10), ahead=False, asynchronous=0.0, eager=0.0),
    Schedule(turns=(10, 60), ahead=False, asynchronous=1.0, eager=1.0),
)


def run(program: Program, launch: Launch, arrays: Sequence[np.ndarray], *, seed: int = 0) -> Result:
    """Runs every block of the grid in the schedule of a seed. Raises PtxError for what PTX does not define, a race, a hang."""
    if launch.threads != program.threads:
        raise PtxError(f"{program.name} is for {program.threads} threads and launched with {launch.threads}")
    if len(launch.params) != len(program.params):
        raise PtxError(f"{program.name} has {len(program.params)} parameters and is launched with {len(launch.params)}")
    draw = random.Random(seed)
    memory = GlobalMemory(arrays)
    banks = Banks(program, dict(enumerate(memory.address)), launch)
    units = assemble(program, banks, operation)
    covered = np.zeros(len(program.instructions), bool)
    X, Y, Z = launch.grid
    blocks = [(x, y, z) for z in range(Z) for y in range(Y) for x in range(X)]
    draw.shuffle(blocks)
    with np.errstate(all="ignore"):
        for index in blocks:
            Block(program, launch, memory, banks, units, covered, index, draw, SCHEDULES[seed % len(SCHEDULES)]).run()
    return Result([memory.result(k) for k in range(len(memory.arrays))], covered)


class Block:
    """One thread block."""

    def __init__(self, program, launch, memory, banks, units, covered, index, draw, schedule: Schedule):
        self.program, self.launch, self.memory, self.banks = program, launch, memory, banks
        self.units, self.covered, self.index, self.random = units, covered, index, draw
        self.schedule, self.eager = schedule, schedule.eager
        num_warps = launch.threads // 32
        self.entities = Entities(num_warps)
        self.shared = SharedMemory(launch.smem)
        self.shadow = Shadow(self.entities, len(self.shared.bytes))
        self.barriers: dict[int, Mbarrier] = {}
        self._named: dict[int, list[Warp]] = {}
        self._pending: list[Callable[[], None]] = []
        self.warps = [self._make_warp(number) for number in range(num_warps)]
        # Either every warp has its own, or a whole warpgroup is ahead of another.
        groups = [draw.random() for _ in range(-(-num_warps // 4))] if draw.random() < 0.5 else [0.0] * num_warps
        self._priority = {warp: (groups[warp.number // 4], draw.random()) for warp in self.warps}

    def _make_warp(self, number: int) -> Warp:
        leader = self.random.randrange(32)
        lanes = np.arange(32)
        specials = {"%tid.x": 32 * number + lanes, "%leader": leader, "%is_leader": lanes == leader}
        specials |= {f"%ctaid.{axis}": at for axis, at in zip("xyz", self.index, strict=True)}
        registers = self.banks.fill(specials)
        return Warp(self, number, registers, len(registers["b32"]))

    def register_names(self, rows: np.ndarray) -> list[str]:
        names = {row: str(name) for name, row in self.banks.rows["b32"].items()}
        return [names[int(row)] for row in rows]

    def run(self) -> None:
        steps = 0
        while any(not warp.ended for warp in self.warps):
            ready = [warp for warp in self.warps if not warp.ended and (warp.waiting is None or warp.waiting())]
            if self._pending and (not ready or self.random.random() < self.schedule.asynchronous):
                self._pending.pop(self.random.randrange(len(self._pending)))()
                continue
            if not ready:
                self._deadlock()
            warp = max(ready, key=self._priority.__getitem__) if self.schedule.ahead else self.random.choice(ready)
            warp.waiting = None
            for _ in range(self.random.choice(self.schedule.turns)):
                steps += 1
                if not warp.step():
                    break
            if self.schedule.ahead and self.random.random() < 0.05:
                self._priority[warp] = (self._priority[warp][0], self.random.random())
            if steps > MAX_STEPS:
                raise PtxError(f"block {self.index}: {MAX_STEPS} steps and no end")
        while self._pending:
            self._pending.pop()()
        for barrier in self.barriers.values():
            barrier.check_end()

    def _deadlock(self) -> None:
        at = [f"warp {w.number} at {self.program.instructions[w.at]}" for w in self.warps if not w.ended]
        raise PtxError(f"block {self.index} hangs: {'; '.join(at)}")

    def start(self, finish: Callable[[], None]) -> None:
        """Something asynchronous begins; `finish` moves its bytes."""
        self._pending.append(finish)

    def named_barrier(self, number: int, threads: int, warp: Warp) -> None:
        """bar.sync: the last of the warps lets all go on."""
        if not 0 <= number < 16 or threads % 32 or not 0 < threads <= 32 * len(self.warps):
            raise PtxError(f"bar.sync of barrier {number} with {threads} threads")
        here = self._named.setdefault(number, [])
        here.append(warp)
        warp.waiting = lambda: False
        if len(here) < threads // 32:
            return
        for w in here:
            copies = self.entities.copies(w.number)
            w.clock[copies] = max(w.clock[copies], w.copies_waited)
        clock = np.maximum.reduce([w.clock for w in here])
        for w in here:
            w.clock = clock.copy()
            w.tick()
            self.covered[w.at] = True
            w.at += 1
            w.waiting = None
        del self._named[number]

    def make_barrier(self, warp: Warp, address: int, count: int, where: str) -> None:
        """mbarrier.init."""
        self.shared.check(np.array([address]), 8, "mbarrier.init")
        if address in self.barriers or len(self.barriers) == MAX_BARRIERS:
            raise PtxError(f"mbarrier.init at {address:#x}: it is a barrier already, or the {MAX_BARRIERS + 1}th")
        if count < 1:
            raise PtxError(f"mbarrier.init at {address:#x} for {count} arrivals")
        self.barriers[address] = Mbarrier(len(self.barriers), address, count, self.entities, where)
        self.barriers[address].made_by = (warp.number, int(warp.clock[warp.number]))

    def fence_barriers(self, warp: Warp) -> None:
        """What this warp knows to be initialised is visible to TMA from now on for what comes after."""
        for barrier in self.barriers.values():
            by, time = barrier.made_by
            if warp.clock[by] >= time and len(barrier.fenced) < len(self.warps):
                barrier.fenced.append((warp.number, int(warp.clock[warp.number])))

    def barrier(self, warp: Warp, address: int, *, asynchronous: bool = False) -> Mbarrier:
        """The barrier at an address. PtxError if this warp need not see that it is initialised, or the async proxy need not."""
        if address not in self.barriers:
            raise PtxError(f"no mbarrier at {address:#x}")
        barrier = self.barriers[address]
        by, time = barrier.made_by
        if warp.clock[by] < time:
            raise PtxError(f"{barrier}: used, unordered with its mbarrier.init by warp {by}")
        if asynchronous and not any(warp.clock[w] >= t for w, t in barrier.fenced):
            raise PtxError(f"{barrier}: used by a TMA; no fence.mbarrier_init or fence.proxy.async came between its init and this")
        return barrier
