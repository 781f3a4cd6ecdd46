"""Converts a model: Hugging Face folder, id or GGUF file to Orbax, Orbax to a Hugging Face folder.

    jaxserve convert --model=Qwen/Qwen3-0.6B --output=qwen3-orbax
    jaxserve convert --model=model-Q4_K_M.gguf --output=model-orbax --dtype=bfloat16
    jaxserve convert --model=qwen3-orbax --output=qwen3-hf
    jaxserve convert --model=Qwen/Qwen3-0.6B --output=draft --num_layers=2

An Orbax folder holds numbered versions, each with the config and the tokenizer; `LLM(folder)` takes the newest, onto one device,
and `checkpoints.orbax.load` restores one onto any mesh. A version appears when all of it is written: a conversion that is killed
leaves the one before intact. --num_layers keeps a model's first layers alone, between its embedding and its head: a draft of the
same vocabulary that needs no training. Runs on the CPU, in about the model's size of memory; towards Hugging Face, and a file's
(--max_shard_gb).
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxserve.cli.common.command import refuse_bad_input, run_command
from jaxserve.models.config import DTYPES

_MODEL = flags.DEFINE_string("model", None, "A Hugging Face folder or id, a GGUF file, or an Orbax folder.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "The folder to write.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "auto", DTYPES, "Of an Orbax version; auto: as stored, bfloat16 where that is quantised.")
_KEEP = flags.DEFINE_integer("keep", 1, "Versions to keep in an Orbax folder, the new one included.", lower_bound=1)
_LAYERS = flags.DEFINE_integer(
    "num_layers", None, "Towards Orbax: how many of its first layers are kept; unset: all.", lower_bound=1
)
_SHARD = flags.DEFINE_float("max_shard_gb", 5.0, "Towards Hugging Face: the largest file, in 1e9 bytes.", lower_bound=1e-6)


def read_source(path: Path) -> tuple[Any, dict[str, str | bytes], bool]:
    """(reader, files to lie beside the weights, whether the weights are quantised) of a Hugging Face folder or a GGUF file."""
    from checkpoints.convert import side_files
    from checkpoints.huggingface import SafetensorsReader

    if path.is_dir():
        reader, files = SafetensorsReader(path), side_files(path)
        if "config.json" not in files:
            raise ValueError(f"{path} has no config.json, which says what model its weights are")
        return reader, dict(files), False
    from checkpoints import gguf

    reader = gguf.GGUFReader(path)
    config = gguf.hf_config(reader)
    contents = {
        "config.json": config,
        "generation_config.json": gguf.generation_config(reader),
        "tokenizer.json": gguf.tokenizer_json(reader),
        "tokenizer_config.json": gguf.tokenizer_config(reader),
    }
    return reader, {name: json.dumps(value, indent=2) for name, value in contents.items()}, "dtype" not in config


def first_layers(said: dict[str, Any], num: int) -> dict[str, Any]:
    """The config.json of a model's first layers. UsageError if it has fewer."""
    has = said["num_hidden_layers"]
    if num > has:
        raise app.UsageError(f"--num_layers={num}: {_MODEL.value} has {has}")
    kept = {name: said[name][:num] for name in ("layer_types",) if said.get(name)}
    return said | kept | {"num_hidden_layers": num}


def to_orbax(path: Path, output: str, dtype: str) -> Path:
    from checkpoints import convert
    from jaxserve.models import Decoder, ModelConfig, ignorable_keys, key_table, named_leaves

    reader, files, quantised = read_source(path)
    said, ignore = json.loads(files["config.json"]), ()
    if _LAYERS.value is not None:
        ignore = tuple(rf"model\.layers\.{i}\..*" for i in range(_LAYERS.value, said["num_hidden_layers"]))
        said = first_layers(said, _LAYERS.value)
        files["config.json"] = json.dumps(said, indent=2)
    config = ModelConfig.from_hf(said)
    ignore += ignorable_keys(config)
    if dtype == "auto" and quantised:
        dtype = "bfloat16"
    abstract = named_leaves(Decoder.abstract(config, "bfloat16" if dtype == "auto" else dtype))
    table = key_table(config, reader.keys())
    if dtype == "auto":
        abstract = convert.stored_dtypes(reader, abstract, table)
    else:
        said.pop("torch_dtype", None)
        files["config.json"] = json.dumps(said | {"dtype": dtype}, indent=2)
    return convert.to_orbax(reader, abstract, table, output, files, ignore=ignore, keep=_KEEP.value, progress=True)


def to_huggingface(version: Path, output: str) -> Path:
    from checkpoints import convert
    from jaxserve.models import ModelConfig, hf_tensors

    config = ModelConfig.from_hf(version)
    shard = int(_SHARD.value * 1e9)
    return convert.to_huggingface(version, lambda path, x: hf_tensors(config, path, x), output, max_shard_bytes=shard)


def convert() -> Path:
    """What the flags ask for; the folder that was made."""
    from checkpoints import orbax
    from checkpoints.huggingface import resolve

    path = resolve(_MODEL.value)
    version = orbax.find_version(path)
    if version is not None and _DTYPE.value != "auto":
        raise app.UsageError("--dtype is for conversions to Orbax; give LLM(dtype=...) or convert the original")
    if version is not None and flags.FLAGS["keep"].present:
        raise app.UsageError(f"--keep is for Orbax's versions; {_MODEL.value} is Orbax and becomes a Hugging Face folder")
    if version is not None and _LAYERS.value is not None:
        raise app.UsageError(f"--num_layers is for conversions to Orbax; {_MODEL.value} is Orbax: convert the original")
    if version is None and flags.FLAGS["max_shard_gb"].present:
        raise app.UsageError(f"--max_shard_gb is for Hugging Face folders; {_MODEL.value} is no Orbax folder and becomes one")
    return to_orbax(path, _OUTPUT.value, _DTYPE.value) if version is None else to_huggingface(version, _OUTPUT.value)


def main() -> None:
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of each phase
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is first imported, below
    start = time.monotonic()
    with refuse_bad_input():
        made = convert()
    size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
    print(f"{made}: {size / 1e6:.1f} MB in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    run_command(main)
