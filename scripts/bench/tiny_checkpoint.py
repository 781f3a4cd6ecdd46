"""A checkpoint of a Qwen3 that is hardly there, so that a request's time is the server's: one layer of random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 512,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 0,
}


def save(folder: Path) -> Path:
    """Writes it, without a tokenizer: prompts are token ids."""
    from safetensors.numpy import save_file

    hidden, wide, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    key, head = CONFIG["num_key_value_heads"] * CONFIG["head_dim"], CONFIG["head_dim"]
    attention = {"q_proj": (heads, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, heads)}
    mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    shapes = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes |= {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {f"model.layers.0.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
    shapes |= {f"model.layers.0.mlp.{name}.weight": shape for name, shape in mlp.items()}
    shapes |= {f"model.layers.0.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
