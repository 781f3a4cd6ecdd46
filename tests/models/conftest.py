"""The golden models in float32, each loaded once a session."""

import functools

import jax.numpy as jnp
import pytest

from checkpoints.huggingface import SafetensorsReader
from checkpoints.weights import load_weights
from jaxserve.models import Decoder, ModelConfig, ignorable_keys, key_table, named_leaves, with_leaves
from tests.goldens.golden import load_golden


@pytest.fixture(scope="session")
def load_model():
    """load_model(name) -> (Golden, Decoder with float32 weights)."""

    @functools.cache
    def load(name):
        golden = load_golden(name)
        config = ModelConfig.from_hf(golden.config_path)
        abstract = Decoder.abstract(config, jnp.float32)
        reader = SafetensorsReader(golden.weights)
        leaves = load_weights(reader, named_leaves(abstract), key_table(config, reader.keys()), ignore=ignorable_keys(config))
        return golden, with_leaves(abstract, leaves)

    return load
