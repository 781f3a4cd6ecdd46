"""Moving weights from a checkpoint reader onto devices, one tensor at a time.

Here are the reader protocol, `Source` (which checkpoint tensors make one parameter, and how) and the one error that lists every
weight that does not fit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import jax

FLOAT_DTYPES = ("bfloat16", "float16", "float32")  # what a checkpoint tensor may be stored as

Progress = Callable[[str, int, int], None]  # (path just loaded, how many so far, how many in all)


class WeightsError(ValueError):
    """A checkpoint cannot be read, or does not hold what the model needs. The message lists everything that is wrong."""


class Reader(Protocol):
    """A checkpoint: named host arrays, read one by one. Shapes and dtypes are known without reading any data."""

    def keys(self) -> Collection[str]: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def dtype(self, key: str) -> str:
        """The name of the stored dtype, such as "bfloat16"; `load_weights` refuses all but FLOAT_DTYPES."""
        ...

    def read(self, key: str) -> np.ndarray:
        """The tensor, in an array of its own that the caller may keep."""
        ...


@runtime_checkable
class PartReader(Reader, Protocol):
    """A Reader whose tensors need not be read whole."""

    def read_part(self, key: str, axis: int, start: int, stop: int) -> np.ndarray:
        """The tensor's entries from start to stop along axis 0 or 1, as `read` gives all of it."""
        ...


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: the checkpoint tensors `keys`, turned into one array by `convert`.

    `convert` gets the tensors in the order of `keys`. The shape of its result must follow from their shapes alone, and its dtype
    from theirs (transpose, concatenate, reshape, ...): it is first run on shapes without data, to find every misfit early.
    """

    keys: tuple[str, ...]
    convert: Callable[[list[np.ndarray]], np.ndarray]


@dataclass(frozen=True, eq=False)
class Cut:
    """How a parameter is cut over devices: entry i of it, along `axis`, is entry places[i] of the uncut one, or zeros where that is
    -1. Devices have equally many entries, in the order of `places`.

    stored_axis: the tensors' axis that becomes `axis`, along which several are one after the other. None: an entry is made of whole
      tensors, equally many each (experts that have a tensor each).
    """

    axis: int
    places: np.ndarray  # i64
    stored_axis: int | None


def load_weights(
    reader: Reader,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Mapping[str, Source],
    *,
    cuts: Mapping[str, Cut] | None = None,
    ignore: Sequence[str] = (),
    progress: bool | Progress = False,
) -> dict[str, jax.Array]:
    """Read every parameter of `abstract` through `table`, cast it to its dtype and place it with its sharding.

    Args:
      reader: the checkpoint (SafetensorsReader, GGUFReader, or anything with their methods).
      abstract: path -> shape, dtype and sharding (None: the default device) of each parameter.
      table: path -> Source, for exactly the paths of `abstract`.
      cuts: path -> Cut, of the parameters that are cut over devices. Their shapes in `abstract` are the uncut ones, their shardings
        those of what is loaded. From a `PartReader` only the parts of this process's devices are read.
      ignore: regular expressions; checkpoint tensors that one of them matches in full may go unused.
      progress: True shows a bar on stderr; a callable is told (path, number loaded, number in all) after each parameter.

    Returns:
      path -> array, in the order of `abstract`. Host memory in use at any time is about one parameter: its parts as stored,
      their conversion and the cast of it. The values are cast once, from the stored dtype to the parameter's.

    Raises:
      WeightsError: tensors are missing, unused (and not ignored), of the wrong shape or of a dtype that is not supported; all of
        them are listed. Nothing is read before this is known.
      ValueError: `abstract` and `table` name different paths.
    """
    if abstract.keys() != table.keys():
        raise ValueError(
            "abstract and table must name the same paths; "
            f"only in abstract: {sorted(abstract.keys() - table.keys())}, only in table: {sorted(table.keys() - abstract.keys())}"
        )
    problems = find_problems(reader, abstract, table, ignore=ignore)
    if problems:
        raise WeightsError(f"the checkpoint does not fit the model ({len(problems)} problems):\n  " + "\n  ".join(problems))
    report = _progress_bar(len(table)) if progress is True else (progress or None)
    loaded = {}
    for path, target in abstract.items():
        loaded[path] = _load_one(reader, table[path], target, (cuts or {}).get(path))
        if report is not None:
            report(path, len(loaded), len(table))
    return loaded


def find_problems(
    reader: Reader,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Mapping[str, Source],
    *,
    ignore: Sequence[str] = (),
) -> list[str]:
    """One line for each tensor that is missing, mis-shaped, unused or of an unsupported dtype; reads no data."""
    keys = set(reader.keys())
    wanted = {key: path for path, source in table.items() for key in source.keys}
    problems = [f"missing: {key} (for {path})" for key, path in wanted.items() if key not in keys]
    for key in wanted:
        if key in keys and reader.dtype(key) not in FLOAT_DTYPES:
            problems.append(f"dtype: {key} is {reader.dtype(key)}; only {', '.join(FLOAT_DTYPES)} can be loaded")
    for path, target in abstract.items():
        if keys.issuperset(table[path].keys):
            problems.extend(_shape_problem(reader, path, table[path], target))
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignore)) if ignore else None
    for key in sorted(keys - wanted.keys()):
        if not (ignored and ignored.fullmatch(key)):
            problems.append(f"unused: {key} {reader.shape(key)} has no place in the model")
    return problems


def _shape_problem(reader: Reader, path: str, source: Source, target: jax.ShapeDtypeStruct) -> list[str]:
    shapes = tuple(reader.shape(key) for key in source.keys)
    found = ", ".join(f"{key} {shape}" for key, shape in zip(source.keys, shapes, strict=True))
    try:
        shape = _converted_shape(source.convert, shapes)
    except (ValueError, IndexError) as error:
        return [f"shape: {path} expects {target.shape}; found {found}, which do not go together ({error})"]
    if shape == target.shape:
        return []
    return [f"shape: {path} expects {target.shape}; found {found}, which makes {shape}"]


@functools.lru_cache(maxsize=64)  # the layers of a model ask the same; a layer of many experts takes a moment to convert
def _converted_shape(convert: Callable[[list[np.ndarray]], np.ndarray], shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    # One shared zero under every shape: views cost nothing, and a concatenation costs a byte an element for a moment.
    return convert([np.broadcast_to(np.zeros((), np.int8), shape) for shape in shapes]).shape


def _load_one(reader: Reader, source: Source, target: jax.ShapeDtypeStruct, cut: Cut | None) -> jax.Array:
    import jax  # here, so that reading a tokenizer or a config does without it

    if target.sharding is not None and not target.sharding.addressable_devices:  # other processes' alone
        shape = target.shape if cut is None else _cut_shape(target, cut)
        return jax.make_array_from_single_device_arrays(shape, target.sharding, [], dtype=target.dtype)
    if cut is not None:
        whole = _whole(reader, source)
        part = lambda index: _part(whole, source, target, cut, index)  # noqa: E731
        return jax.make_array_from_callback(_cut_shape(target, cut), _of(target), part).block_until_ready()
    host = source.convert([reader.read(key) for key in source.keys])
    host = np.ascontiguousarray(host.astype(target.dtype, copy=False))
    if target.sharding is None:
        array = jax.device_put(host)
    else:
        array = jax.make_array_from_callback(target.shape, target.sharding, lambda index: host[index])
    return array.block_until_ready()  # so that the host copies of two parameters never live at once


def _cut_shape(target: jax.ShapeDtypeStruct, cut: Cut) -> tuple[int, ...]:
    return (*target.shape[: cut.axis], len(cut.places), *target.shape[cut.axis + 1 :])


def _of(target: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    if target.sharding is None:
        raise ValueError(f"a parameter of shape {target.shape} is cut, and has no sharding")
    return target.sharding


def _whole(reader: Reader, source: Source) -> PartReader:
    """The reader, or where it can't read parts one of this parameter's tensors, in memory."""
    return reader if isinstance(reader, PartReader) else _InMemory({key: reader.read(key) for key in source.keys})


class _InMemory:
    """A PartReader of tensors that are read."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self._tensors = tensors

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensors[key].shape

    def dtype(self, key: str) -> str:
        return self._tensors[key].dtype.name

    def read(self, key: str) -> np.ndarray:
        return self._tensors[key]

    def read_part(self, key: str, axis: int, start: int, stop: int) -> np.ndarray:
        return self._tensors[key][(slice(None),) * axis + (slice(start, stop),)]


