"""The layout of `layout.lay_out` by a kernel, from one source for every GPU from sm_80 on: the same integers in two commands.

XLA counts what each block of choices has of each group. In the kernel a thread block has one such block of choices. It adds up the
counts of all blocks, of those before it too, and with them knows where its choices' rows begin: no thread block waits for another.
A thread stands for a group at first, then for a choice, then for a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels import gpu, gpu_threads
from kernels.gpu_threads import THREADS, VECTOR, RowTile, across
from kernels.grouped_matmul.layout import ELSEWHERE, ROW_ALIGN, Groups, layout_sizes

TILE = RowTile(lanes=1)  # a thread a row
PIECE = 32  # values of a list in shared memory, or of a block's choices, that a thread looks at at once
COUNTS = 64  # counts that a thread loads at once


class _Refs(NamedTuple):
    """The kernel's arguments. Those of GMEM in their order, the last seven of which it writes; then those of SMEM, [., PIECE],
    with a value a group."""

    ids: Any  # i32[B * block / piece, piece], the choices of B blocks
    counts: Any  # i32[E * pieces, columns], of each group what each block has of it
    num_tokens: Any  # i32[1]
    row: Any  # i32[T * k]
    token: Any  # i32[M]
    starts: Any  # i32[E]
    sizes: Any  # i32[E]
    tile_group: Any  # i32[W]
    tile_row: Any  # i32[W]
    tile_rows: Any  # i32[W]
    num_tiles: Any  # i32[1]
    all_sizes: Any
    all_starts: Any
    all_ends: Any  # tiles up to and including each group
    first_rows: Any  # where the block's own rows of the group begin


class _Sizes(NamedTuple):
    """Static sizes, as in `Groups`."""

    T: int
    k: int
    E: int
    R: int
    blocks: int
    block: int  # choices of one


def lay_out(
    group_ids: jax.Array,  # i32[T, k]
    num_groups: int,
    *,
    num_tokens: jax.Array | None,  # i32[]
    block_rows: int,
    backend: str,
    some_elsewhere: bool = False,
) -> Groups:
    """As layout.lay_out, to the integer."""
    T, k = group_ids.shape
    E, R, A = num_groups, block_rows, T * k
    M, W = layout_sizes(T, k, E, R)
    block = _choices(A)
    sizes = _Sizes(T, k, E, R, -(-A // block), block)

    def lay_out_groups(*refs):
        _block(_Refs(*refs), sizes)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    row, token, starts, found_sizes, tile_group, tile_row, tile_rows, num_tiles = gpu.kernel(
        lay_out_groups,
        out_type=[ints(A), ints(M), ints(E), ints(E), ints(W), ints(W), ints(W), ints(1)],
        grid={"block": sizes.blocks},
        scratch_types=[gpu.SMEM((_up(E, THREADS) // PIECE, PIECE), jnp.int32)] * 4,
    )(*inputs(group_ids, E, num_tokens))
    tiles = tile_group, tile_row, tile_rows, num_tiles.reshape(())
    return Groups(row.reshape(T, k), token, starts, found_sizes, *tiles, block_rows=R, backend=backend)


def inputs(
    group_ids: jax.Array,  # i32[T, k]
    num_groups: int,
    num_tokens: jax.Array | None,  # i32[]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the kernel is given: the first three of _Refs."""
    T, k = group_ids.shape
    block = _choices(T * k)
    real = jnp.int32(T) if num_tokens is None else num_tokens
    ids = _padded(group_ids.reshape(-1), _up(T * k, block))
    return ids.reshape(-1, _piece(block)), _count(ids.reshape(-1, block), real * k, num_groups), real.reshape(1)


def _choices(num_choices: int) -> int:
    """Of a block."""
    return min(_up(num_choices, VECTOR), THREADS)


def _count(ids: jax.Array, num_real: jax.Array, num_groups: int) -> jax.Array:  # [blocks, block] -> [E * pieces, columns]
    """Of each group what each block has of it, of the first num_real choices, in as many pieces as a thread loads them; behind the
    last block zeros."""
    columns = min(_up(len(ids), VECTOR), COUNTS)
    ids = _padded(ids, _up(len(ids), columns))
    is_real = jnp.arange(ids.size).reshape(ids.shape) < num_real
    counts = ((ids == jnp.arange(num_groups)[:, None, None]) & is_real).sum(axis=2, dtype=jnp.int32)
    return counts.reshape(-1, columns)


