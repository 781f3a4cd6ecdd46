"""What XLA and Mosaic made of a program, read from what they print: kernels, the thunk sequence, copies, custom calls.

Owns the parsers and the words (Kernel, Thunk, CompiledReport). Works on text alone: knows neither jax nor how to compile, so that
its tests need no CUDA packages.

    ptxas -v          registers, spills, stack, static shared memory of a kernel
    resources.txt     a Mosaic kernel's dynamic shared memory
    thunk sequence    what the GPU runs, in order, and which of it lies in a command buffer (a CUDA graph)
    optimized HLO     copies, custom calls and where they came from
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from scripts.aot.equal_bits import SummedInOrder
from scripts.aot.roofline import Roofline

_PTXAS = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<smem>\d+) bytes smem)?",
    re.S,
)
_THUNK = re.compile(r"^(?P<indent>\s*)\d+: k(?P<kind>\w+)\s*\[[^\]]*\]\s*(?P<name>\S*)(?:.*shared_memory: (?P<smem>\d+) bytes)?")
PTX_FEATURES = {  # of the instructions that make a kernel a fast one, on Hopper or everywhere
    "TMA": re.compile(r"\bcp\.async\.bulk\.tensor\b"),
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "wgmma from registers": re.compile(r"\bwgmma\.mma_async\.\S+\s+\{[^}]*\},\s*\{"),  # its left operand
    "setmaxnreg": re.compile(r"\bsetmaxnreg\b"),
    "cp.async": re.compile(r"\bcp\.async\.c[ag]\."),
    "mma.sync": re.compile(r"\bmma\.sync\b"),
    "signals to other devices": re.compile(r"\bred\.release\.sys\b"),
}
_SETMAXNREG = re.compile(r"\bsetmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32\s+(\d+)")
_MAXNTID = re.compile(r"^\.(?:maxntid|reqntid)\s+([\d, ]+)", re.M)
_SMEM_SCRATCH = re.compile(r"smem_scratch_bytes=(\d+)")
# %name = type[shape]{layout} opcode(operands), attributes
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>\S+) = (?P<result>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<operands>.*?)\)(?P<rest>.*)$"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,]*)\]")


@dataclass(frozen=True)
class Kernel:
    """One kernel as ptxas left it. Bytes; smem is static plus, where known, dynamic shared memory a block."""

    name: str
    source: str  # "xla" or "mosaic"
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int
    uses: tuple[str, ...] = ()  # of a Mosaic kernel: which of PTX_FEATURES its PTX has
    warpgroups: int = 0  # of a Mosaic kernel's block
    asked_registers: tuple[int, ...] = ()  # what its warpgroups set by setmaxnreg, a thread: falling, each value once

    @property
    def spills(self) -> bool:
        return bool(self.spill_stores or self.spill_loads)

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that an SM of Hopper holds at once, of a Mosaic kernel: what registers and shared memory allow, at least one. The
        limits are those of compute capability 9.0 (CUDA C++ Programming Guide); a block takes 1 KiB of shared memory more."""
        by_registers = 65_536 // max(1, self.registers * 128 * max(1, self.warpgroups))
        return max(1, min(by_registers, 228 * 1024 // (self.smem + 1024), 32))

    @property
    def missing_registers(self) -> int:
        """Registers by which the warpgroups of a block ask for more than it has at launch, summed over one thread of each: where it
        is positive, the last to ask waits for ever. As our kernels do, one warpgroup sets the least value, the others the most."""
        if not self.asked_registers:
            return 0
        asked = max(self.asked_registers) * (self.warpgroups - 1) + min(self.asked_registers)
        return max(0, asked - self.registers * self.warpgroups)


@dataclass(frozen=True)
class Thunk:
    """One command of a program: its kind without the k ("CustomKernel", "CublasLtMatmul", "While"), and a kernel's name."""

    kind: str
    name: str
    in_graph: bool  # inside a command buffer
    smem: int | None = None  # bytes of dynamic shared memory, of a kernel


@dataclass(frozen=True)
class Instruction:
    """One instruction of the optimized HLO's entry or of a fusion: shapes as (dtype, dims)."""

    name: str
    opcode: str
    results: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    op_name: str
    target: str  # of a custom call, else ""

    @property
    def mosaic_kernel(self) -> str:
        """Of a call of a Mosaic kernel: that kernel's name in PTX. The op_name ends with "/its name/the primitive's"."""
        return f"{self.op_name.rpartition('/')[0].rpartition('/')[2]}_mosaic_gpu_kernel"


def ptx_features(ptx: str) -> tuple[str, ...]:
    """Which of PTX_FEATURES a kernel's PTX has."""
    return tuple(name for name, pattern in PTX_FEATURES.items() if pattern.search(ptx))


def warpgroups(ptx: str) -> int:
    """Warpgroups of a kernel's block, from its PTX. ValueError if it doesn't say."""
    match = _MAXNTID.search(ptx)
    if match is None:
        raise ValueError(f"no .maxntid in the PTX: {ptx[:200]!r}")
    return math.prod(int(n) for n in match[1].split(",")) // 128


def asked_registers(ptx: str) -> tuple[int, ...]:
    """The values that a kernel's PTX gives to setmaxnreg, falling, each once. ValueError for a form that is not known."""
    values = _SETMAXNREG.findall(ptx)
    if len(values) != len(PTX_FEATURES["setmaxnreg"].findall(ptx)):
        raise ValueError("setmaxnreg in a form that is not known here")
    return tuple(sorted({int(value) for value in values}, reverse=True))


def parse_ptxas(text: str, source: str, dynamic_smem: int = 0, ptx: str | None = None) -> list[Kernel]:
    """The kernels of a `ptxas -v` log; `ptx` is what a log of one kernel was compiled from, where it is at hand. ValueError if it
    names a kernel whose figures it lacks."""
    from_ptx = {}
    if ptx is not None:
        from_ptx = {"uses": ptx_features(ptx), "warpgroups": warpgroups(ptx), "asked_registers": asked_registers(ptx)}
    kernels = [
        Kernel(
            name=m["name"],
            source=source,
            arch=m["arch"],
            registers=int(m["registers"]),
            spill_stores=int(m["stores"]),
            spill_loads=int(m["loads"]),
            stack=int(m["stack"]),
            smem=int(m["smem"] or 0) + dynamic_smem,
            **from_ptx,
        )
        for m in _PTXAS.finditer(text)
    ]
    named = text.count("Compiling entry function")
    if named != len(kernels):
        raise ValueError(
            f"ptxas log names {named} kernels and gives figures of {len(kernels)}; its format has changed:\n{text[:400]}"
        )
    return kernels


def parse_mosaic_smem(text: str) -> int:
    """Bytes of dynamic shared memory from a Mosaic kernel's resources.txt. ValueError if it doesn't say."""
    match = _SMEM_SCRATCH.search(text)
    if match is None:
        raise ValueError(f"no smem_scratch_bytes in Mosaic's resources: {text[:200]!r}")
    return int(match[1])


def parse_thunks(text: str) -> list[Thunk]:
    """The commands of a thunk sequence dump, nested ones (of loops and conditionals) too. ValueError if there is none."""
    thunks: list[Thunk] = []
    graph_indent: int | None = None
    for line in text.splitlines():
        m = _THUNK.match(line)
        if m is None:
            continue
        indent = len(m["indent"])
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        in_graph = graph_indent is not None
        name = "" if m["name"] == f"k{m['kind']}" or "=" in m["name"] else m["name"]
        thunks.append(Thunk(m["kind"], name, in_graph, None if m["smem"] is None else int(m["smem"])))
        if m["kind"] == "CommandBuffer" and not in_graph:
            graph_indent = indent
    if not thunks:
        raise ValueError("no thunks in the dump; its format has changed")
    return thunks


def parse_hlo(text: str) -> list[Instruction]:
    """All instructions of an HLO module's text, in order, those inside fusions too."""
    found = []
    for line in text.splitlines():
        m = _INSTRUCTION.match(line)
        if m is None:
            continue
        op_name = re.search(r'op_name="([^"]*)"', m["rest"])
        target = re.search(r'custom_call_target="([^"]*)"', m["rest"])
        results = tuple((s["dtype"], tuple(int(d) for d in s["dims"].split(",") if d)) for s in _SHAPE.finditer(m["result"]))
        operands = tuple(re.findall(r"%([\w.\-]+)", m["operands"]))
        found.append(
            Instruction(m["name"], m["opcode"], results, operands, op_name[1] if op_name else "", target[1] if target else "")
        )
    return found


@dataclass
class CompiledReport:
    """One compiled program. Bytes; `seconds` is what tracing, lowering and compiling took."""

    name: str
    thunks: list[Thunk] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    rooflines: list[Roofline] = field(default_factory=list)  # of the Mosaic kernels that were compiled for it
    order: SummedInOrder | None = None  # of its matmuls and sums
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    seconds: float = 0.0

    @property
    def num_graphs(self) -> int:
        return sum(t.kind == "CommandBuffer" for t in self.thunks)

    @property
    def graph_commands(self) -> list[Thunk]:
        """What lies inside command buffers: the nodes of the CUDA graph."""
        return [t for t in self.thunks if t.in_graph]

    @property
    def outside(self) -> Counter[str]:
        """Kinds of the commands that no command buffer holds."""
        return Counter(t.kind for t in self.thunks if not t.in_graph and t.kind != "CommandBuffer")

    @property
    def mosaic_calls(self) -> list[Instruction]:
        return [i for i in self.instructions if i.opcode == "custom-call" and i.target.startswith("mosaic_gpu")]

    def copies_of(self, shape: tuple[int, ...]) -> list[Instruction]:
        """Copies whose result has this shape. A copy inside a fusion is not one: it is computed in registers."""
        opcodes = ("copy", "copy-start", "copy-done")
        return [i for i in self.instructions if i.opcode in opcodes and any(dims == shape for _, dims in i.results)]

    def launches(self) -> list[tuple[int, str, Kernel | None]]:
        """(count, name, what ptxas said) of the program's commands, by falling count; a library's kernels have no Kernel."""
        by_name = {k.name: k for k in self.kernels}
        counts = Counter(t.name or t.kind for t in self.thunks if t.kind != "CommandBuffer")
        return [(n, name, by_name.get(name)) for name, n in counts.most_common()]

    def as_json(self) -> dict:
        """The figures, without the instructions."""
        return {
            "name": self.name,
            "graphs": self.num_graphs,
            "graph_commands": len(self.graph_commands),
            "outside_graphs": dict(self.outside),
            "commands": {name: n for n, name, _ in self.launches()},
            "mosaic_calls": dict(Counter(i.op_name for i in self.mosaic_calls)),
            "kernels": [vars(k) for k in self.kernels],
            "rooflines": [r.as_json() for r in self.rooflines],
            "argument_bytes": self.argument_bytes,
            "output_bytes": self.output_bytes,
            "alias_bytes": self.alias_bytes,
            "temp_bytes": self.temp_bytes,
            "seconds": round(self.seconds, 2),
        }
