"""Pallas Mosaic GPU as our kernels use it. What is written a thread at a time is in
`gpu_threads` and `gpu_tiles`; no other module names what may change between JAX versions.

It also says which device a kernel may run on, and has the switch that runs kernels interpreted on a CPU.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.backends import assumed_platform

ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
SMEM = plgpu.SMEM
RefUnion = plgpu.RefUnion
Barrier = plgpu.Barrier
BlockSpec = plgpu.BlockSpec
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
broadcasted_iota = plgpu.broadcasted_iota
commit_smem = plgpu.commit_smem
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
emit_pipeline = plgpu.emit_pipeline
layout_cast = plgpu.layout_cast
load = plgpu.load
mma = plgpu.mma
remote_ref = plgpu.remote_ref
semaphore_signal = pl.semaphore_signal
semaphore_wait = pl.semaphore_wait
set_max_registers = plgpu.set_max_registers
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
wgmma = plgpu.wgmma
wgmma_accumulator_load = plgpu.wgmma_accumulator_load
wgmma_wait = plgpu.wgmma_wait

WGMMA = plgpu.Layout.WGMMA  # a warpgroup's accumulator: 64 rows, 16 a warp
WGMMA_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each of its rows
WGMMA_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a value for each of its columns
# What mma.sync multiplies in a block of four warps: a left operand in 64 rows, 16 a warp, and a right one, which every warp holds.
# Its sum lies as a wgmma's does. (bfloat16 and float16 have equal layouts.)
MMA_LHS, MMA_RHS = plgpu.Layout.MMA_LHS(jnp.bfloat16), plgpu.Layout.MMA_RHS(jnp.bfloat16)
SEMAPHORE: Any = plgpu.SemaphoreType.REGULAR  # of each thread block
# What wgmma reads: 16-bit tiles of 8 rows by 128 bytes. (The transforms do implement what pyright misses.)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]

MAX_SMEM_BYTES = 227 * 1024  # that one CTA of a Hopper GPU may use
MAX_REGISTERS = 65536  # of one SM


@dataclasses.dataclass(frozen=True)
class Device:
    """What kernels must know of a GPU. kind: its name, as JAX has it; capability: its compute capability, (9, 0) for 9.0."""

    num_sms: int
    kind: str
    capability: tuple[int, int]


_interpret: contextvars.ContextVar[Any] = contextvars.ContextVar("interpret", default=None)
_races: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("races", default=None)
_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("assumed", default=None)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels that are traced inside run interpreted on a CPU: for tests, at seconds a call.

    The interpreter wants both operands of a wgmma in shared memory and has no accumulator with an initial value: kernels take
    their interpretable variant. `races_found` says, inside, what `detect_races` found.
    """
    # JAX 0.11 makes a new state for every kernel and keeps the last one only: here each of them is kept.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks

    gpu_callbacks: Any = callbacks
    states: list[Any] = []
    make_state = gpu_callbacks.GPURaceDetectionState

    def make_and_keep(**options: Any) -> Any:
        states.append(make_state(**options))
        return states[-1]

    tokens = (_interpret.set(plgpu.InterpretGPUParams(detect_races=detect_races)), _races.set(states if detect_races else None))
    gpu_callbacks.GPURaceDetectionState = make_and_keep
    try:
        yield
    finally:
        gpu_callbacks.GPURaceDetectionState = make_state
        _interpret.reset(tokens[0])
        _races.reset(tokens[1])


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Inside, kernels are traced and lowered for this GPU, whatever this machine has: to compile where there is none. One process
    should assume one compute capability: what JAX keeps of a traced kernel doesn't name it."""
    token, platform = _assumed.set(device), assumed_platform.set("gpu")
    infer_arch = mosaic_utils._infer_arch
    mosaic_utils._infer_arch = lambda: device.capability  # without a device Mosaic takes every GPU for a Hopper GPU
    try:
        yield
    finally:
        mosaic_utils._infer_arch = infer_arch
        _assumed.reset(token)
        assumed_platform.reset(platform)


