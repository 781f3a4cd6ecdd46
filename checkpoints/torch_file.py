"""Tensors of a file that `torch.save` wrote, read without torch and without running what its pickle asks for.

Owns the zip archive (torch 1.6 and newer: `data.pkl`, and one member a storage) and an unpickler that knows tensors alone: any
other name in the pickle is refused before it is looked up.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.weights import WeightsError

_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "DoubleStorage": "float64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class _Storage:
    """A member of the archive: numbers of one dtype."""

    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class _Tensor:
    """A view of a storage, which lies there without gaps."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def open_folder(folder: Path, pickled: str) -> Any:
    """The reader of a folder of safetensors, or of the file `pickled` of torch.save where there are none.

    Raises: as SafetensorsReader and TorchReader.
    """
    from checkpoints.huggingface import SafetensorsReader

    if (folder / pickled).is_file() and not any(folder.glob("*.safetensors")):
        return TorchReader(folder / pickled)
    return SafetensorsReader(folder)


class TorchReader:
    """The tensors of one `.pt` or `.bin` file that holds a state dict, {name: tensor}.

    Raises:
      WeightsError: it is no such file, or its pickle asks for anything but tensors; the message names what.
    """

    def __init__(self, path: str | Path):
        self.path: Path = Path(path)
        try:
            self._archive: zipfile.ZipFile = zipfile.ZipFile(self.path)
        except zipfile.BadZipFile as error:
            hint = "corrupt, or written by torch before 1.6: load it there and save it as safetensors"
            raise WeightsError(f"{self.path.name} is not an archive of torch.save ({error}): {hint}") from None
        pickles = [name for name in self._archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise WeightsError(f"{self.path.name} has {len(pickles)} members named data.pkl, and an archive of torch.save has one")
        self._folder: str = pickles[0].removesuffix("data.pkl")
        if self._read(f"{self._folder}byteorder", b"little").strip() != b"little":
            raise WeightsError(f"{self.path.name} was written on a big-endian machine: save it anew on another, or as safetensors")
        try:
            found = _Unpickler(self._read(pickles[0])).load()
        except WeightsError as error:
            raise WeightsError(f"{self.path.name}: {error}") from None
        except Exception as error:  # a pickle may be broken in many ways
            raise WeightsError(f"{self.path.name}: its pickle can't be read ({type(error).__name__}: {error})") from None
        self._tensors: dict[str, _Tensor] = self._state_dict(found)

    def _state_dict(self, found: Any) -> dict[str, _Tensor]:
        if not isinstance(found, Mapping):
            raise WeightsError(f"{self.path.name} holds a {type(found).__name__}, and a state dict is wanted")
        others = [str(key) for key, value in found.items() if not (isinstance(key, str) and isinstance(value, _Tensor))]
        if others:
            raise WeightsError(f"{self.path.name} is not a state dict: these are not tensors: {', '.join(others[:10])}")
        return dict(found)

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensors[key].shape

    def dtype(self, key: str) -> str:
        return self._tensors[key].storage.dtype

    def read(self, key: str) -> np.ndarray:
        """The tensor, in an array of its own. WeightsError if the archive is cut short."""
        tensor = self._tensors[key]
        dtype, size = _numpy_dtype(tensor.storage.dtype), math.prod(tensor.shape)
        data = self._read(f"{self._folder}data/{tensor.storage.name}")
        if len(data) < (tensor.offset + size) * dtype.itemsize:
            raise WeightsError(f"{self.path.name} has {len(data)} bytes of the storage of {key}, {tensor.shape} {dtype}")
        return np.frombuffer(data, dtype, size, tensor.offset * dtype.itemsize).reshape(tensor.shape).copy()

    def _read(self, name: str, default: bytes | None = None) -> bytes:
        try:
            return self._archive.read(name)
        except KeyError:
            if default is None:
                raise WeightsError(f"{self.path.name} has no member {name}") from None
            return default
        except zipfile.BadZipFile as error:
            raise WeightsError(f"{self.path.name} is corrupt or cut short ({error})") from None


class _Unpickler(pickle.Unpickler):
    """Knows dicts of tensors, and no other name."""

    def __init__(self, data: bytes):
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, requires_grad, hooks: tensor,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise WeightsError(f"its pickle asks for {module}.{name}, and only tensors are read: save it as safetensors")

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", str(dtype), str(name), _, int(size)) if dtype in _DTYPES.values():
                return _Storage(name, dtype, size)
        raise WeightsError(f"its pickle names {pid!r} in place of a storage")


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *of_autograd: Any) -> _Tensor:
    """Of a tensor whose elements lie one after the other, in the order of its axes. of_autograd: requires_grad, hooks, metadata."""
    whole = isinstance(storage, _Storage) and all(isinstance(n, int) and n >= 0 for n in (offset, *shape, *stride))
    if not whole or offset + math.prod(shape) > storage.size:
        raise WeightsError(f"its pickle has a tensor {shape!r} at {offset!r}, which its storage does not hold")
    steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if any(n > 1 and step != wanted for n, step, wanted in zip(shape, stride, steps, strict=True)):
        raise WeightsError(f"a tensor {tuple(shape)} has strides {tuple(stride)}: save it contiguous")
    return _Tensor(storage, offset, tuple(shape))


def _numpy_dtype(name: str) -> np.dtype:
    import ml_dtypes  # registers bfloat16

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
