"""What Pallas has no words for, written a thread at a time in Mosaic: cp.async of rows, fragments of mma.sync, stores of some rows,
loads and stores of rows and of single values that lie anywhere.

For kernels of one warpgroup that must run where there is no TMA. Beside `gpu` the only module that names what may change between
JAX versions. Shared memory of these functions has `tiles(columns)` as its transforms.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, nvvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fragmented
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import gpu

THREADS = 128
CHUNK = 8  # 16-bit values of a cp.async: 16 bytes
VECTOR = 8  # columns of a row that a thread loads at once: 16 bytes of 16-bit values
_SCALAR, _REF = plgpu.Layout.WG_SPLAT, plgpu.RefType


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows of an array in GMEM the rows 0, 1, ... of a tile are: the first `group` ones follow each other from `first` on,
    the next `group` ones from first + stride on. Those from `limit` on are none. Rows are counted through all axes but the last
    one, of which they are the columns from `column` on. first, limit and column are i32[] of the kernel."""

    first: Any
    limit: Any
    column: Any = 0
    group: int = 1
    stride: int = 1

    @property
    def scalars(self) -> tuple[Any, Any, Any]:
        return tuple(jnp.asarray(x, jnp.int32) for x in (self.first, self.limit, self.column))  # pyright: ignore[reportReturnType]

    def offset(self, row: Any, first: Any, column: Any, pitch: int) -> Any:
        """i64 of MLIR: where a row of the tile begins, in elements. row, first and column are i32 of MLIR."""
        at = row
        if self.group != self.stride:
            group = _i32(self.group)
            at = arith.addi(arith.muli(arith.divui(row, group), _i32(self.stride)), arith.remui(row, group))
        i64 = ir.IntegerType.get_signless(64)
        at = arith.extsi(i64, arith.addi(first, at))
        return arith.addi(arith.muli(at, mosaic_utils.c(pitch, i64)), arith.extsi(i64, column))


def tile_columns(columns: int) -> int:
    """Columns of a tile of shared memory, and of a piece of an accumulator: 64 (swizzled by 128 bytes), or 32 (by 64)."""
    return 64 if columns % 64 == 0 else 32


def tiles(columns: int) -> tuple[Any, ...]:
    """The transforms of 16-bit shared memory of so many columns (a multiple of 32), which ldmatrix reads without bank conflicts."""
    width = tile_columns(columns)
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)  # pyright: ignore[reportAbstractUsage]


def barrier() -> None:
    """All threads of the block have come here, and see what the others wrote to shared memory before."""

    if gpu.is_interpreted():  # a block is one thread there
        return

    @plgpu.inline_mgpu()
    def sync(_):
        mosaic_utils.warpgroup_barrier()

    sync()  # pyright: ignore[reportCallIssue]


def order_before_tma() -> None:
    """What this thread has read of shared memory may be overwritten by a TMA once it has arrived at a barrier after this."""

    @plgpu.inline_mgpu()
    def fence(_):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    if not gpu.is_interpreted():
        fence()  # pyright: ignore[reportCallIssue]


