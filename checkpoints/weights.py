"""Moving weights from a checkpoint reader onto devices, one tensor at a time.

Here are the reader protocol, `Source` (which checkpoint tensors make one parameter, and how) and the one error that lists every
weight that does not fit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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


@dataclass(frozen=True)
class Source:
    """Where one parameter comes from: the checkpoint tensors `keys`, turned into one array by `convert`.

    `convert` gets the tensors in the order of `keys`. The shape of its result must follow from their shapes alone, and its dtype
    from theirs (transpose, concatenate, reshape, ...): it is first run on shapes without data, to find every misfit early.
    """

    keys: tuple[str, ...]
    convert: Callable[[list[np.ndarray]], np.ndarray]


def load_weights(
    reader: Reader,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Mapping[str, Source],
    *,
    ignore: Sequence[str] = (),
    progress: bool | Progress = False,
) -> dict[str, jax.Array]:
    """Read every parameter of `abstract` through `table`, cast it to its dtype and place it with its sharding.

    Args:
      reader: the checkpoint (SafetensorsReader, GGUFReader, or anything with their methods).
      abstract: path -> shape, dtype and sharding (None: the default device) of each parameter.
      table: path -> Source, for exactly the paths of `abstract`.
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
        loaded[path] = _load_one(reader, table[path], target)
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


def _load_one(reader: Reader, source: Source, target: jax.ShapeDtypeStruct) -> jax.Array:
    import jax  # here, so that reading a tokenizer or a config does without it

    host = source.convert([reader.read(key) for key in source.keys])
    host = np.ascontiguousarray(host.astype(target.dtype, copy=False))
    if target.sharding is None:
        array = jax.device_put(host)
    else:
        array = jax.make_array_from_callback(target.shape, target.sharding, lambda index: host[index])
    return array.block_until_ready()  # so that the host copies of two parameters never live at once


def _progress_bar(total: int) -> Progress:
    from tqdm import tqdm

    bar = tqdm(total=total, desc="loading weights", unit="tensor")

    def report(path: str, done: int, total: int) -> None:
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report
