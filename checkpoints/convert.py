"""From a checkpoint reader to an Orbax checkpoint, and from there to a Hugging Face folder.

The names of weights and the changes of their layouts are given as tables and functions. All weights pass through host memory once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from checkpoints import orbax
from checkpoints.huggingface import INDEX_NAME
from checkpoints.weights import Progress, Reader, Source, load_weights

if TYPE_CHECKING:
    import jax

SIDE_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")

# (path, array) -> the tensors it becomes, by their names
Split = Callable[[str, np.ndarray], Mapping[str, np.ndarray]]


def side_files(folder: str | os.PathLike[str]) -> dict[str, bytes]:
    """name -> contents of a model folder's config, tokenizer and template files; an index of weights is none of them."""
    folder = Path(folder)
    found = {path.relative_to(folder).as_posix(): path for pattern in SIDE_FILES for path in sorted(folder.glob(pattern))}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith(INDEX_NAME)}


def stored_dtypes(
    reader: Reader, abstract: Mapping[str, jax.ShapeDtypeStruct], table: Mapping[str, Source]
) -> dict[str, jax.ShapeDtypeStruct]:
    """`abstract` with each parameter in the dtype of its tensors, so that nothing is rounded on the way."""
    import jax
    import jax.numpy as jnp

    keys = set(reader.keys())
    dtypes = {path: {reader.dtype(key) for key in source.keys if key in keys} for path, source in table.items()}
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, jnp.result_type(*dtypes[path]) if dtypes[path] else leaf.dtype)
        for path, leaf in abstract.items()
    }


def to_orbax(
    reader: Reader,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Mapping[str, Source],
    folder: str | os.PathLike[str],
    files: Mapping[str, str | bytes],
    *,
    ignore: Sequence[str] = (),
    keep: int = 1,
    progress: bool | Progress = False,
) -> Path:
    """Loads every parameter and writes the next version in `folder`; returns its path. Arguments and errors as `load_weights`' and
    `orbax.save`'s."""
    return orbax.save(folder, load_weights(reader, abstract, table, ignore=ignore, progress=progress), files, keep=keep)


def to_huggingface(
    version: str | os.PathLike[str],
    split: Split,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes a version as safetensors, with the files that lie beside it. Everything keeps its dtype.

    Beyond the weights themselves it needs memory for copies of one shard's tensors.

    Args:
      split: what each parameter becomes; best views of it.
      folder: a new or empty one; it gets its name when all is written.
      max_shard_bytes: more than this is several files and an index; a tensor is never split.

    Raises:
      ValueError: `folder` is not empty.
      WeightsError: the version can't be read.
    """
    from safetensors.numpy import save_file

    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: give a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, contents in side_files(version).items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(contents)
    leaves = orbax.load(version, orbax.stored(version))
    tensors: dict[str, np.ndarray] = {}  # views of the leaves, each of which goes with the last of its views
    for path in list(leaves):
        tensors |= split(path, np.asarray(leaves.pop(path)))
    total_size = sum(x.nbytes for x in tensors.values())
    shards = _shards(tensors, max_shard_bytes)
    weight_map = {}
    for i, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        shard = {name: np.ascontiguousarray(tensors.pop(name)) for name in names}
        save_file(shard, partial / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    return folder


def _shards(tensors: Mapping[str, np.ndarray], max_bytes: int) -> list[list[str]]:
    """Names in their order, each list of at most `max_bytes` or a single tensor."""
    shards: list[list[str]] = [[]]
    held = 0
    for name in sorted(tensors):
        if shards[-1] and held + tensors[name].nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += tensors[name].nbytes
    return shards
