"""Drafts of shapes alone, as aot_check compiles them: each is one that the engine takes for its target."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.config import EngineConfig
from jaxserve.models.eagle import EagleHead
from scripts.aot.drafts import DRAFT_VOCAB, abstract_draft
from scripts.aot.step import read_config

TARGET = read_config("qwen3-8b")


def draft_of(method: str, model: str, **options):
    asked = {"method": method, "model": model, "num_speculative_tokens": 3, **options}
    return abstract_draft(EngineConfig(speculative_config=asked), TARGET, jnp.bfloat16)


def num_values(draft) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(draft)) if jnp.issubdtype(x.dtype, jnp.floating))


def test_an_eagle_3_head_of_the_targets_sizes():
    """As published for Qwen3-8B: 3 D to D, a layer that reads 2 D, and 32,000 tokens."""
    head, D, H = draft_of("eagle3", "target"), 4096, 128
    assert isinstance(head, EagleHead) and head.config.faults(TARGET) == [] and head.config.hidden_layers == (2, 18, 33)
    attention = 2 * D * (32 + 8 + 8) * H + 32 * H * D
    assert num_values(head) == 3 * D * D + attention + 3 * D * 12288 + 4 * D + D * DRAFT_VOCAB


def test_an_eagle_1_head_has_no_head_of_its_own():
    head = draft_of("eagle", "target")
    assert head.config.faults(TARGET) == [] and head.lm_head is None and head.fc.kernel.shape == (2 * 4096, 4096)


def test_medusa_has_a_head_a_draft():
    heads = draft_of("medusa", "target")
    assert heads.config.faults(TARGET) == [] and heads.config.num_heads == 3
    assert num_values(heads) >= 3 * (4096 * 4096 + 4096 * TARGET.vocab_size)


def test_a_draft_model_is_a_preset():
    assert draft_of("draft_model", "qwen3-0.6b").config == read_config("qwen3-0.6b")


def test_a_folders_config_is_read_and_checked(tmp_path):
    config = {"medusa_num_heads": 5, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": TARGET.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert draft_of("medusa", str(tmp_path)).config.num_heads == 5
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 8}))
    with pytest.raises(ValueError, match="hidden_size is 8, the target's 4096"):
        draft_of("medusa", str(tmp_path))


def test_what_drafts_without_weights_has_no_draft():
    assert abstract_draft(EngineConfig(speculative_config={"num_speculative_tokens": 3}), TARGET, jnp.bfloat16) is None
