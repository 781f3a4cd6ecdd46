"""A static roofline of our kernels' loops: what an iteration issues, and in how many cycles a Hopper SM would do it by a model.

The model, none of which was read off a card:
- Each of an SM's four sub-partitions holds one warp of every warpgroup that computes; one instruction issues a cycle.
- The compiler's control codes say when a warp may issue again, and which results it waits for. LATENCY says how long those take.
- A unit with fewer than 32 lanes takes a warp's next instruction after UNITS' cycles: lanes from the CUDA C++ Programming Guide's
  table of throughputs for compute capability 9.0.
- wgmma of 64 x N x 16 takes N / 2 cycles of the tensor cores: 4,096 16-bit operations a cycle and SM, which is 989 TFLOP/s of an
  H100 SXM at 1.83 GHz and 132 SMs (NVIDIA H100 data sheet). They do one at a time, in order.
- Loads have arrived: a wait for TMA or for the other warpgroup's data succeeds at once, and nothing couples warpgroups but the
  units they share. Neither device memory's bandwidth is in it nor shared memory's, all of which 64 x 64 x 16 takes from there.
- All blocks that fit an SM run, and all warpgroups go the same way round.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.aot.machine_code import MachineCode, Sass

LATENCY = {  # cycles until a result is there; of those that a scoreboard barrier guards
    "MUFU": 24, "SHFL": 24, "LDS": 30, "LDSM": 33, "LDG": 300, "SYNCS": 24, "R2UR": 12, "S2UR": 20, "STS": 20, "STSM": 24,
    "BAR": 26, "LDC": 40, "UTMALDG": 20, "FENCE": 20, "MEMBAR": 20, "VOTEU": 12,
}  # fmt: skip
OTHER_LATENCY, READ_LATENCY, WGMMA_START, WGMMA_SEEN = 20, 12, 8, 16
UNITS = {"xu": 8, "alu": 2, "imad": 2, "shuffle": 4}  # cycles until the next instruction of a warp; all others: 1
_ALU = ("FMNMX F2FP ISETP FSEL SEL PRMT LOP3 FSETP SHF VIADD IADD3 LEA VIMNMX VIADDMNMX PLOP3 SGXT").split()
UNIT_OF = {"MUFU": "xu", "SHFL": "shuffle", "IMAD": "imad", **dict.fromkeys(_ALU, "alu")}
COUNTED = ("HGMMA", "HMMA", "MUFU", "SHFL", "BAR", "SYNCS", "FFMA", "FMUL", "FADD", "LDS", "LDSM", "STS", "LDG", "LDGSTS", "STG")
_ITERATIONS, _WARMED_UP = 40, 10
_WGMMA = re.compile(r"HGMMA\.64x(\d+)x16\b")


@dataclass(frozen=True)
class Way:
    """One way round a loop. instructions, counts: of a warp. cycles: an iteration of every warpgroup, once they are under way.
    alone: of one warpgroup without others. tensor: cycles in which the tensor cores work, of all warpgroups."""

    instructions: int
    counts: dict[str, int]
    cycles: int
    alone: int
    tensor: int

    @property
    def tensor_share(self) -> float:
        return self.tensor / self.cycles


@dataclass(frozen=True)
class LoopFigures:
    """A loop: its place (address of its first instruction), how deep it lies, the instructions in it but in no loop within, and of
    one that runs wgmma and holds no other loop the quickest and the slowest way round, of those that wait for a load."""

    address: int
    depth: int
    instructions: int
    counts: dict[str, int]
    quickest: Way | None = None
    slowest: Way | None = None


@dataclass(frozen=True)
class Roofline:
    """A kernel's loops, and what must be in none of them."""

    kernel: str
    warpgroups: int  # that compute
    loops: tuple[LoopFigures, ...]
    faults: tuple[str, ...] = field(default=())

    @property
    def longest(self) -> LoopFigures | None:
        """The loop with most instructions of its own."""
        return max(self.loops, key=lambda loop: loop.instructions, default=None)

    @property
    def main(self) -> LoopFigures | None:
        """The loop in which the tensor cores work most."""
        timed = [(loop.quickest.tensor, loop) for loop in self.loops if loop.quickest]
        return max(timed, key=lambda one: one[0])[1] if timed else None

    def as_json(self) -> dict[str, Any]:
        """Ways round a loop are left out where the model times none, which is in loops that run no wgmma or hold another loop."""
        loops = [{name: value for name, value in asdict(loop).items() if value is not None} for loop in self.loops]
        return asdict(self) | {"loops": loops}


def roofline(kernel: str, code: MachineCode, warpgroups: int) -> Roofline:
    """The figures of a kernel of which so many warpgroups compute."""
    loops, faults = [], []
    for loop in code.loops:
        own = code.instructions(loop.own - code.waiting)
        ways = code.ways(loop) if loop.innermost and _runs_wgmma(own) else []
        waiting = [way for way in ways if any("TRYWAIT" in i.opcode for i in way)]  # for a load; the last time round is without
        timed = sorted((_way(way, warpgroups) for way in waiting or ways if _runs_wgmma(way)), key=lambda way: way.cycles)
        first = code.blocks[loop.header].instructions[0].address
        quickest, slowest = (timed[0], timed[-1]) if timed else (None, None)
        loops.append(LoopFigures(first, loop.depth, len(own), _counts(own), quickest, slowest))
        faults += [f"{kernel}: in the loop at {first:#x}: {why}: {i}" for i in own for why in _unwanted(i)]
    return Roofline(kernel, warpgroups, tuple(loops), tuple(faults))


