"""Small models that draft for the dummy: itself, one that differs a little, and one of another shape."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.models import Decoder, ModelConfig, named_leaves, with_leaves
from jaxserve.models.eagle import EagleConfig, EagleHead
from jaxserve.models.medusa import MedusaConfig, MedusaHeads
from tests import dummy

NAMED = {"method": "draft_model", "model": "given", "num_speculative_tokens": 3, "adaptive": False}  # Engine is given the module


def near(config: ModelConfig, noise: float = 0.1, seed: int = 1) -> Decoder:
    """The dummy with noise in its weights, in shares of their deviation: right often, and not always."""
    model, rng = dummy.dummy_model(config=config), np.random.default_rng(seed)
    leaves = {}
    for path, leaf in named_leaves(model).items():
        weights = np.asarray(leaf)
        leaves[path] = jnp.asarray(weights + noise * weights.std() * rng.standard_normal(weights.shape), leaf.dtype)
    return with_leaves(model, leaves)


def other(config: ModelConfig) -> Decoder:
    """One layer less, other heads."""
    smaller = replace(config, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, sliding_windows=(None,))
    return dummy.dummy_model(config=smaller)


def eagle(config: ModelConfig, version: int, seed: int = 2) -> EagleHead:
    """A random head for the dummy, of which version 3 knows half of the vocabulary."""
    layer = replace(config, num_layers=1, sliding_windows=(None,), qk_norm=False, num_heads=2, num_kv_heads=1, head_dim=8)
    sizes = {"draft_vocab_size": config.vocab_size // 2, "hidden_layers": (0, 1, 1)} if version == 3 else {}
    abstract = EagleHead.abstract(EagleConfig(layer=layer, version=version, **sizes), "float32")
    rng, leaves = np.random.default_rng(seed), {}
    for path, leaf in named_leaves(abstract).items():
        if path == "draft_ids":
            leaves[path] = jnp.asarray(2 * np.arange(len(leaf)) + 1, jnp.int32)
        elif path.endswith("/scale"):
            leaves[path] = jnp.asarray(1 + 0.1 * rng.standard_normal(leaf.shape), leaf.dtype)
        else:
            leaves[path] = jnp.asarray(1.5 / np.sqrt(leaf.shape[0]) * rng.standard_normal(leaf.shape), leaf.dtype)
    return with_leaves(abstract, leaves)


def medusa(config: ModelConfig, num_heads: int, scale: float = 1.5, seed: int = 3) -> MedusaHeads:
    """Random heads for the dummy, of one block each. scale: about the deviation of their logits."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    abstract, rng = MedusaHeads.abstract(MedusaConfig(num_heads=num_heads, **sizes), "float32"), np.random.default_rng(seed)
    leaves = {
        path: jnp.asarray(scale / np.sqrt(leaf.shape[0]) * rng.standard_normal(leaf.shape), leaf.dtype)
        for path, leaf in named_leaves(abstract).items()
    }
    return with_leaves(abstract, leaves)
