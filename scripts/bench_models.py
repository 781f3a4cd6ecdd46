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
RANDOM = {"tiny-qwen3": TINY_QWEN3, "qwen3-0.6b": QWEN3_0_6B}


def bench_model(name: str, dtype: str, max_model_len: int | None = None) -> Any:
    """A Flax module: random weights for a name of RANDOM, otherwise the checkpoint of that name. Random weights know no longest
    context: theirs is raised to max_model_len where that is more."""
    from jaxserve.model_loader import load_model, random_model

    if name in RANDOM:
        config = RANDOM[name]
        config = config | {"max_position_embeddings": max(config["max_position_embeddings"], max_model_len or 0)}
        return random_model(config, dtype=config["torch_dtype"] if dtype == "auto" else dtype)
    return load_model(name, dtype=dtype, skip_tokenizer_init=True).module
