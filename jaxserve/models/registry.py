"""Which Hugging Face architectures `Decoder` covers, and how each differs from the others.

One entry is one architecture of transformers: the switches that its code hard-wires and the defaults of its config
class. Sizes are in config.json, which `config.py` reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Architecture:
    """The differences between the llama-like models.

    model_type: config.json's word for it, used where `architectures` is missing.
    qk_norm: RMSNorm over each head of q and k before the rotary embedding.
    qkv_bias: q, k and v always have a bias, o never.
    reads_attention_bias, reads_mlp_bias: config's attention_bias (q, k, v, o) and mlp_bias (gate, up, down) count.
    window: which layers sliding_window is for: none ("never"), those from max_window_layers up where use_sliding_window
        says so ("if_used"), all where use_sliding_window says so ("all_if_used"), all ("always"). layer_types, where given,
        picks the layers instead.
    num_kv_heads, head_dim: defaults where config.json lacks the key; None is num_attention_heads for the one and
        hidden_size // num_attention_heads for the other.
    sparse: layers may be a mixture of experts instead of a dense MLP (decoder_sparse_step, mlp_only_layers).
    """

    model_type: str
    qk_norm: bool = False
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window: Literal["never", "if_used", "all_if_used", "always"] = "never"
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sparse: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Architecture("mistral", window="always", num_kv_heads=8),
    "Qwen2ForCausalLM": Architecture("qwen2", qkv_bias=True, window="if_used", num_kv_heads=32),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", qk_norm=True, reads_attention_bias=True, window="if_used", num_kv_heads=32, head_dim=128
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", qk_norm=True, reads_attention_bias=True, window="all_if_used", num_kv_heads=4, sparse=True
    ),
}


def find_architecture(hf: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The name and entry for a config: its `architectures`, or its `model_type` where that is missing.

    Raises:
        NotImplementedError: none of its names is supported; the message lists those that are.
    """
    names = hf.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    if not names:
        for name, arch in ARCHITECTURES.items():
            if arch.model_type == hf.get("model_type"):
                return name, arch
    found = ", ".join(names) or f"model_type={hf.get('model_type')!r}"
    raise NotImplementedError(f"architecture {found}; supported: {', '.join(ARCHITECTURES)}")
