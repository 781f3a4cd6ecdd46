"""Global memory of a launch and shared memory of a block: bytes, bounds and alignment.

What was never written is 0xFF in every byte: NaN as bfloat16, float16 and float32. Every byte of global memory may be written once
in a launch, and not be read then: what one thread block sees of another's writes is never defined here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scripts.ptx.program import PtxError

GLOBAL_BASE = 0x2_0000_0000
SHARED_BASE = 1024  # where dynamic shared memory begins in the shared window; a multiple of every swizzle's pattern
PARAM_BASE, PARAM_STRIDE = 0x7000_0000_0000, 1 << 16
_GAP = 4096  # bytes between two arrays, which no access may touch


class GlobalMemory:
    """The arrays of a launch, at distinct addresses. `read` and `write` take byte addresses i64[n] of `size` bytes each."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = list(arrays)
        self.address: list[int] = []
        offset = 0
        for array in self.arrays:
            self.address.append(GLOBAL_BASE + offset)
            offset += -(-array.nbytes // _GAP) * _GAP + _GAP
        self._bytes = np.full(offset, 0xFF, np.uint8)
        self._mine = np.zeros(offset, bool)  # within an array
        self._was_read = np.zeros(offset, bool)
        self._was_written = np.zeros(offset, bool)
        for array, address in zip(self.arrays, self.address, strict=True):
            where = slice(address - GLOBAL_BASE, address - GLOBAL_BASE + array.nbytes)
            self._bytes[where] = np.frombuffer(array.tobytes(), np.uint8)
            self._mine[where] = True

    def result(self, number: int) -> np.ndarray:
        """What an array holds now."""
        array, start = self.arrays[number], self.address[number] - GLOBAL_BASE
        return np.frombuffer(self._bytes[start : start + array.nbytes].tobytes(), array.dtype).reshape(array.shape)

    def read(self, address: np.ndarray, size: int, what: str) -> np.ndarray:  # u8[n, size]
        at = self._at(address, size, what)
        if self._was_written[at].any():
            raise PtxError(f"{what}: reads global memory that this launch has written")
        self._was_read[at] = True
        return self._bytes[at]

    def write(self, address: np.ndarray, data: np.ndarray, what: str) -> None:  # u8[n, size]
        at = self._at(address, data.shape[1], what)
        if self._was_written[at].any() or len(np.unique(address)) != len(address):
            raise PtxError(f"{what}: writes global memory that this launch has written already")
        if self._was_read[at].any():
            raise PtxError(f"{what}: writes global memory that this launch has read")
        self._was_written[at] = True
        self._bytes[at] = data

    def _at(self, address: np.ndarray, size: int, what: str) -> np.ndarray:
        at = (address - GLOBAL_BASE)[:, None] + np.arange(size)
        if len(at) and (at.min() < 0 or at.max() >= len(self._bytes) or not self._mine[at].all()):
            raise PtxError(f"{what}: global address outside of every array")
        if (address % size).any():
            raise PtxError(f"{what}: global address is not a multiple of {size}")
        return at


class SharedMemory:
    """Dynamic shared memory of a block, by shared-window address."""

    def __init__(self, size: int):
        self.bytes = np.full(SHARED_BASE + -(-size // 1024) * 1024, 0xFF, np.uint8)
        self.end = SHARED_BASE + size

    def check(self, address: np.ndarray, size: int, what: str) -> None:
        """PtxError where an access lies outside or not at a multiple of its size."""
        if (address < SHARED_BASE).any() or (address + size > self.end).any():
            raise PtxError(f"{what}: shared address outside of the block's {self.end - SHARED_BASE} bytes")
        if (address % size).any():
            raise PtxError(f"{what}: shared address is not a multiple of {size}")

    def read(self, address: np.ndarray, size: int) -> np.ndarray:  # u8[..., size]
        return self.bytes[address[..., None] + np.arange(size)]

    def write(self, address: np.ndarray, data: np.ndarray) -> None:
        self.bytes[address[..., None] + np.arange(data.shape[-1])] = data


def swizzled(address: np.ndarray, pattern: int) -> np.ndarray:
    """Where a TMA or a wgmma finds the byte that is at `address` without swizzle: of each 128 bytes, 16-byte chunks are exchanged
    by the address bits above (PTX ISA 5.5.7). pattern: 128, 64, 32 bytes or 0."""
    bits = {128: 7, 64: 3, 32: 1, 0: 0}[pattern]
    return address ^ (((address >> 7) & bits) << 4)
