"""Bulk copies: TMA loads and stores of tensor tiles, stores of plain rows, and their groups (PTX ISA 9.7.9.25, 5.5).

A copy starts when it is issued and ends at any time after that, when its bytes move. A load ends by counting its bytes off an
mbarrier; stores end by groups, which the warp that issued them waits for.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from scripts.ptx.access import Access, Action, address, make_values, one_lane
from scripts.ptx.arithmetic import LANES
from scripts.ptx.launch import Tensor
from scripts.ptx.machine_code import BLOCKED
from scripts.ptx.memory import PARAM_BASE, PARAM_STRIDE, swizzled
from scripts.ptx.program import Literal, PtxError
from scripts.ptx.shadow import CHUNK, chunks_of
from scripts.ptx.warp import Store


class Tile:
    """The box of a tensor at some coordinates, and its place in shared memory. Elements that lie outside of the tensor are loaded
    as 0 and not stored (5.5.4)."""

    def __init__(self, tensor: Tensor, base: int, itemsize: int, coordinates: list[int], shared: int):
        pattern = tensor.swizzle
        if shared % 128:
            raise PtxError(f"a tile at {shared:#x} of shared memory, which is not a multiple of 128")
        if max(tensor.box) > 256 or tensor.box[-1] * itemsize % 16 or (pattern and tensor.box[-1] * itemsize > pattern):
            raise PtxError(f"a box of {tensor.box} elements of {itemsize} bytes can't be loaded with a swizzle of {pattern}")
        if base % 16 or tensor.strides[-1] != 1 or any(s * itemsize % 16 for s in tensor.strides[:-1]):
            raise PtxError(f"a tensor with strides of {tensor.strides} elements: bytes must be multiples of 16, the last 1 element")
        index = _indices(tensor.box) + np.array(coordinates)[:, None]
        self.inside = ((index >= 0) & (index < np.array(tensor.sizes)[:, None])).all(axis=0)
        self.outside = base + itemsize * (index * np.array(tensor.strides)[:, None]).sum(axis=0)  # addresses in global memory
        self.shared = swizzled(shared + itemsize * np.arange(index.shape[1]), pattern)
        self.itemsize, self.num_bytes = itemsize, index.shape[1] * itemsize
        self.chunks = swizzled(shared + np.arange(0, self.num_bytes, CHUNK), pattern) // CHUNK


@functools.cache
def _indices(box: tuple[int, ...]) -> np.ndarray:  # i64[rank, elements]
    return np.indices(box).reshape(len(box), -1)


def _tile(a: Access, tensor_operand: int, shared_operand: int):
    """(warp, lane) -> the tile."""
    where = a.at(tensor_operand)
    pointer = make_values(a, where.base, "u64")
    coordinates = [make_values(a, item, "s32") for item in where.coordinates]
    shared = address(a, a.operands[shared_operand])
    rank = re.search(r"\.tensor\.(\d)d\.", a.i.opcode)
    assert rank is not None

    def tile(warp, lane: int) -> Tile:
        param, offset = divmod(int(pointer(warp)[lane]) - PARAM_BASE, PARAM_STRIDE)
        launch, memory = warp.block.launch, warp.block.memory
        found = [t for t in launch.tensors if t.offset == offset] if launch.params[param] is None else []
        if len(found) != 1 or len(found[0].sizes) != int(rank[1]) or len(coordinates) != int(rank[1]):
            raise PtxError(f"no TMA descriptor of rank {rank[1]} at {offset} bytes of parameter {param}")
        tensor, array = found[0], memory.arrays[found[0].argument]
        at = [int(c(warp)[lane]) for c in reversed(coordinates)]
        tile = Tile(tensor, memory.address[tensor.argument], array.dtype.itemsize, at, int(shared(warp)[lane]))
        warp.block.shared.check(tile.shared, tile.itemsize, "TMA")
        return tile

    return tile


def _load_tile(a: Access) -> Action:
    tile_of, barrier_at = _tile(a, 1, 0), address(a, a.operands[2])

    def act(warp, lanes):
        lane = one_lane(lanes)
        block, tile = warp.block, tile_of(warp, lane)
        barrier = block.barrier(warp, int(barrier_at(warp)[lane]), asynchronous=True)
        phase = barrier.issue()
        block.shadow.write(barrier.entity, phase + 1, warp.clock, tile.chunks, "TMA load")
        warp.tick()

        def finish():
            data = np.zeros((len(tile.outside), tile.itemsize), np.uint8)
            data[tile.inside] = block.memory.read(tile.outside[tile.inside], tile.itemsize, "TMA load")
            block.shared.write(tile.shared, data)
            barrier.complete(phase, tile.num_bytes)

        block.start(finish)

    return act


def _store_tile(a: Access) -> Action:
    tile_of = _tile(a, 0, 1)

    def act(warp, lanes):
        block, tile = warp.block, tile_of(warp, one_lane(lanes))

        def copy():
            data = block.shared.read(tile.shared[tile.inside], tile.itemsize)
            block.memory.write(tile.outside[tile.inside], data, "TMA store")

        _start_store(warp, tile.chunks, copy)

    return act


def _store_rows(a: Access) -> Action:
    """cp.async.bulk of consecutive bytes, by each active lane."""
    to, of, size = address(a, a.operands[0]), address(a, a.operands[1]), make_values(a, a.operands[2], "u32")

    def act(warp, lanes):
        for lane in LANES if lanes is None else np.flatnonzero(lanes):
            at, shared, num_bytes = int(to(warp)[lane]), int(of(warp)[lane]), int(size(warp)[lane])
            if at % 16 or shared % 16 or num_bytes % 16:
                raise PtxError(f"a bulk copy of {num_bytes} bytes, {at:#x} from {shared:#x}: all must be multiples of 16")
            if num_bytes:
                _start_rows(warp, at, shared, num_bytes)

    return act


def _start_rows(warp, at: int, shared: int, num_bytes: int) -> None:
    block, rows = warp.block, np.arange(0, num_bytes, 16)
    block.shared.check(shared + rows, 16, "bulk store")

    def copy():
        block.memory.write(at + rows, block.shared.read(shared + rows, 16), "bulk store")

    _start_store(warp, chunks_of(shared + rows, 16), copy)


def _start_store(warp, chunks: np.ndarray, copy) -> None:
    """Notes that the store reads these chunks; its epoch is the group that it will be committed to."""
    entity = warp.block.entities.stores(warp.number)
    warp.block.shadow.read(entity, warp.stores_committed + 1, warp.clock, chunks, "bulk store")

    def finish():
        copy()
        store.done = True

    store = Store(finish)
    warp.stores.append(store)
    warp.block.start(finish)


def _commit(a: Access) -> Action:
    def act(warp, lanes):
        warp.store_groups.append(warp.stores)
        warp.stores = []
        warp.stores_committed += 1

    return act


def _wait_group(a: Access) -> Action:
    """At most n of the last groups are still on their way; with .read, still to read shared memory. Here both end together."""
    (count,) = a.operands
    assert isinstance(count, Literal)
    left = int(count.text)

    def act(warp, lanes):
        old = warp.store_groups[: len(warp.store_groups) - left]
        if not all(store.done for group in old for store in group):
            warp.waiting = lambda: all(store.done for group in old for store in group)
            return BLOCKED
        warp.store_groups = warp.store_groups[len(old) :]
        warp.stores_read = max(warp.stores_read, warp.stores_committed - left)
        warp.clock[warp.block.entities.stores(warp.number)] = warp.stores_read
        return None

    return act


TABLE = (
    (r"cp\.async\.bulk\.tensor\.[1-5]d\.shared::cluster\.global\.mbarrier::complete_tx::bytes", _load_tile),
    (r"cp\.async\.bulk\.tensor\.[1-5]d\.global\.shared::cta\.bulk_group", _store_tile),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", _store_rows),
    (r"cp\.async\.bulk\.commit_group", _commit),
    (r"cp\.async\.bulk\.wait_group(\.read)?", _wait_group),
)
