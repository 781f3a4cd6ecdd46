"""A checkpoint on disk: where it lies, and what it says of itself.

Knows nothing of tokenizers or devices.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.models.config import ModelConfig
from jaxserve.models.generation_defaults import GenerationDefaults

_SAMPLES, _SAMPLE_BYTES = 4, 4096  # of each file: at its beginning, in its midst, at its end


@dataclass(frozen=True)
class ModelFiles:
    """A checkpoint on disk, of which its config is read. reader: of its tensors; None for a version of an Orbax folder."""

    path: Path
    config: ModelConfig
    defaults: GenerationDefaults
    reader: Any

    def dtype(self, wanted: str) -> str:
        """Of the weights that `load_files(dtype=wanted)` gives."""
        return weight_dtype(self.config, wanted)

    def fingerprint(self) -> str:
        """Of the weights' files: twelve hex digits of their names, sizes and some of their bytes. Copies have the same,
        checkpoints of one shape others, unless they differ between the samples alone. The folder's own name does not count."""
        found = hashlib.sha256()
        for name, file in self._weight_files():
            size = file.stat().st_size
            found.update(f"{name} {size}\n".encode())
            with file.open("rb") as opened:
                for part in range(_SAMPLES):
                    opened.seek(part * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                    found.update(opened.read(_SAMPLE_BYTES))
        return found.hexdigest()[:12]

    def digest(self) -> str:
        """Of the weights' files: 64 hex digits of their names and every byte, which takes a read of the checkpoint. For what must
        never be shared between weights that differ anywhere. The folder's own name does not count."""
        found = hashlib.sha256()
        for name, file in self._weight_files():
            with file.open("rb") as opened:
                found.update(f"{name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
        return found.hexdigest()

    def _weight_files(self) -> list[tuple[str, Path]]:
        """(name within the folder, path) of each file of weights, in order. A checkpoint of one file has no name."""
        if not self.path.is_dir():
            return [("", self.path)]
        pattern = "*.safetensors" if self.reader is not None else "**/*"
        files = sorted(file for file in self.path.glob(pattern) if file.is_file())
        return [(str(file.relative_to(self.path)), file) for file in files]


def find_model(model: str | Path, *, revision: str | None = None) -> ModelFiles:
    """Where a checkpoint lies and what it says of itself. Reads no weight, leaves the device alone. Errors as those of
    `loading.load_model`."""
    from checkpoints import orbax
    from checkpoints.huggingface import SafetensorsReader, resolve

    path = resolve(model, revision=revision)
    version = orbax.find_version(path)
    if version is not None:
        return ModelFiles(version, ModelConfig.from_hf(version), GenerationDefaults.from_hf(version), None)
    if path.is_dir():
        return ModelFiles(path, ModelConfig.from_hf(path), GenerationDefaults.from_hf(path), SafetensorsReader(path))
    from checkpoints import gguf

    reader = gguf.GGUFReader(path)
    said = gguf.hf_config(reader)
    defaults = GenerationDefaults.from_dicts(gguf.generation_config(reader), said)
    return ModelFiles(path, ModelConfig.from_hf(said), defaults, reader)


def weight_dtype(config: ModelConfig, dtype: str) -> str:
    """`dtype`, or where that is "auto" the config's own, bfloat16 if it names none."""
    return (config.dtype or "bfloat16") if dtype == "auto" else dtype