def _padded(ids: jax.Array, length: int) -> jax.Array:
    widths = [(0, length - len(ids)), *[(0, 0)] * (ids.ndim - 1)]
    return jnp.pad(ids, widths, constant_values=ELSEWHERE) if length > len(ids) else ids


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _piece(block: int) -> int:
    """Choices that a thread looks at at once: a multiple of VECTOR that divides a block."""
    return PIECE if block % PIECE == 0 else VECTOR


def _block(refs: _Refs, s: _Sizes) -> None:
    """One thread block."""
    block, thread = lax.axis_index("block"), gpu_threads.row_numbers(TILE)
    _share_sizes(refs, s, block, thread)
    gpu_threads.barrier()
    end, num_tiles = _share_starts(refs, s, block, thread)
    gpu_threads.barrier()
    _save_choices(refs, s, block, thread)
    _save_tail(refs, s, block, thread, end)
    _save_tiles(refs, s, block, thread, num_tiles)


def _share_sizes(refs: _Refs, s: _Sizes, block: Any, thread: Any) -> None:
    """A thread a group: its size, and how many of its rows belong to the blocks before this one."""
    columns = refs.counts.shape[1]
    pieces = refs.counts.shape[0] // s.E
    for first in range(0, _up(s.E, THREADS), THREADS):
        group = thread + first
        known = jnp.minimum(group, s.E - 1)

        def add(piece, sums, known=known):
            counts = gpu_threads.load_rows(refs.counts, known * pieces + piece, 0, columns, TILE)
            is_before = _columns(columns) < block - piece * columns
            return sums[0] + counts.sum(axis=1), sums[1] + jnp.where(is_before, counts, 0).sum(axis=1)

        size, before = lax.fori_loop(0, pieces, add, (_all(0), _all(0)))
        gpu_threads.share_values(jnp.where(group < s.E, size, 0), refs.all_sizes, group, TILE)
        gpu_threads.share_values(before, refs.first_rows, group, TILE)


def _share_starts(refs: _Refs, s: _Sizes, block: Any, thread: Any) -> tuple[Any, Any]:
    """A thread a group: where its rows and its tiles begin. The first thread block saves what belongs to no choice. Returns (the
    end of all rows, the number of tiles), the same in every thread."""
    end = num_tiles = _all(0)
    for first in range(0, _up(s.E, THREADS), THREADS):
        group = thread + first

        def add(piece, sums, group=group):
            sizes = _shared(refs.all_sizes, piece)
            is_before = _columns(PIECE) < across(group - piece * PIECE, PIECE, TILE)
            rows, tiles = _units(sizes, ROW_ALIGN) * ROW_ALIGN, _units(sizes, s.R)
            parts = jnp.where(is_before, rows, 0), jnp.where(is_before, tiles, 0), rows, tiles
            return tuple(total + part.sum(axis=1) for total, part in zip(sums, parts, strict=True))

        start, tile, end, num_tiles = lax.fori_loop(0, refs.all_sizes.shape[0], add, (_all(0),) * 4)
        size = gpu_threads.load_values(refs.all_sizes, group, TILE)
        before = gpu_threads.load_values(refs.first_rows, group, TILE)
        gpu_threads.share_values(start, refs.all_starts, group, TILE)
        gpu_threads.share_values(tile + _units(size, s.R), refs.all_ends, group, TILE)
        gpu_threads.share_values(start + before, refs.first_rows, group, TILE)

        place = jnp.where(jnp.logical_and(group < s.E, block == 0), group, -1)
        gpu_threads.save_values(start, refs.starts, place, TILE)
        gpu_threads.save_values(size, refs.sizes, place, TILE)
        next_start = start + _units(size, ROW_ALIGN) * ROW_ALIGN
        for more in range(ROW_ALIGN - 1):
            row = start + size + more
            row = jnp.where(jnp.logical_and(place >= 0, row < next_start), row, -1)
            gpu_threads.save_values(_all(s.T), refs.token, row, TILE)
    return end, num_tiles