def copy_rows(source: Any, target: Any, rows: Rows) -> None:
    """Begins copying rows of `source` (GMEM) to `target` (SMEM [n, columns]) by cp.async. A row that is none is filled with zeros,
    and nothing is read. Columns and where they begin are multiples of 8. Raises ValueError for what is not of 16 bits."""
    num_rows, columns = target.shape
    chunks, width = columns // CHUNK, tile_columns(columns)
    step = 1 << (THREADS // chunks).bit_length() - 1  # rows that the threads copy at once, but for those that are too many
    if jnp.dtype(source.dtype).itemsize != 2 or columns % 32 or num_rows % step:
        raise ValueError(f"{source.dtype}[{num_rows}, {columns}] must be of 16 bits, a multiple of 32 columns and of {step} rows")

    @plgpu.inline_mgpu(arg_types=(_REF(), _REF(tiles(columns)), _SCALAR, _SCALAR, _SCALAR))
    def copy(_, source, target, *scalars):
        source_type, target_type = ir.MemRefType(source.type), ir.MemRefType(target.type)
        element, pitch = source_type.element_type, source_type.shape[-1]
        first, limit, column = (scalar.registers.item() for scalar in scalars)
        from_pointer, to_pointer = _global_pointer(source), mosaic_utils.memref_ptr(target)
        strides, _ = target_type.get_strides_and_offset()

        thread_row, chunk = arith.divui(_thread(), _i32(chunks)), arith.remui(_thread(), _i32(chunks))
        column = arith.addi(column, arith.muli(chunk, _i32(CHUNK)))

        def copy_chunks():
            for above in range(0, num_rows, step):
                row = arith.addi(thread_row, _i32(above))
                at = rows.offset(row, first, column, pitch)
                nvvm.cp_async_shared_global(
                    mosaic_utils.getelementptr(to_pointer, [_swizzled(thread_row, above, chunk, width, strides)], element),
                    mosaic_utils.getelementptr(from_pointer, [at], element),
                    16,
                    nvvm.LoadCacheModifierKind.CG,
                    cp_size=arith.select(_below(row, limit), _i32(16), _i32(0)),
                )

        if step * chunks == THREADS:
            copy_chunks()
        else:
            with mosaic_utils.when(_below(_thread(), _i32(step * chunks))):
                copy_chunks()

    copy(source, target, *rows.scalars)


def _swizzled(row: Any, above: int, chunk: Any, width: int, strides: list[int]) -> Any:
    """Where the 16 bytes `chunk` of row `row` + `above` lie in shared memory of tiles of 8 rows by `width`: in elements. row is
    less than 8 where `above` is no multiple of 8, and their sum does not pass a tile then."""
    per_tile = width // CHUNK
    in_tile = arith.addi(arith.remui(row, _i32(8)), _i32(above % 8))
    key = in_tile if per_tile == 8 else arith.divui(in_tile, _i32(2))
    within = arith.xori(arith.remui(chunk, _i32(per_tile)), key)
    total = _i32(above // 8 * strides[0])
    for value, stride in (
        (arith.divui(row, _i32(8)), strides[0]),
        (arith.divui(chunk, _i32(per_tile)), strides[1]),
        (in_tile, strides[2]),
        (within, CHUNK),
    ):
        total = arith.addi(total, arith.muli(value, _i32(stride)))
    return total


def commit_copies() -> None:
    """The copies that were begun since the last call are a group from now on, which may be empty."""

    @plgpu.inline_mgpu()
    def commit(_):
        nvvm.cp_async_commit_group()

    commit()  # pyright: ignore[reportCallIssue]


def wait_copies(groups: int) -> None:
    """Waits until at most `groups` of this thread's groups are on their way. Others' copies are seen after a `barrier`."""

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(groups)

    wait()  # pyright: ignore[reportCallIssue]


def as_left_operand(x: Any) -> Any:
    """An accumulator, of 16-bit values, as the left operand of mma: every value lies in its place already."""
    kind = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=gpu.MMA_LHS)

    @plgpu.inline_mgpu(arg_types=(gpu.WGMMA,), return_type=kind)
    def relabel(_, x):
        layout = mgpu.MMALayouts(x.mlir_dtype).lhs
        registers = x.registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=x.is_signed)

    return relabel(x)  # pyright: ignore[reportCallIssue]