def _part(reader: PartReader, source: Source, target: jax.ShapeDtypeStruct, cut: Cut, index: tuple[slice, ...]) -> np.ndarray:
    """One device's part of a parameter."""
    places = cut.places[index[cut.axis]]
    if cut.stored_axis is None:
        each = len(source.keys) // target.shape[cut.axis]
        keys = [key for place in places if place >= 0 for key in source.keys[place * each : (place + 1) * each]]
        host = np.zeros((len(places), *target.shape[1:]), target.dtype)
        if keys:
            host[places >= 0] = source.convert([reader.read(key) for key in keys])
        return host
    host = source.convert([_joined(reader, source.keys, cut.stored_axis, places)])
    return np.ascontiguousarray(host.astype(target.dtype, copy=False))


def _joined(reader: PartReader, keys: Sequence[str], axis: int, places: np.ndarray) -> np.ndarray:
    """The entries `places` of tensors that are one after the other along an axis, zeros for -1."""
    ends = np.cumsum([reader.shape(key)[axis] for key in keys])
    tensor = np.where(places < 0, -1, np.searchsorted(ends, places, side="right"))
    breaks = np.flatnonzero((np.diff(tensor) != 0) | ((tensor[1:] >= 0) & (np.diff(places) != 1))) + 1
    parts: list[np.ndarray | int] = []  # a number: so many zeros
    for run in np.split(np.arange(len(places)), breaks):
        at = int(tensor[run[0]])
        if at < 0:
            parts.append(len(run))
        else:
            start = int(places[run[0]] - (ends[at - 1] if at else 0))
            parts.append(reader.read_part(keys[at], axis, start, start + len(run)))
    shape, dtype = list(reader.shape(keys[0])), next((x.dtype for x in parts if isinstance(x, np.ndarray)), np.float32)
    zeros = [np.zeros((*shape[:axis], x, *shape[axis + 1 :]), dtype) if isinstance(x, int) else x for x in parts]
    return zeros[0] if len(zeros) == 1 else np.concatenate(zeros, axis)


def _progress_bar(total: int) -> Progress:
    from tqdm import tqdm

    bar = tqdm(total=total, desc="loading weights", unit="tensor")

    def report(path: str, done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report
