"""The PTX of our kernels: compiled without a GPU, by the compiler of `aot_check`, and read from Mosaic's dumps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from scripts.aot.compiler import Compiler, arch_of
from scripts.ptx.launch import Launch, parse_launch
from scripts.ptx.program import Program, parse

ATTENTION, JOIN, EXPERTS = "ragged_paged_attention", "join_partial_results", "grouped_matmul"
PORTABLE_ATTENTION, PORTABLE_JOIN, PORTABLE_EXPERTS = "portable_attention", "portable_join", "portable_grouped_matmul"
ROTARY_WRITE, FUSED_MATMUL, LAY_OUT_GROUPS = "rotary_write", "fused_matmul", "lay_out_groups"
_NAMES = (
    LAY_OUT_GROUPS,
    ROTARY_WRITE,
    FUSED_MATMUL,
    PORTABLE_ATTENTION,
    PORTABLE_JOIN,
    PORTABLE_EXPERTS,
    JOIN,
    EXPERTS,
    ATTENTION,
)  # before one whose name lies in it
_CALL = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)", module = "((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel as it would be launched."""

    name: str
    program: Program
    launch: Launch


class KernelCompiler:
    """Compiles functions that call our kernels. A kernel that another function called too is compiled once."""

    def __init__(self, compiler: Compiler):
        self.compiler = compiler
        self._kernels: dict[str, Kernel] = {}  # by Mosaic's hash
        self._read: set[str] = set()

    @property
    def hopper(self) -> bool:
        """Whether the target is one, which the kernels of wgmma and TMA need."""
        return arch_of(self.compiler.target) == "sm_90a"

    def compile(self, name: str, function: Callable, args: Sequence[Any]) -> dict[str, Kernel]:
        """The kernels that function(*args) calls, by name. Raises RuntimeError if Mosaic dumped none."""
        from jaxserve.execution.programs import GPU_COMPILER_OPTIONS

        lowered = self.compiler.lower(function, args)
        hashes = dict(_calls(lowered.as_text()))
        self.compiler.build(lowered, options=GPU_COMPILER_OPTIONS)
        new = [path for path in sorted(self.compiler.mosaic.glob("*.ptx")) if path.name not in self._read]
        self._read.update(path.name for path in new)
        for path in new:
            kernel = re.sub(r"_\d+$", "", path.stem)
            dump = path.with_suffix(".mlir-passes.log").read_text(errors="replace")
            self._kernels[hashes[kernel]] = Kernel(kernel, parse(path.read_text()), parse_launch(dump))
        missing = [kernel for kernel, key in hashes.items() if key not in self._kernels]
        if missing or not hashes:
            raise RuntimeError(f"{name}: Mosaic dumped no PTX of {', '.join(missing) or 'any kernel'}")
        return {kernel: self._kernels[key] for kernel, key in hashes.items()}


def _calls(text: str):
    """(name, hash) of every Mosaic kernel that a lowered module calls. A module has its own name, and files' names."""
    for key, module in _CALL.findall(text):
        yield next(name for name in _NAMES if name in module), key


def array(*sizes: int, dtype: Any = "int32") -> Any:
    """An abstract array of these sizes."""
    import jax

    return jax.ShapeDtypeStruct(sizes, dtype)
