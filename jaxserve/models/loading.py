"""Loads what an engine needs of a model: the Flax module with its weights, its generation defaults and its tokenizer.

Owns the order of loading: find the files, read the config, load each weight directly into the module's leaf. Knows nothing of
engines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.models import (
    Decoder,
    GenerationDefaults,
    ModelConfig,
    ignorable_keys,
    key_table,
    named_leaves,
    transpose_kernels,
    with_leaves,
)
from jaxserve.models.config import DTYPES
from jaxserve.models.files import ModelFiles, find_model, weight_dtype
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.text.pretrained import require_vocabulary
from jaxserve.text.tokenizer import Tokenizer

logger: logging.Logger = logging.getLogger("jaxserve")


@dataclass(frozen=True)
class LoadedModel[Module: Decoder | ShardedModel]:
    """A checkpoint in memory. tokenizer: None where it was not asked for."""

    module: Module
    config: ModelConfig
    defaults: GenerationDefaults
    tokenizer: Tokenizer | None


class NoTokenizerError(ValueError):
    """There is no tokenizer where one was looked for. Its cause says what is missing there."""


def load_model(
    model: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    skip_tokenizer_init: bool = False,
    dtype: str = "auto",
    revision: str | None = None,
    transposed: bool | None = False,
    progress: bool = False,
) -> LoadedModel[Decoder]:
    """Loads a checkpoint: a Hugging Face folder or id, a GGUF file, or a folder that `jaxserve convert` made (Orbax).

    tokenizer: its folder, file or id, or a Tokenizer. None: the model's own.
    skip_tokenizer_init: load no tokenizer.
    dtype: of weights and activations. "auto": the checkpoint's own, or bfloat16 where it is quantised or names none.
    revision: of a Hugging Face id.
    transposed: lay dense kernels out as `transpose_kernels` does. None: do so where the default device's matmuls are faster that
      way, which is on a CPU.
    progress: show a bar on stderr.

    Raises:
      FileNotFoundError: there is nothing of that name here, and it can't be downloaded.
      NotImplementedError: an architecture or option of its config that is not supported; the message names it.
      WeightsError: missing, extra or mis-shaped tensors, all listed.
      NoTokenizerError: no tokenizer with it (pass skip_tokenizer_init=True to work with token ids).
      ValueError: contradictory options.
    """
    _check_dtype(dtype, DTYPES)
    check_tokenizer_choice(tokenizer, skip_tokenizer_init)
    files = find_model(model, revision=revision)
    return load_files(
        files,
        tokenizer=tokenizer,
        skip_tokenizer_init=skip_tokenizer_init,
        dtype=dtype,
        transposed=transposed,
        progress=progress,
    )


def check_tokenizer_choice(tokenizer: str | Path | Tokenizer | None, skip_tokenizer_init: bool) -> None:
    """ValueError if a tokenizer is given, and none is to be loaded."""
    if skip_tokenizer_init and tokenizer is not None:
        raise ValueError(f"skip_tokenizer_init=True contradicts tokenizer={tokenizer!r}: leave one of them out")


def load_files(
    files: ModelFiles,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    skip_tokenizer_init: bool = False,
    dtype: str = "auto",
    transposed: bool | None = False,
    progress: bool = False,
    shards: ModelShards | None = None,
) -> LoadedModel[Any]:
    """`load_model` of files that were found. Arguments and errors are its. shards: how the weights lie on several devices."""
    config = files.config
    transposed = is_best_transposed() if transposed is None else transposed
    with _tokenizer_of(files.path, tokenizer, skip_tokenizer_init) as found:
        if files.reader is None and shards is not None:
            module = load_version_cut(files.path, shards, dtype=dtype, transposed=transposed)
        elif files.reader is None:
            module = load_version(files.path, config, dtype=dtype)
            module = transpose_kernels(module) if transposed else module
        elif shards is not None:
            module = load_weights_cut(files.reader, shards, dtype=dtype, transposed=transposed, progress=progress)
        else:
            module = load_weights(files.reader, config, dtype=dtype, transposed=transposed, progress=progress)
        return LoadedModel(module, config, files.defaults, found.result())


def _check_dtype(dtype: str, choices: tuple[str, ...]) -> None:
    if dtype not in choices:
        raise ValueError(f"{dtype=} must be one of {', '.join(choices)}")


@contextmanager
def _tokenizer_of(path: Path, given: str | Path | Tokenizer | None, skip: bool) -> Iterator[Future[Tokenizer | None]]:
    """A future of the tokenizer, which is loaded on a thread while the body of the `with` loads the weights.

    Raises:
      NoTokenizerError: the folder has none. It is raised at once, not after minutes of loading weights; the future may raise it
      too.
    """
    where = given or path
    if not skip and not isinstance(where, Tokenizer) and Path(where).is_dir():
        _or_no_tokenizer(require_vocabulary, Path(where))
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        yield pool.submit(lambda: None if skip else _or_no_tokenizer(_tokenizer, where))


def _tokenizer(where: str | Path | Tokenizer) -> Tokenizer:
    tokenizer = where if isinstance(where, Tokenizer) else Tokenizer.from_id(where)
    tokenizer.prepare_chats()
    return tokenizer


def _or_no_tokenizer[Source, Found](load: Callable[[Source], Found], source: Source) -> Found:
    try:
        return load(source)
    except ValueError as error:
        raise NoTokenizerError(f"{error} (give tokenizer=, or skip_tokenizer_init=True to work with token ids)") from error


def load_weights(
    reader: Any, config: ModelConfig, *, dtype: str = "auto", transposed: bool = False, progress: bool = False
) -> Decoder:
    """The decoder of `config` with the weights of a checkpoint reader, read tensor by tensor to the default device.

    transposed: its dense kernels are laid out as `transpose_kernels` does.

    Raises:
      WeightsError: missing, extra or mis-shaped tensors, all listed.
    """
    from checkpoints.weights import load_weights

    abstract = Decoder.abstract(config, weight_dtype(config, dtype))
    if transposed:
        transpose_kernels(abstract)
    table = key_table(config, reader.keys(), transposed=transposed)
    leaves = load_weights(reader, named_leaves(abstract), table, ignore=ignorable_keys(config), progress=progress)
    return with_leaves(abstract, leaves)


def load_version(version: Path, config: ModelConfig, *, dtype: str = "auto") -> Decoder:
    """The decoder of `config` with the weights of one version of an Orbax checkpoint, on the default device."""
    from checkpoints import orbax

    abstract = Decoder.abstract(config, weight_dtype(config, dtype))
    return with_leaves(abstract, orbax.load(version, named_leaves(abstract)))


def load_weights_cut(
    reader: Any, shards: ModelShards, *, dtype: str = "auto", transposed: bool = False, progress: bool = False
) -> ShardedModel:
    """`load_weights` onto several devices: each device's part is read, and placed there."""
    import jax

    from checkpoints.weights import load_weights

    config, dtype = shards.config, weight_dtype(shards.config, dtype)
    table, plain = key_table(config, reader.keys(), transposed=transposed), shards.plain(dtype, transposed=transposed)
    cuts, targets = {}, {}
    for path, leaf in plain.items():
        first = table[path].keys[0]
        cut = shards.cut(path, len(leaf.shape), stacked=first in reader.keys() and len(reader.shape(first)) == 3)
        sharding = shards.sharding(path, shards.layout(path, len(leaf.shape)))
        targets[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        cuts |= {} if cut is None else {path: cut}
    leaves = load_weights(reader, targets, table, cuts=cuts, ignore=ignorable_keys(config), progress=progress)
    return ShardedModel(shards, shards.module(dtype, transposed=transposed), leaves)


def load_version_cut(version: Path, shards: ModelShards, *, dtype: str = "auto", transposed: bool = False) -> ShardedModel:
    """`load_version` onto several devices. They read equal parts, which are then put in order on the devices, one weight at a
    time."""
    from checkpoints import orbax
    from jaxserve.models.adoption import fit
    from jaxserve.models.shard_placement import place_cut

    dtype = weight_dtype(shards.config, dtype)
    read = orbax.load(version, shards.spread(shards.plain(dtype, transposed=False)))
    wanted = shards.plain(dtype, transposed=transposed)
    fitted, leaves = fit(read, shards.config, wanted), {}
    for path, leaf in zip(wanted, fitted, strict=True):
        read.clear()
        leaves[path] = next(place_cut([leaf], shards))
        leaf.arrays.clear()
    return ShardedModel(shards, shards.module(dtype, transposed=transposed), leaves)


def adopt_model(
    weights: Any,
    config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    dtype: str = "auto",
    shards_of: Callable[[ModelConfig], ModelShards | None] = lambda config: None,
) -> LoadedModel[Any]:
    """A model from weights that are in this process already. Arguments and errors are those of `LLM.from_params`. shards_of: how
    a model lies on several devices; None: it is on the default device."""
    import jax

    from jaxserve.models.adoption import common_dtype, fit, flat_weights, placed
    from jaxserve.models.shard_placement import place_cut
    from jaxserve.models.trainer_keys import is_transposed

    if config is None and isinstance(weights, Decoder):
        config = weights.config
    if config is None:
        raise ValueError("these weights don't say what model they are: give config=, a ModelConfig or a Hugging Face config")
    if isinstance(config, ModelConfig):
        defaults = GenerationDefaults(eos_token_ids=config.eos_token_ids)
    elif isinstance(config, Mapping):
        config, defaults = ModelConfig.from_hf(config), GenerationDefaults.from_dicts({}, config)
    else:
        config, defaults = ModelConfig.from_hf(config), GenerationDefaults.from_hf(config)
    abstract = Decoder.abstract(config, common_dtype(weights) if dtype == "auto" else dtype)
    if is_transposed(flat_weights(weights)):
        lay_out_for_device(abstract)
    wanted = named_leaves(abstract)
    fitted, shards = fit(weights, config, wanted), shards_of(config)
    if shards is None:
        module = with_leaves(abstract, dict(zip(wanted, placed(fitted, jax.local_devices()[0]), strict=True)))
    else:
        dtype, transposed = fitted[0].target.dtype, abstract.is_transposed
        leaves = dict(zip(wanted, place_cut(fitted, shards), strict=True))
        module = ShardedModel(shards, shards.module(dtype, transposed=transposed), leaves)
    found = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else Tokenizer.from_id(tokenizer)
    return LoadedModel(module, config, defaults, found)


def lay_out_for_device(module: Decoder) -> Decoder:
    """`module` itself, with its weights laid out as the default device's matmuls read them fastest. Arrays in another layout are
    released. Use it only on modules that no one else holds: a trainer's arrays are shared as they are."""
    return transpose_kernels(module) if is_best_transposed() else module


def is_best_transposed() -> bool:
    """Whether the default device's matmuls read dense kernels faster as [out, in]."""
    import jax

    return jax.default_backend() == "cpu"


def random_model(config: ModelConfig | Mapping[str, Any], *, dtype: str = "bfloat16", seed: int = 0) -> Decoder:
    """A decoder with random weights, for benchmarks and tests. config: a ModelConfig or a Hugging Face config as a dict."""
    from jaxserve.models import random_params

    _check_dtype(dtype, DTYPES[1:])
    config = config if isinstance(config, ModelConfig) else ModelConfig.from_hf(json.loads(json.dumps(dict(config))))
    return with_leaves(Decoder.abstract(config, dtype), random_params(config, seed, dtype))
