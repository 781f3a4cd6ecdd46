"""The models that benchmarks run on: a checkpoint by name, or random weights of a known shape."""

from __future__ import annotations

from typing import Any

TINY_QWEN3: dict[str, Any] = {  # a Hugging Face config; small enough that a step is mostly host and dispatch
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
QWEN3_0_6B: dict[str, Any] = TINY_QWEN3 | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
TINY_SMALL_HEAD: dict[str, Any] = TINY_QWEN3 | {"num_hidden_layers": 12, "vocab_size": 1024}  # the head: 3% of a token's FLOPs
TINY_QWEN3_MOE: dict[str, Any] = TINY_QWEN3 | {  # a token's FLOPs are tiny-qwen3's: 4 of 32 experts of a fourth of its MLP each
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
QWEN3_8B: dict[str, Any] = QWEN3_0_6B | {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}
QWEN3_32B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}
QWEN3_30B_A3B: dict[str, Any] = QWEN3_0_6B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
QWEN3_235B_A22B: dict[str, Any] = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
RANDOM = {
    "tiny-qwen3": TINY_QWEN3,
    "tiny-qwen3-moe": TINY_QWEN3_MOE,
    "tiny-small-head": TINY_SMALL_HEAD,
    "qwen3-0.6b": QWEN3_0_6B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-235b-a22b": QWEN3_235B_A22B,
}


def bench_model(name: str, dtype: str, max_model_len: int | None = None) -> Any:
    """A Flax module: random weights for a name of RANDOM, otherwise the checkpoint of that name. Random weights know no longest
    context: theirs is raised to max_model_len where that is more."""
    from jaxserve.models.loading import lay_out_for_device, load_model, random_model

    if name in RANDOM:
        config = RANDOM[name]
        config = config | {"max_position_embeddings": max(config["max_position_embeddings"], max_model_len or 0)}
        return lay_out_for_device(random_model(config, dtype=config["torch_dtype"] if dtype == "auto" else dtype))
    return load_model(name, dtype=dtype, skip_tokenizer_init=True, transposed=None).module