def _save_choices(refs: _Refs, s: _Sizes, block: Any, thread: Any) -> None:
    """A thread a choice: its row, and the row's token."""
    choice = block * s.block + thread
    is_choice = jnp.logical_and(thread < s.block, choice < s.T * s.k)
    group = gpu_threads.load_values(refs.ids, jnp.where(is_choice, choice, 0), TILE)
    piece_size = _piece(s.block)
    pieces = s.block // piece_size

    def add(piece, rank):
        others = gpu_threads.load_rows(refs.ids, _all(0) + (block * pieces + piece), 0, piece_size, TILE)
        is_before = _columns(piece_size) < across(thread - piece * piece_size, piece_size, TILE)
        is_same = others == across(group, piece_size, TILE)
        return rank + _count_true(jnp.logical_and(is_before, is_same))

    rank = lax.fori_loop(0, pieces, add, _all(0))
    has_row = jnp.logical_and(is_choice, jnp.logical_and(choice < refs.num_tokens[0] * s.k, group >= 0))
    row = gpu_threads.load_values(refs.first_rows, jnp.maximum(group, 0), TILE) + rank
    nobodys = refs.token.shape[0] + choice
    gpu_threads.save_values(jnp.where(has_row, row, nobodys), refs.row, jnp.where(is_choice, choice, -1), TILE)
    gpu_threads.save_values(lax.div(choice, jnp.int32(s.k)), refs.token, jnp.where(has_row, row, -1), TILE)


def _save_tail(refs: _Refs, s: _Sizes, block: Any, thread: Any, end: Any) -> None:
    """The rows behind the last group belong to no token."""
    M, stride = refs.token.shape[0], s.blocks * THREADS
    for first in range(0, M, stride):
        row = block * THREADS + thread + first
        gpu_threads.save_values(_all(s.T), refs.token, jnp.where(jnp.logical_and(row >= end, row < M), row, -1), TILE)


def _save_tiles(refs: _Refs, s: _Sizes, block: Any, thread: Any, num_tiles: Any) -> None:
    """A thread a tile. There are no more tiles than choices."""
    tile = block * THREADS + thread

    def add(piece, group):
        is_passed = across(tile, PIECE, TILE) >= _shared(refs.all_ends, piece)
        return group + _count_true(is_passed)

    group = jnp.minimum(lax.fori_loop(0, refs.all_ends.shape[0], add, _all(0)), s.E - 1)
    size, start, end = (gpu_threads.load_values(values, group, TILE) for values in (refs.all_sizes, refs.all_starts, refs.all_ends))
    row = (tile - (end - _units(size, s.R))) * s.R
    is_tile = tile < num_tiles
    place = jnp.where(tile < refs.tile_group.shape[0], tile, -1)
    gpu_threads.save_values(group, refs.tile_group, place, TILE)
    gpu_threads.save_values(jnp.where(is_tile, start + row, 0), refs.tile_row, place, TILE)
    gpu_threads.save_values(jnp.where(is_tile, jnp.minimum(size - row, s.R), 0), refs.tile_rows, place, TILE)
    gpu_threads.save_values(num_tiles, refs.num_tiles, jnp.where(tile == 0, 0, -1), TILE)


def _units(sizes: Any, unit: int) -> Any:
    return lax.div(sizes + (unit - 1), jnp.int32(unit))


def _shared(values: Any, piece: Any) -> Any:
    """[threads, PIECE]: a piece of a list in shared memory, in every thread."""
    return gpu_threads.load_rows(values, _all(0) + piece, 0, PIECE, TILE)


def _columns(columns: int) -> Any:
    """i32[threads, columns]: 0, 1, ... in every thread."""
    return gpu.broadcasted_iota(jnp.int32, (TILE.rows, columns), 1, layout=TILE.layout())


def _all(value: int) -> Any:
    """i32[threads]"""
    return gpu.layout_cast(jnp.full(THREADS, value, jnp.int32), TILE.layout(1))


def _count_true(marks: Any) -> Any:
    """How many of bool[threads, columns] are true, i32[threads]."""
    ones = gpu.layout_cast(jnp.ones(marks.shape, jnp.int32), TILE.layout())
    return jnp.where(marks, ones, 0).sum(axis=1)
