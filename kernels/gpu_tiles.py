"""Values in the layout of wgmma, a thread at a time in Mosaic: tiles of shared memory, what a warpgroup keeps there for itself, the
numbers of rows, reciprocals.

For kernels that have no register to spare. Addresses are computed where they are used, from a thread's number of which the compiler
doesn't know that it is the same as before. Those that Mosaic computes are kept in registers through a kernel's loops. Beside `gpu`
and `gpu_threads` the only module that names what may change between JAX versions.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import gpu

THREADS, ROWS = 128, 64  # of a warpgroup, of a tile
WORDS = 4  # 32-bit values that a thread loads at once
_REF = plgpu.RefType


def reciprocal(x: Any) -> Any:
    """1 / x of f32 in the layout of wgmma, whose last bit may be wrong, by one instruction: of what is normal, as is its
    reciprocal."""
    if gpu.is_interpreted():
        return 1 / x

    @plgpu.inline_mgpu(arg_types=(gpu.WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, gpu.WGMMA))
    def invert(_, x):
        return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

    return invert(x)  # pyright: ignore[reportCallIssue]


def keep(x: Any, target: Any) -> None:
    """Stores f32[64, columns] in the layout of wgmma to `target` (SMEM, contiguous, of as many values), for `kept`. Each thread
    stores its own values, 16 bytes at a time beside those of the other threads, without bank conflicts. On the device nothing else
    may read what lies there. columns: a multiple of 8."""
    if gpu.is_interpreted():
        target[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(gpu.WGMMA, _REF()))
    def store(_, x, target):
        f32 = ir.F32Type.get()
        values = [v for register in x.registers.flat for v in _elements(register)]
        for i in range(0, len(values), WORDS):
            packed = vector.from_elements(ir.VectorType.get((WORDS,), f32), values[i : i + WORDS])
            llvm.store(packed, _own_words(target, i), alignment=4 * WORDS)

    store(x, target)  # pyright: ignore[reportCallIssue]


def kept(source: Any) -> Any:
    """f32[64, columns] in the layout of wgmma that this warpgroup has stored by `keep`."""
    if gpu.is_interpreted():
        return source[...]

    @plgpu.inline_mgpu(arg_types=(_REF(),), return_type=plgpu.ShapeDtypeStruct(source.shape, source.dtype, gpu.WGMMA))
    def load(_, source):
        layout: Any = gpu.WGMMA.to_mgpu()
        f32 = ir.F32Type.get()
        registers = np.empty(layout.registers_shape(tuple(ir.MemRefType(source.type).shape)), object)
        length = layout.vector_length
        words = []
        for i in range(0, registers.size * length, WORDS):
            words += _elements(llvm.load(ir.VectorType.get((WORDS,), f32), _own_words(source, i), alignment=4 * WORDS))
        for i, at in enumerate(np.ndindex(registers.shape)):
            registers[at] = vector.from_elements(ir.VectorType.get((length,), f32), words[i * length : (i + 1) * length])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)  # pyright: ignore[reportCallIssue]


def write_tile(x: Any, target: Any, *, swizzled: bool = False) -> None:
    """Stores [64, columns] in the layout of wgmma to `target` (SMEM [64, columns], plain, or of 16 bits as wgmma reads it), as
    `target[...] = x` does. Addresses are computed here, and not kept in registers from a call before."""
    if gpu.is_interpreted():
        target[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(gpu.WGMMA, _REF(gpu.SWIZZLED if swizzled else ())))
    def store(_, x, target):
        registers = x.registers.reshape(-1)
        for register, pointer in zip(registers, _pairs(target, x.shape[1], swizzled), strict=True):
            llvm.store(register, pointer, alignment=2 * mosaic_utils.bitwidth(x.mlir_dtype) // 8)

    store(x, target)  # pyright: ignore[reportCallIssue]


def read_tile(source: Any) -> Any:
    """[64, columns] in the layout of wgmma from `source` (SMEM [64, columns], plain), with addresses as those of `write_tile`."""
    if gpu.is_interpreted():
        return source[...]

    @plgpu.inline_mgpu(arg_types=(_REF(),), return_type=plgpu.ShapeDtypeStruct(source.shape, source.dtype, gpu.WGMMA))
    def load(_, source):
        layout, source_type = gpu.WGMMA.to_mgpu(), ir.MemRefType(source.type)
        registers = np.empty(layout.registers_shape(tuple(source_type.shape)), object)
        kind = ir.VectorType.get((2,), source_type.element_type)
        for at, pointer in zip(np.ndindex(registers.shape), _pairs(source, source_type.shape[1]), strict=True):
            alignment = 2 * mosaic_utils.bitwidth(source_type.element_type) // 8
            registers[at] = llvm.load(kind, pointer, alignment=alignment)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)  # pyright: ignore[reportCallIssue]


def tile_rows() -> Any:
    """i32[64], a value a row of a tile in the layout of wgmma: 0 to 63. They are computed here, and not kept in registers."""
    if gpu.is_interpreted():
        return gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=gpu.WGMMA_ROW)

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, gpu.WGMMA_ROW))
    def number(_):
        layout: Any = gpu.WGMMA_ROW.to_mgpu()
        thread = _thread()
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        first = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
        registers = np.empty(layout.registers_shape((ROWS,)), object)
        for half, at in enumerate(np.ndindex(registers.shape)):  # a thread has two rows, which are eight apart
            row = arith.addi(first, _i32(8 * half))
            registers[at] = vector.broadcast(ir.VectorType.get((layout.vector_length,), row.type), row)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return number()  # pyright: ignore[reportCallIssue]


def _pairs(ref: Any, columns: int, swizzled: bool = False) -> list[Any]:
    """Where each pair of columns that this thread has of a [64, columns] tile in the layout of wgmma lies in `ref`, in its order:
    two columns of each eight, in two rows that are eight apart."""
    element, thread = ir.MemRefType(ref.type).element_type, _thread()
    warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
    row, column = arith.divui(lane, _i32(4)), arith.muli(arith.remui(lane, _i32(4)), _i32(2))  # of the warp's first eight, of eight
    pitch = 64 if swizzled else columns
    first = arith.addi(arith.muli(warp, _i32(16 * columns)), arith.addi(arith.muli(row, _i32(pitch)), column))
    base = mosaic_utils.getelementptr(mosaic_utils.memref_ptr(ref), [first], element)
    pointers = []
    for eight in range(columns // 8):
        chunk = base
        if swizzled:  # tiles of 8 rows by 64 columns, whose 16 bytes are in another order in each row
            moved = arith.muli(arith.xori(row, _i32(eight % 8)), _i32(8))
            chunk = mosaic_utils.getelementptr(base, [moved], element)
        for half in range(2):
            at = half * 8 * columns + (eight // 8 * 512 if swizzled else 8 * eight)
            pointers.append(mosaic_utils.getelementptr(chunk, [at], element))
    return pointers


def _own_words(ref: Any, i: int) -> Any:
    """Where this thread's 32-bit values i to i + WORDS - 1 lie in the memory of `ref`."""
    at = arith.addi(arith.muli(_thread(), _i32(WORDS)), _i32(i * THREADS))
    return mosaic_utils.getelementptr(mosaic_utils.memref_ptr(ref), [at], ir.F32Type.get())


def _elements(values: Any) -> list[Any]:
    """The values of a vector of one axis."""
    return [vector.extract(values, dynamic_position=[], static_position=[k]) for k in range(ir.VectorType(values.type).shape[0])]


def _thread() -> Any:
    """The thread's number in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(llvm.inline_asm(i32, [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True), _i32(THREADS))


def _i32(value: int) -> Any:
    return mosaic_utils.c(value, ir.IntegerType.get_signless(32))
