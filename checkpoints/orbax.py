"""Orbax checkpoints: numbered versions in a folder, each complete or not there at all.

    FOLDER/3/weights/                                           what Orbax wrote
    FOLDER/3/config.json, tokenizer.json, ...                   files given with the weights
    FOLDER/4.partial/                                           a version being written, or what is left of one that was killed

A version gets its name by one rename when all of it is written, and only then are older ones deleted. So the last complete version
stays intact when a save is killed. One process writes to a folder at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.weights import WeightsError

if TYPE_CHECKING:
    import jax

_WEIGHTS = "weights"
_PARTIAL = ".partial"


def find_version(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete version in `folder`, or `folder` itself if it is one; None if it is no folder of this layout."""
    folder = Path(folder)
    if (folder / _WEIGHTS).is_dir() and not folder.name.endswith(_PARTIAL):
        return folder
    numbered = _versions(folder)
    return folder / str(numbered[-1]) if numbered else None


def _versions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and (path / _WEIGHTS).is_dir())


def save(
    folder: str | os.PathLike[str],
    leaves: Mapping[str, Any],
    files: Mapping[str, str | bytes] | None = None,
    *,
    keep: int = 1,
) -> Path:
    """Writes the next version and returns its folder.

    Args:
      leaves: path ("layers/0/mlp/down_proj/kernel") -> array, on any devices.
      files: name -> contents, to lie beside the weights.
      keep: how many versions to keep, this one included.

    Raises:
      ValueError: `keep` is less than 1, `leaves` is empty, or `folder` holds something else.
      NotImplementedError: this is one of several processes of a JAX group.
    """
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    if jax.process_count() > 1:  # Orbax would wait for all of them, and each would make and name the same folders
        raise NotImplementedError(
            f"a version is written by one process, and this is one of {jax.process_count()}: save from a program of one process, "
            "or convert the files that the processes have read"
        )

    folder = Path(folder).absolute()
    if keep < 1 or not leaves:
        raise ValueError(f"{keep=} must be >= 1, and there must be weights to save ({len(leaves)} leaves)")
    if folder.exists() and not _is_ours(folder):
        raise ValueError(f"{folder} holds other things than checkpoints: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*" + _PARTIAL):
        shutil.rmtree(left)
    version = folder / str((_versions(folder) or [0])[-1] + 1)
    partial = version.with_name(version.name + _PARTIAL)
    partial.mkdir()
    for name, contents in (files or {}).items():
        path = partial / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)
    ocp.save(str(partial / _WEIGHTS), _nested(leaves))
    _flush(partial)
    partial.rename(version)
    for number in _versions(folder)[:-keep]:
        shutil.rmtree(folder / str(number))
    return version


def _is_ours(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else [""]
    return all(name.removesuffix(_PARTIAL).isdecimal() for name in names)


def _flush(folder: Path) -> None:
    """All files of the folder reach the disk before the rename that names it does."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def stored(version: str | os.PathLike[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """path -> shape and dtype of every array of a version, in no order. WeightsError if it can't be read."""
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    try:
        tree = ocp.metadata(_weights(version)).metadata
    except (OSError, ValueError, ocp.errors.InvalidLayoutError) as error:
        raise WeightsError(f"{version} cannot be read as an Orbax checkpoint: {error}") from error
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in found}


def load(version: str | os.PathLike[str], abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The weights of a version, cast to the dtypes of `abstract` and placed with its shardings, whatever they were saved with.

    Each process and device reads only its own part. A leaf of `abstract` without a sharding goes to the default device. Where
    a sharding has no device of this process, an array without parts is returned.

    Raises:
      WeightsError: weights are missing, unused or of another shape, all listed; or the version can't be read.
    """
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    found = stored(version)
    problems = [f"missing: {path} {leaf.shape}" for path, leaf in abstract.items() if path not in found]
    problems += [f"unused: {path} {leaf.shape} has no place in the model" for path, leaf in found.items() if path not in abstract]
    for path in abstract.keys() & found.keys():
        if abstract[path].shape != found[path].shape:
            problems.append(f"shape: {path} is {found[path].shape}, the model expects {abstract[path].shape}")
    if problems:
        lines = "\n  ".join(sorted(problems))
        raise WeightsError(f"the checkpoint does not fit the model ({len(problems)} problems):\n  {lines}")
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or default) for path, leaf in abstract.items()
    }
    here = {path: leaf for path, leaf in wanted.items() if leaf.sharding.addressable_devices}
    tree: Any = ocp.load(_weights(version), _nested({path: here.get(path, ocp.PLACEHOLDER) for path in wanted}))
    return {path: _at(tree, path) if path in here else _without_parts(leaf) for path, leaf in wanted.items()}


def _without_parts(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    import jax

    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [], dtype=leaf.dtype)


def _weights(version: str | os.PathLike[str]) -> str:
    return str((Path(version) / _WEIGHTS).absolute())


def _nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = leaf
    return tree


def _at(tree: dict[str, Any], path: str) -> Any:
    for name in path.split("/"):
        tree = tree[name]
    return tree