def store_rows(x: Any, target: Any, rows: Rows) -> None:
    """Stores rows of an accumulator [64, columns] from registers to `target` (GMEM), those that are any."""

    @plgpu.inline_mgpu(arg_types=(gpu.WGMMA, _REF(), _SCALAR, _SCALAR, _SCALAR))
    def store(_, x, target, *scalars):
        element, pitch = x.mlir_dtype, ir.MemRefType(target.type).shape[-1]
        first, limit, column = (scalar.registers.item() for scalar in scalars)
        lane = arith.remui(_thread(), _i32(32))
        first_row = arith.addi(arith.muli(arith.divui(_thread(), _i32(32)), _i32(16)), arith.divui(lane, _i32(4)))
        column = arith.addi(column, arith.muli(arith.remui(lane, _i32(4)), _i32(2)))
        pointer = _global_pointer(target)
        registers = x.registers.reshape(x.shape[1] // 8, 2)  # of 8 columns each, and of 8 rows each
        for half in range(2):
            row = arith.addi(first_row, _i32(8 * half))
            is_stored = _below(row, limit)
            base = mosaic_utils.getelementptr(pointer, [rows.offset(row, first, column, pitch)], element)
            for j in range(x.shape[1] // 8):
                _store_vector(registers[j, half], mosaic_utils.getelementptr(base, [8 * j], element), is_stored)

    store(x, target, *rows.scalars)


@dataclasses.dataclass(frozen=True)
class RowTile:
    """How an array [rows, columns] lies in a warpgroup's registers: a row in `lanes` neighbouring lanes, each of which has VECTOR
    neighbouring columns of every lanes * VECTOR. A thread has one row."""

    lanes: int

    @classmethod
    def of(cls, columns: int) -> RowTile:
        """Of so many columns, a multiple of VECTOR. Raises ValueError for another number."""
        if columns % VECTOR:
            raise ValueError(f"{columns=} must be a multiple of {VECTOR}")
        return cls(math.gcd(columns // VECTOR, 32))

    @property
    def rows(self) -> int:
        """Of a warpgroup."""
        return THREADS // self.lanes

    def layout(self, *axes: int) -> Any:
        """Pallas' layout of the array, or of what is left of it once it is reduced over `axes`."""
        width, rows = self.lanes * VECTOR, self.rows // 4  # of a warp
        tiling = fragmented.Tiling(((self.rows, width), (rows, width), (VECTOR,)))
        tiled = fragmented.TiledLayout(tiling, (-5,), (-3, -2), -1, _check_canonical=False).canonicalize()
        tiled = tiled.reduce(axes) if axes else tiled
        return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


def row_numbers(tile: RowTile) -> Any:
    """i32[rows]: 0, 1, ..."""
    return gpu.broadcasted_iota(jnp.int32, (tile.rows,), 0, layout=tile.layout(1))


def across(x: Any, columns: int, tile: RowTile) -> Any:
    """[rows] -> [rows, columns]: a row's value in each of its columns."""
    return gpu.layout_cast(lax.broadcast_in_dim(x, (tile.rows, columns), (0,)), tile.layout())


def load_rows(source: Any, rows: Any, column: int, columns: int, tile: RowTile) -> Any:
    """[rows, columns] of `source` (GMEM or SMEM [n, c]): for each of i32[rows] that row of it, from `column` on. Where the number
    is negative the values are any that `source` has. Columns are multiples of VECTOR."""
    if gpu.is_interpreted():
        # XLA is not to fuse a load with what follows, which could move its roundings.
        return lax.optimization_barrier(source[...][jnp.maximum(rows, 0), column : column + columns])
    kind = plgpu.ShapeDtypeStruct((tile.rows, columns), source.dtype, layout=tile.layout())

    @plgpu.inline_mgpu(arg_types=(_REF(), tile.layout(1)), return_type=kind)
    def load(_, source, rows):
        layout, source_type = tile.layout().to_mgpu(), ir.MemRefType(source.type)
        element = source_type.element_type
        vector_type = ir.VectorType.get((VECTOR,), element)
        base = _row_pointer(source, arith.maxsi(_scalar(rows), _i32(0)), column, tile)
        registers = np.empty(layout.registers_shape((tile.rows, columns)), object)
        alignment = VECTOR * mosaic_utils.bitwidth(element) // 8
        for i, at in enumerate(np.ndindex(registers.shape)):
            pointer = mosaic_utils.getelementptr(base, [i * tile.lanes * VECTOR], element)
            registers[at] = llvm.load(vector_type, pointer, alignment=min(alignment, 16))
        is_signed = True if isinstance(element, ir.IntegerType) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)

    return load(source, rows)  # pyright: ignore[reportCallIssue]


def load_values(source: Any, at: Any, tile: RowTile) -> Any:
    """i32[rows] of `source` (GMEM or SMEM, i32 of any shape): for each of i32[rows], which are all in it, that value of it, counted
    through all axes."""
    if gpu.is_interpreted():
        return source[...].ravel()[at]
    kind = plgpu.ShapeDtypeStruct((tile.rows,), source.dtype, layout=tile.layout(1))

    @plgpu.inline_mgpu(arg_types=(_REF(), tile.layout(1)), return_type=kind)
    def load(_, source, at):
        element = ir.MemRefType(source.type).element_type
        pointer = mosaic_utils.getelementptr(_pointer(source), [_scalar(at)], element)
        value = vector.broadcast(ir.VectorType.get((1,), element), llvm.load(element, pointer))
        registers = np.full(at.registers.shape, value, object)
        return mgpu.FragmentedArray(_registers=registers, _layout=at.layout, _is_signed=at.is_signed)

    return load(source, at)  # pyright: ignore[reportCallIssue]


def save_rows(x: Any, target: Any, rows: Any, column: int, tile: RowTile) -> None:
    """Stores x [rows, columns] from registers to `target` (GMEM [n, c]): each row to that of i32[rows], from `column` on, or
    nowhere where the number is negative. Values have 16 bits."""
    columns = x.shape[1]
    if gpu.is_interpreted():
        for i in range(tile.rows):

            @pl.when(rows[i] >= 0)
            def _(i=i):
                target[rows[i], pl.ds(column, columns)] = x[i]

        return

    @plgpu.inline_mgpu(arg_types=(tile.layout(), _REF(), tile.layout(1)))
    def save(_, x, target, rows):
        row = _scalar(rows)
        is_stored = arith.cmpi(arith.CmpIPredicate.sge, row, _i32(0))
        base = _row_pointer(target, row, column, tile)
        for i, register in enumerate(x.registers.flat):
            _store_vector(register, mosaic_utils.getelementptr(base, [i * tile.lanes * VECTOR], x.mlir_dtype), is_stored)

    save(x, target, rows)  # pyright: ignore[reportCallIssue]


def save_values(x: Any, target: Any, at: Any, tile: RowTile) -> None:
    """Stores each of x i32[rows] to `target` (GMEM i32[n]), to the place of i32[rows], or nowhere where that is negative."""
    if gpu.is_interpreted():
        return _save_interpreted(x, target, at)

    @plgpu.inline_mgpu(arg_types=(tile.layout(1), _REF(), tile.layout(1)))
    def save(_, x, target, at):
        place, (register,) = _scalar(at), x.registers.flat
        pointer = mosaic_utils.getelementptr(_pointer(target), [place], x.mlir_dtype)
        _store_vector(register, pointer, arith.cmpi(arith.CmpIPredicate.sge, place, _i32(0)))

    save(x, target, at)  # pyright: ignore[reportCallIssue]


def share_values(x: Any, target: Any, at: Any, tile: RowTile) -> None:
    """Stores each of x i32[rows] to `target` (SMEM i32[n, c]), to the place of i32[rows], which are all in it, counted through both
    axes. Others see them after a `barrier`."""
    if gpu.is_interpreted():
        return _save_interpreted(x, target, at)

    @plgpu.inline_mgpu(arg_types=(tile.layout(1), _REF(), tile.layout(1)))
    def save(_, x, target, at):
        llvm.store(_scalar(x), mosaic_utils.getelementptr(_pointer(target), [_scalar(at)], x.mlir_dtype))

    save(x, target, at)  # pyright: ignore[reportCallIssue]


def _save_interpreted(x: Any, target: Any, at: Any) -> None:
    """One value after the other."""

    def save(i: Any, _: None) -> None:
        @pl.when(at[i] >= 0)
        def _():
            place = (at[i],) if len(target.shape) == 1 else (at[i] // target.shape[1], at[i] % target.shape[1])
            target[place] = x[i]

    lax.fori_loop(0, x.shape[0], save, None)


def _row_pointer(ref: Any, row: Any, column: int, tile: RowTile) -> Any:
    """Where this thread's first columns of a row of `ref`, counted from `column` on, lie."""
    ref_type, i64 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(64)
    lane = arith.addi(arith.muli(arith.remui(_thread(), _i32(tile.lanes)), _i32(VECTOR)), _i32(column))
    at = arith.muli(arith.extsi(i64, row), mosaic_utils.c(ref_type.shape[-1], i64))
    return mosaic_utils.getelementptr(_pointer(ref), [arith.addi(at, arith.extsi(i64, lane))], ref_type.element_type)


def _scalar(x: Any) -> Any:
    """The one value that a thread has of an array [rows] of a `RowTile`."""
    (register,) = x.registers.flat
    return vector.extract(register, dynamic_position=[], static_position=[0])


def _store_vector(values: Any, pointer: Any, condition: Any) -> None:
    """Stores a vector of 4, 8 or 16 bytes where the condition holds: one predicated instruction, and no branch."""
    i32 = ir.IntegerType.get_signless(32)
    words = ir.VectorType.get((mosaic_utils.bitwidth(values.type) // 32,), i32)
    packed = mosaic_utils.bitcast(values, words)
    values = [vector.extract(packed, dynamic_position=[], static_position=[k]) for k in range(words.shape[0])]
    names = ", ".join(f"${k + 2}" for k in range(len(values)))
    text = f"st.global.b32 [$1], {names};" if len(values) == 1 else f"st.global.v{len(values)}.b32 [$1], {{{names}}};"
    constraints = ",".join(["b", "l", *("r" for _ in values)])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [condition, pointer, *values], f"@$0 {text}", constraints, has_side_effects=True)


def _thread() -> Any:
    return arith.remui(mosaic_utils.thread_idx(), _i32(THREADS))


def _below(x: Any, limit: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, x, limit)


def _pointer(ref: Any) -> Any:
    return mosaic_utils.memref_ptr(ref) if mosaic_utils.is_smem_ref(ref) else _global_pointer(ref)


def _global_pointer(ref: Any) -> Any:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), mosaic_utils.memref_ptr(ref))


def _i32(value: int) -> Any:
    return mosaic_utils.c(value, ir.IntegerType.get_signless(32))
