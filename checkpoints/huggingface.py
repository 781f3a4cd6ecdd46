"""Hugging Face checkpoints: finding the folder of a model, its JSON files, and reading its safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.json_files import read_object
from checkpoints.weights import WeightsError

INDEX_NAME = "model.safetensors.index.json"
DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "medusa_lm_head.pt")
NOT_DOWNLOADED = ("original/*", "consolidated*")  # the same weights again, as their makers keep them
_LFS_POINTER = b"version https://git-lfs"
_DTYPE_NAMES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8"} | {
    f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("F", "float"), ("I", "int")) for bits in (8, 16, 32, 64)
}


def resolve(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The local path of a model: a folder or a GGUF file as given, or the downloaded snapshot of a Hugging Face id.

    A path that exists is taken as it is; anything that looks like "owner/name" (or a bare "name") is looked up in the Hugging Face
    cache and downloaded where the network allows. Offline, a model that was downloaded before is still found.

    Raises:
      FileNotFoundError: neither a local path nor a model that can be had now; the message says which of these failed and why.
      ValueError: `revision` with a local path, which has none.
    """
    local = Path(model).expanduser()
    if str(model) and local.exists():
        if revision is not None:
            raise ValueError(f"revision={revision!r} needs a Hugging Face id; {str(model)!r} is a local path")
        return local
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", str(model)) or local.suffix == ".gguf":
        raise FileNotFoundError(f"{str(model)!r} is not a file or folder here, and cannot be a Hugging Face id (owner/name)")
    return _download(str(model), revision)


def _download(model_id: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        raise FileNotFoundError(
            f"{model_id!r} is not a folder here, and looking it up on Hugging Face needs the package huggingface_hub"
        ) from error
    try:
        patterns = {"allow_patterns": list(DOWNLOADED), "ignore_patterns": list(NOT_DOWNLOADED)}
        return Path(huggingface_hub.snapshot_download(model_id, revision=revision, **patterns))
    except errors.GatedRepoError as error:
        reason = "it is gated: accept its terms on huggingface.co and log in with `hf auth login`"
        raise FileNotFoundError(f"{model_id!r} cannot be downloaded from Hugging Face: {reason}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise FileNotFoundError(f"{model_id!r}{at} is neither a folder here nor a model on Hugging Face ({error})") from error
    except (OSError, errors.HfHubHTTPError) as error:  # no network, offline with nothing cached, a server that fails
        raise FileNotFoundError(
            f"{model_id!r} is not a folder here, not in the Hugging Face cache, and cannot be downloaded now; "
            f"give the path of a local copy, or connect and try again ({type(error).__name__}: {error})"
        ) from error


def read_json(folder: str | os.PathLike[str], name: str) -> dict[str, Any] | None:
    """The JSON object in `folder/name`, None where there is no such file.

    Raises:
      ValueError: the file is not JSON, or not an object.
    """
    path = Path(folder) / name
    return read_object(path) if path.is_file() else None


class SafetensorsReader:
    """The tensors of a folder with `model.safetensors`, or with several files and `model.safetensors.index.json`.

    Opening reads the headers only; files are memory-mapped and `read` copies one tensor out.

    Raises:
      WeightsError: no weights in the folder, several files without an index, an index that names absent files or tensors, or a
        file that is corrupt; every such file is listed.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder: Path = Path(folder)
        index = _read_index(self.folder)
        names = sorted(set(index.values())) if index is not None else [_single_file(self.folder)]
        problems: list[str] = []
        self._files: dict[str, Any] = {}  # tensor -> the open file that holds it
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        files = {}
        for name in names:
            try:
                files[name] = self._open(self.folder / name)
            except WeightsError as error:
                problems.append(str(error))
        if index is not None and not problems:
            for key, name in index.items():
                if self._files.get(key) is not files[name]:
                    problems.append(f"{INDEX_NAME} places {key} in {name}, which does not hold it")
        if problems:
            raise WeightsError(f"cannot read the weights in {self.folder}:\n  " + "\n  ".join(problems))

    def keys(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._shapes[key]

    def dtype(self, key: str) -> str:
        return self._dtypes[key]

    def read(self, key: str) -> np.ndarray:
        return self._files[key].get_tensor(key)

    def read_part(self, key: str, axis: int, start: int, stop: int) -> np.ndarray:
        """Entries of the tensor along an axis; nothing else of it is read."""
        piece = self._files[key].get_slice(key)
        return piece[start:stop] if axis == 0 else piece[:, start:stop]

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise WeightsError(f"{path.name} is absent, but {INDEX_NAME} names it")
        try:
            file = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            with path.open("rb") as f:
                pointer = f.read(len(_LFS_POINTER)) == _LFS_POINTER
            hint = "it is a git-lfs pointer: run `git lfs pull`" if pointer else f"corrupt or cut short ({error})"
            raise WeightsError(f"{path.name} cannot be read: {hint}") from error
        for key in file.keys():
            if key in self._files:
                raise WeightsError(f"{path.name} holds {key}, which another file holds too")
            piece = file.get_slice(key)
            dtype = str(piece.get_dtype())
            self._files[key] = file
            self._shapes[key] = tuple(piece.get_shape())
            self._dtypes[key] = _DTYPE_NAMES.get(dtype, dtype)
        return file


def _read_index(folder: Path) -> dict[str, str] | None:
    try:
        index = read_json(folder, INDEX_NAME)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{folder / INDEX_NAME} has no weight_map from tensor to file")
    return weight_map


def _single_file(folder: Path) -> str:
    if (folder / "model.safetensors").is_file():
        return "model.safetensors"
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(names) == 1:
        return names[0]
    found = f"several safetensors files ({', '.join(names)}) and no {INDEX_NAME}" if names else "no safetensors file"
    others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
    hint = f"; pickled weights ({', '.join(others)}) are not read: save them as safetensors first" if others else ""
    raise WeightsError(f"{folder} has {found}{hint}")
