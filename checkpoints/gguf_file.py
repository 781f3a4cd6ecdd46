"""The GGUF container: metadata and named, possibly quantised tensors, read from a memory-mapped file.

Follows the specification of ggml (docs/gguf.md), versions 2 and 3, little-endian. The `gguf` package decodes the quantised
blocks; its own reader is not used because it takes a second for every fifteen thousand strings of a vocabulary.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from checkpoints.weights import WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_ROWS_AS_ONE = 64  # `dequantize` takes 16 rows at a time, which are few bytes; blocks don't cross rows, so that rows may be joined
_SCALARS = {  # value type -> struct format
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}
_PLAIN_DTYPES = {  # ggml type -> name of the numpy dtype, for tensors that are not quantised
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F64: "float64",
    GGMLQuantizationType.I8: "int8",
    GGMLQuantizationType.I16: "int16",
    GGMLQuantizationType.I32: "int32",
    GGMLQuantizationType.I64: "int64",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. shape is row-major (the last axis is contiguous), start and num_bytes say where its data lies."""

    ggml_type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def is_quantised(self) -> bool:
        return self.ggml_type not in _PLAIN_DTYPES

    @property
    def dtype(self) -> str:
        """The stored dtype; the ggml type's own name ("Q4_K") where it is quantised."""
        return _PLAIN_DTYPES.get(self.ggml_type, self.ggml_type.name)


class GGUFFile:
    """A GGUF file: `metadata` (key -> number, string, bool or list) and `tensors` (name -> TensorInfo).

    Raises:
      FileNotFoundError: no such file.
      WeightsError: not a GGUF file, a version or byte order that is not supported, or a file that is corrupt or cut short.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path: Path = Path(path)
        with self.path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise WeightsError(f"{self.path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header(_Cursor(self._map, len(_MAGIC)))
        except (_CutShort, UnicodeDecodeError, ValueError, KeyError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{self.path} is corrupt or cut short: {error}") from error

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor `name`, or what it has at `index` of its first axis, in an array of its own: float32 where it is quantised,
        else in its stored dtype.

        Raises:
          WeightsError: its quantisation is not one that the gguf package decodes.
        """
        info = self.tensors[name]
        shape, start, num_bytes = info.shape, info.start, info.num_bytes
        if index is not None:
            num_bytes //= shape[0]
            shape, start = shape[1:], start + index * num_bytes
        data = np.frombuffer(self._map, np.uint8, num_bytes, start)
        if not info.is_quantised:
            return data.view(_numpy_dtype(info.dtype)).reshape(shape).copy()
        try:
            num_rows = math.prod(shape[:-1])
            num_rows //= math.gcd(num_rows, _ROWS_AS_ONE)
            return dequantize(data.reshape(num_rows, -1), info.ggml_type).reshape(shape)
        except NotImplementedError as error:
            raise WeightsError(f"{name} in {self.path} is quantised as {info.dtype}, which is not supported") from error

    def _read_header(self, cursor: _Cursor) -> None:
        version = cursor.number("<I")
        if version & 0xFFFF == 0:
            raise WeightsError(f"{self.path} is big-endian; only little-endian GGUF files are read")
        if version not in _VERSIONS:
            raise WeightsError(f"{self.path} is GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_values = cursor.number("<Q"), cursor.number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(GGUFValueType(cursor.number("<I")))
        found = [self._read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        data_start = -(-cursor.offset // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, ggml_type, shape, offset in found:
            block, block_bytes = GGML_QUANT_SIZES[ggml_type]
            info = TensorInfo(ggml_type, shape, data_start + offset, int(np.prod(shape, dtype=object)) // block * block_bytes)
            if info.start + info.num_bytes > len(self._map):
                raise ValueError(f"the data of {name} ends at {info.start + info.num_bytes}, the file at {len(self._map)}")
            self.tensors[name] = info

    @staticmethod
    def _read_tensor_info(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = cursor.string()
        fastest_first = [cursor.number("<Q") for _ in range(cursor.number("<I"))]
        ggml_type = GGMLQuantizationType(cursor.number("<I"))
        return name, ggml_type, tuple(reversed(fastest_first)), cursor.number("<Q")


class _CutShort(Exception):
    """The file ends before what it announces."""


class _Cursor:
    """Reads values off a buffer one after the other."""

    def __init__(self, buffer: mmap.mmap, offset: int):
        self._buffer = buffer
        self.offset = offset

    def take(self, num_bytes: int) -> bytes:
        start, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self._buffer):
            raise _CutShort(f"{num_bytes} bytes are announced at {start}, the file ends at {len(self._buffer)}")
        return self._buffer[start : self.offset]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        kind, length = GGUFValueType(self.number("<I")), self.number("<Q")
        if kind in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            return [self.value(kind) for _ in range(length)]
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()


def _numpy_dtype(name: str) -> np.dtype:
    import ml_dtypes  # registers bfloat16

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
