"""How Mosaic's host code launches a kernel: its grid, what its parameters are, and its TMA descriptors.

Owns the reading of Mosaic's MLIR dump (the module before its GpuLaunchLoweringPass), in which the host's calls of
mosaic_gpu_init_tma_desc and gpu.launch_func have constant arguments. Works on text alone.
"""

from __future__ import annotations

import dataclasses
import re

from scripts.ptx.program import PtxError

_MARK = "IR Dump Before GpuLaunchLoweringPass"
SWIZZLES = {16: 0, 32: 32, 64: 64, 128: 128}  # Mosaic's swizzle -> bytes of the pattern (16: none)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One TMA descriptor, outermost dimension first as Mosaic has it (PTX's order is the reverse).

    offset: bytes from the start of the descriptors' parameter. argument: number of the kernel's array. strides: in elements.
    swizzle: bytes of the pattern, 0 for none.
    """

    offset: int
    argument: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """params: the number of each parameter's array, None for the one that holds the descriptors. smem: dynamic bytes."""

    grid: tuple[int, ...]
    threads: int
    smem: int
    params: tuple[int | None, ...]
    tensors: tuple[Tensor, ...]


def parse_launch(dump: str) -> Launch:
    """The launch of the one kernel of a dump. Raises PtxError where the dump is not as expected: Mosaic has changed."""
    start = dump.rfind(_MARK)
    end = dump.find("gpu.binary", start)
    if start < 0 or end < 0:
        raise PtxError(f"the MLIR dump has no {_MARK!r} followed by a gpu.binary: Mosaic's passes have changed")
    return _Host(dump[start:end].splitlines()).launch()


class _Host:
    """The values of the host function, by name."""

    def __init__(self, lines: list[str]):
        self.definitions: dict[str, str] = {}
        self.constants: dict[str, int] = {}
        self.elements: dict[str, tuple[str, int]] = {}  # of a pointer: what it points into, and where
        self.stores: dict[str, dict[int, int]] = {}
        self.calls: list[list[str]] = []
        self.launch_line = ""
        for line in lines:
            self._read(line.strip())

    def _read(self, line: str) -> None:
        if m := re.match(r"(%\S+) = (.*)", line):
            name, value = m.groups()
            self.definitions[name] = value
            if c := re.match(r"llvm\.mlir\.constant\((-?\d+) : i\d+\)", value):
                self.constants[name] = int(c[1])
            if g := re.match(r"llvm\.getelementptr (%\S+)\[(\d+)\]", value):
                self.elements[name] = (g[1], int(g[2]))
        elif m := re.match(r"llvm\.store (%\S+), (%\S+) :", line):
            base, index = self.elements.get(m[2], (m[2], 0))
            self.stores.setdefault(base, {})[index] = self.constants[m[1]]
        elif m := re.match(r"call @mosaic_gpu_init_tma_desc\(([^)]*)\)", line):
            self.calls.append([x.strip() for x in m[1].split(",")])
        elif line.startswith("gpu.launch_func"):
            self.launch_line = line

    def launch(self) -> Launch:
        line = self.launch_line
        sizes = {
            word: tuple(self.constants[name] for name in re.findall(r"%[\w#]+", re.search(rf"{word} in \(([^)]*)\)", line)[1]))  # pyright: ignore[reportOptionalSubscript]
            for word in ("blocks", "threads")
        }
        smem = re.search(r"dynamic_shared_memory_size (%[\w#]+)", line)
        arguments = re.search(r" args\((.*)\)", line)
        if smem is None or arguments is None:
            raise PtxError(f"the launch is not as expected: {line[:300]}")
        params = tuple(self._param(name) for name in re.findall(r"(%[\w#]+) :", arguments[1]))
        threads = sizes["threads"][0] * sizes["threads"][1] * sizes["threads"][2]
        return Launch(sizes["blocks"], threads, self.constants[smem[1]], params, tuple(self._tensor(call) for call in self.calls))

    def _param(self, name: str) -> int | None:
        m = re.match(r"llvm\.load (%\S+) : !llvm\.ptr -> (\S+)", self.definitions[name])
        if m is None:
            raise PtxError(f"kernel parameter {name} = {self.definitions[name][:200]} is not a load")
        return None if m[2].startswith("!llvm.array") else self.elements.get(m[1], ("", 0))[1]

    def _tensor(self, call: list[str]) -> Tensor:
        pointer, array, _, rank, sizes, strides, swizzle, box = call
        parts = [self._array(name, self.constants[rank]) for name in (sizes, strides, box)]
        kind = self.constants[swizzle]
        if kind not in SWIZZLES:
            raise PtxError(f"a TMA descriptor with Mosaic's swizzle {kind} is not known: {SWIZZLES}")
        return Tensor(self.elements.get(pointer, ("", 0))[1], self._argument(array), *parts, swizzle=SWIZZLES[kind])

    def _array(self, name: str, rank: int) -> tuple[int, ...]:
        return tuple(self.stores[name][i] for i in range(rank))

    def _argument(self, name: str) -> int:
        """The number of the array that a value was made from, by transposes, reshapes and casts."""
        while True:
            value = self.definitions[name]
            if m := re.search(r"from_kernel_arg_idx = (\d+)", value):
                return int(m[1])
            if value.startswith("memref.reinterpret_cast") and "offset: [0]" not in value:
                raise PtxError(f"a TMA descriptor into the middle of an array is not known: {value[:200]}")
            source = re.search(r"%[\w#]+", value)
            if source is None:
                raise PtxError(f"a TMA descriptor of no kernel argument: {value[:200]}")
            name = source[0]
