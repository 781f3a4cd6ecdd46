"""What drafts for a model on a GPU that is not there: a draft model or heads, of shapes alone.

Owns which shapes stand for heads that no checkpoint names. Nothing is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

DRAFT_VOCAB = 32_000  # tokens that a published EAGLE-3 head of Qwen3-8B knows


def abstract_draft(config: Any, target: Any, dtype: Any) -> Any:
    """The draft of an EngineConfig's speculative_config for a target (a ModelConfig), with ShapeDtypeStructs for weights; None
    where it asks for none.

    Its model is a folder with a config.json, of a draft model also a preset. "target" stands for heads of the target's own sizes:
    EAGLE's layer is one of the target's, with DRAFT_VOCAB tokens of its own for version 3 and the layers that EAGLE-3 reads by
    default; Medusa has a block and all tokens for each draft.

    Raises: ValueError, NotImplementedError for a draft that does not fit.
    """
    from jaxserve.engine.drafting import EAGLE_VERSIONS
    from jaxserve.models import Decoder
    from jaxserve.models.eagle import EagleConfig, EagleHead
    from jaxserve.models.medusa import MedusaConfig, MedusaHeads
    from scripts.aot.step import read_config

    asked = config.speculative
    if asked is None or asked.model is None:
        return None
    name = str(asked.model)
    if asked.method == "draft_model":
        return Decoder.abstract(read_config(name), dtype)
    if asked.method == "medusa":
        shapes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        heads = MedusaConfig(num_heads=asked.num_speculative_tokens, num_layers=1, **shapes)
        return MedusaHeads.abstract(heads if name == "target" else MedusaConfig.from_hf(name, target), dtype)
    version = EAGLE_VERSIONS[asked.method]
    if name != "target":
        return EagleHead.abstract(EagleConfig.from_hf(name, target, version=version), dtype)
    source = {"architectures": ["LlamaForCausalLM"], **_layer_of(target)}
    head = EagleConfig.from_hf(source | ({"draft_vocab_size": DRAFT_VOCAB} if version == 3 else {}), target, version=version)
    return EagleHead.abstract(replace(head, layer=replace(head.layer, head_dim=target.head_dim)), dtype)


def _layer_of(target: Any) -> dict[str, Any]:
    """A layer of the target's sizes, as a config.json says them."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
    }
