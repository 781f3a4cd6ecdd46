"""Small kernels of PTX for the interpreter's tests, as text around a body."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.ptx.launch import Launch, Tensor
from scripts.ptx.machine import Result, run
from scripts.ptx.program import Program, parse

RECORDED = Path(__file__).parent / "recorded"  # PTX of our kernels
SEEDS = range(8)  # each kind of schedule twice


def program(body: str, *, warps: int = 1, arrays: int = 2) -> Program:
    """A kernel whose arrays' addresses are in %a0, %a1, ..., and whose last parameter holds TMA descriptors, in %desc."""
    names = [f"k_param_{n}" for n in range(arrays + 1)]
    params = ",\n".join([*(f".param .u64 .ptr .align 256 {name}" for name in names[:-1]), f".param .align 64 .b8 {names[-1]}[640]"])
    loads = "".join(f"ld.param.b64 %a{n}, [{name}];\n" for n, name in enumerate(names[:-1]))
    return parse(
        f""".visible .entry k(
{params}
)
.maxntid {32 * warps}, 1, 1
{{
.reg .pred %p<30>; .reg .b16 %rs<30>; .reg .b32 %r<200>; .reg .b32 %f<200>; .reg .b64 %rd<50>; .reg .b64 %a<9>; .reg .b64 %desc;
.shared .align 16 .b8 __dynamic_shmem__0;
{loads}
mov.b64 %desc, {names[-1]};
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
elect.sync %r2|%p0, -1;
mul.wide.u32 %rd0, %r0, 4;
mov.b64 %rd1, __dynamic_shmem__0;
add.s64 %rd2, %rd1, %rd0;
{body}
ret;
}}"""
    )


def launch(kernel: Program, arrays: int = 2, *, smem: int = 4096, tensors: Sequence[Tensor] = ()) -> Launch:
    return Launch((1, 1, 1), kernel.threads, smem, (*range(arrays), None), tuple(tensors))


def go(
    body: str, arrays: Sequence[np.ndarray], *, warps: int = 1, seed: int = 0, smem: int = 4096, tensors: Sequence[Tensor] = ()
) -> Result:
    """Runs a body."""
    kernel = program(body, warps=warps, arrays=len(arrays))
    return run(kernel, launch(kernel, len(arrays), smem=smem, tensors=tensors), arrays, seed=seed)


def zeros(n: int, dtype: str = "uint32") -> np.ndarray:
    return np.zeros(n, dtype)


def only(warp: int, body: str) -> str:
    """Code of one warp."""
    label = f"$AFTER{next(_labels)}"
    return f"setp.ne.b32 %p9, %r1, {warp};\n@%p9 bra {label};\n{body}\n{label}:\n"


_labels = itertools.count()
