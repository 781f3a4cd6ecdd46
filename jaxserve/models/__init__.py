"""Models: what they are (config, registry, generation_defaults), how they compute (decoder, layers, rope) and where
their weights lie in files (hf_keys).

What needs jax is imported at first use, so that reading a config costs milliseconds.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.generation_defaults import GenerationDefaults
from jaxserve.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from jaxserve.models.decoder import Decoder, named_leaves, random_params, transpose_kernels, with_leaves
    from jaxserve.models.hf_keys import hf_tensors, ignorable_keys, key_table

_LAZY = {
    "Decoder": "decoder",
    "named_leaves": "decoder",
    "random_params": "decoder",
    "transpose_kernels": "decoder",
    "with_leaves": "decoder",
    "hf_tensors": "hf_keys",
    "ignorable_keys": "hf_keys",
    "key_table": "hf_keys",
}

__all__ = [
    "ARCHITECTURES",
    "Decoder",
    "GenerationDefaults",
    "ModelConfig",
    "RopeConfig",
    "hf_tensors",
    "ignorable_keys",
    "key_table",
    "named_leaves",
    "random_params",
    "transpose_kernels",
    "with_leaves",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