def _unwanted(i: Sass) -> list[str]:
    """Why an instruction should be in no loop."""
    if i.opcode.startswith("CCTL.IVALL"):
        return ["empties the L1 cache"]
    return ["local memory"] if i.base in ("LDL", "STL") else []


def _runs_wgmma(instructions: Sequence[Sass]) -> bool:
    return any(i.base == "HGMMA" for i in instructions)


def _counts(instructions: Sequence[Sass]) -> dict[str, int]:
    found = Counter(i.base for i in instructions)
    return {name: found[name] for name in COUNTED if found[name]}


def _way(way: list[Sass], warpgroups: int) -> Way:
    alone = round(cycles(way, 1))
    together = round(cycles(way, warpgroups)) if warpgroups > 1 else alone
    tensor = warpgroups * sum(_tensor_cycles(i) for i in way)
    return Way(len(way), _counts(way), together, alone, tensor)


def _tensor_cycles(i: Sass) -> int:
    """0 for an instruction that is not wgmma. ValueError for a shape of it that is not known."""
    if i.base != "HGMMA":
        return 0
    match = _WGMMA.match(i.opcode)
    if match is None:
        raise ValueError(f"wgmma of a shape that is not known here: {i}")
    return int(match[1]) // 2


class _Warp:
    """Where a warp is, and what it waits for. Times are cycles."""

    def __init__(self):
        self.at, self.time, self.issued = 0, 0, -1
        self.barriers = [0] * 6
        self.groups = [0]  # when each group of wgmma is done
        self.rounds: list[int] = []


class _Step:
    """An instruction as the model takes it. left: groups of wgmma that it leaves on their way, where it waits for others; unit:
    what it takes for `busy` cycles, "" for none; tensor: cycles of the tensor cores; commits: whether it ends a group of wgmma."""

    def __init__(self, i: Sass):
        self.waits, self.read, self.write, self.stall = i.waits, i.read, i.write, max(i.stall, 1)
        waits = i.opcode.startswith("WARPGROUP.DEPBAR")
        self.left = int(i.operands.rpartition(",")[2].strip(), 16) if waits else None
        self.unit = UNIT_OF.get(i.base, "")
        self.busy = UNITS[self.unit] if self.unit else 0
        self.tensor = _tensor_cycles(i)
        self.commits = "gsb0" in i.operands
        self.latency = LATENCY.get(i.base, OTHER_LATENCY)


def cycles(way: list[Sass], warpgroups: int) -> float:
    """Cycles an iteration, on average once all warpgroups are under way."""
    model, warps, steps = _SubPartition(), [_Warp() for _ in range(warpgroups)], [_Step(i) for i in way]
    while min(len(warp.rounds) for warp in warps) < _ITERATIONS:
        # Of several that could issue, the one that has not for longest.
        start, _, warp = min(((model.ready(warp, steps), warp.issued, warp) for warp in warps), key=lambda one: one[:2])
        model.issue(warp, steps, start)
    first = warps[0].rounds
    return (first[_ITERATIONS - 1] - first[_WARMED_UP - 1]) / (_ITERATIONS - _WARMED_UP)


class _SubPartition:
    """A quarter of an SM: its issue port, its units and its tensor core."""

    def __init__(self):
        self.port, self.tensor = 0, 0
        self.units: dict[str, int] = defaultdict(int)

    def ready(self, warp: _Warp, way: list[_Step]) -> int:
        """When the warp's next instruction can issue."""
        i = way[warp.at]
        start = max(warp.time, self.port)
        for barrier in i.waits:
            start = max(start, warp.barriers[barrier])
        if i.left is not None:
            start = max(start, ([0] * (i.left + 1) + warp.groups)[-1 - i.left] + WGMMA_SEEN)
        return max(start, self.units[i.unit]) if i.unit else start

    def issue(self, warp: _Warp, way: list[_Step], start: int) -> None:
        i = way[warp.at]
        self.port, warp.issued = start + 1, start
        if i.unit:
            self.units[i.unit] = start + i.busy
        if i.tensor:
            self.tensor = max(start + WGMMA_START, self.tensor) + i.tensor
            if i.commits:
                warp.groups.append(self.tensor)
        if i.write is not None:
            warp.barriers[i.write] = max(warp.barriers[i.write], start + i.latency)
        if i.read is not None:
            warp.barriers[i.read] = max(warp.barriers[i.read], start + READ_LATENCY)
        warp.time = start + i.stall
        warp.at += 1
        if warp.at == len(way):
            warp.at = 0
            warp.rounds.append(warp.time)


def main_loop(r: Roofline) -> str:
    """The loop in which a kernel computes, in a line: of a warp, an iteration; modelled."""
    if r.main is None or r.main.quickest is None or r.main.slowest is None:
        if r.longest is None:
            return f"    {r.kernel:48s} no loop"
        counts = ", ".join(f"{n} {name}" for name, n in r.longest.counts.items())
        longest = f"the longest of {len(r.loops)}: {r.longest.instructions} instructions: {counts}"
        return f"    {r.kernel:48s} no loop runs wgmma; {longest}"
    way, slowest = r.main.quickest, r.main.slowest
    counts = ", ".join(f"{n} {name}" for name, n in way.counts.items())
    cycles = f"{way.cycles} cycles" + (f" (slowest way {slowest.cycles})" if slowest.cycles != way.cycles else "")
    share = f"tensor cores {way.tensor_share:.0%}"
    return f"    {r.kernel:48s} modelled, {r.warpgroups} warpgroups: {way.instructions} instructions: {counts}; {cycles}, {share}"
