"""From a model's name to what an engine and its texts need: the Flax module with its weights, eos ids, defaults, tokenizer.

Owns the order of the steps (find, read the config, load the weights straight into the module's leaves). Knows nothing of engines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import DTYPES, require_one_of
from jaxserve.models import Decoder, GenerationDefaults, ModelConfig, ignorable_keys, key_table, named_leaves, with_leaves
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger("jaxserve")


@dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory. tokenizer: None where it was not asked for."""

    module: Decoder
    config: ModelConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer | None


def load_model(
    model: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    skip_tokenizer_init: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Loads a checkpoint: a Hugging Face folder or id, or a GGUF file.

    tokenizer: where it lies, if not beside the model. dtype: of weights and activations; "auto" is the checkpoint's own, bfloat16
    where it is quantised or does not say. progress: a bar on stderr.

    Raises:
      FileNotFoundError: nothing by that name here, and no download to be had.
      NotImplementedError: an architecture or option of its config that is not supported; the message names it.
      WeightsError: missing, extra or mis-shaped tensors, all listed.
      ValueError: no tokenizer with it (pass skip_tokenizer_init=True to work with token ids), or contradictory options.
    """
    from checkpoints.huggingface import SafetensorsReader, resolve

    require_one_of(DTYPES, dtype=dtype)
    if skip_tokenizer_init and tokenizer is not None:
        raise ValueError(f"skip_tokenizer_init=True contradicts tokenizer={tokenizer!r}: leave one of them out")
    path = resolve(model, revision=revision)
    if path.is_dir():
        config, defaults = ModelConfig.from_hf(path), GenerationDefaults.from_hf(path)
        reader: Any = SafetensorsReader(path)
    else:
        from checkpoints import gguf

        reader = gguf.GGUFReader(path)
        said = gguf.hf_config(reader)
        config = ModelConfig.from_hf(said)
        defaults = GenerationDefaults.from_dicts(gguf.generation_config(reader), said)
    found = None if skip_tokenizer_init else _tokenizer(path, tokenizer)
    module = load_weights(reader, config, dtype=dtype, progress=progress)
    return LoadedModel(module, config, defaults, found)


def _tokenizer(path: Path, given: str | Path | Tokenizer | None) -> Tokenizer:
    if isinstance(given, Tokenizer):
        return given
    try:
        return Tokenizer.from_id(given or path)
    except ValueError as error:
        raise ValueError(f"{error} (give tokenizer=, or skip_tokenizer_init=True to work with token ids)") from error


def load_weights(reader: Any, config: ModelConfig, *, dtype: str = "auto", progress: bool = False) -> Decoder:
    """The decoder of `config` with the weights of a checkpoint reader, streamed tensor by tensor to the default device."""
    from checkpoints.weights import load_weights

    param_dtype = (config.dtype or "bfloat16") if dtype == "auto" else dtype
    abstract, table = Decoder.abstract(config, param_dtype), key_table(config, reader.keys())
    leaves = load_weights(reader, named_leaves(abstract), table, ignore=ignorable_keys(config), progress=progress)
    return with_leaves(abstract, leaves)


def random_model(config: ModelConfig | Mapping[str, Any], *, dtype: str = "bfloat16", seed: int = 0) -> Decoder:
    """A decoder with random weights, for benchmarks and tests. config: a ModelConfig or a Hugging Face config as a dict."""
    from jaxserve.models import random_params

    require_one_of(DTYPES[1:], dtype=dtype)
    config = config if isinstance(config, ModelConfig) else ModelConfig.from_hf(json.loads(json.dumps(dict(config))))
    return with_leaves(Decoder.abstract(config, dtype), random_params(config, seed, dtype))