def assume_sm90(num_sms: int, device_kind: str) -> contextlib.AbstractContextManager[None]:
    """`assume` of a Hopper GPU of so many SMs and this name (as JAX has it: "NVIDIA H100 80GB HBM3")."""
    return assume(Device(num_sms, device_kind, (9, 0)))


def is_interpreted() -> bool:
    """Whether kernels traced now run interpreted."""
    return _interpret.get() is not None


def races_found() -> bool:
    """Whether any kernel had a race that has run inside this `interpreted(detect_races=True)`; JAX itself only prints them.

    Raises RuntimeError outside of one, and where no kernel has run yet.
    """
    states = _races.get()
    if not states:
        raise RuntimeError("no interpreted kernel has run with detect_races: ask inside gpu.interpreted(detect_races=True)")
    return any(state.races_found for state in states)


def kernel(body: Any, *, out_type: Any, grid: dict[str, int], scratch_types: Any, warpgroups: int = 1) -> Any:
    """`plgpu.kernel` of a grid by axis name; with several warpgroups their index is the axis "warpgroup"."""
    threads = {"num_threads": warpgroups, "thread_name": "warpgroup"} if warpgroups > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch_types,
        # Lane semantics needs fewer registers than Warpgroup. Rows of an accumulator are reduced within a warp: no scratch.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=_interpret.get(),
        **threads,
    )


def strided(size: int, vector: int) -> Any:
    """The layout of an array [size] in a warpgroup's registers: each thread has `vector` neighbouring entries at a time."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vector)


def capability() -> tuple[int, int] | None:
    """The compute capability that kernels are traced for: of JAX's default device or the assumed one; None if that is no GPU."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed.capability
    found = getattr(jax.local_devices()[0], "compute_capability", "") if jax.local_devices()[0].platform == "gpu" else ""
    major, dot, minor = found.partition(".")
    return (int(major), int(minor)) if dot and major.isdigit() and minor.isdigit() else None


def missing_for_sm90() -> str | None:
    """What JAX's default device or the assumed one lacks to run a Hopper kernel; None if nothing, and inside `interpreted`."""
    if is_interpreted() or capability() == (9, 0):
        return None
    return f"{'' if _is_gpu() else 'a GPU of '}compute capability 9.0, found {_found()}"


def missing_for_mma() -> str | None:
    """What JAX's default device or the assumed one lacks to run a kernel of mma.sync and cp.async; None if nothing."""
    if is_interpreted():
        return "no interpreter: Pallas' interpreter has no mma.sync (run its PTX)"
    found = capability()
    if found is not None and (8, 0) <= found:
        return None
    return f"{'' if _is_gpu() else 'a GPU of '}compute capability 8.0 or more, found {_found()}"


def _is_gpu() -> bool:
    return _assumed.get() is not None or jax.local_devices()[0].platform == "gpu"


def _found() -> str:
    """The device's compute capability and name, or its platform."""
    if _is_gpu():
        found = capability()
        return f"{'unknown' if found is None else '.'.join(map(str, found))} ({device_kind()})"
    return jax.local_devices()[0].platform


def max_smem_bytes() -> int:
    """Shared memory that one CTA may have on the device that kernels are traced for (CUDA C++ Programming Guide, table of
    compute capabilities); of a compute capability that is not known, the least that any has."""
    return 1024 * {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(capability() or (0, 0), 99)


def num_sms() -> int:
    """Streaming multiprocessors of JAX's default device, or of the assumed one; 2 where kernels are interpreted."""
    if is_interpreted():
        return 2
    assumed = _assumed.get()
    return jax.local_devices()[0].core_count if assumed is None else assumed.num_sms


def device_kind() -> str:
    """The name of the device that kernels are traced for, as JAX has it."""
    if is_interpreted():
        return "interpreted"
    assumed = _assumed.get()
    return jax.local_devices()[0].device_kind if assumed is None else assumed.kind
