"""Checkpoints of a Qwen3 that is hardly there, so that a request's time is the server's: a few layers of random weights."""

from __future__ import annotations

import json
import shutil
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


SERVED: dict[str, Any] = CONFIG | {  # what a server with a real tokenizer answers with: of 15.7M weights 12.6M are the vocabulary's
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "torch_dtype": "bfloat16",
}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def save(folder: Path) -> Path:
    """Writes it, without a tokenizer: prompts are token ids."""
    return _save(folder, CONFIG)


def save_with_tokenizer(folder: Path, other: Path) -> Path:
    """Writes SERVED with the tokenizer, the vocabulary and the end of another model's folder."""
    theirs = json.loads((other / "config.json").read_text())
    _save(folder, SERVED | {name: theirs[name] for name in ("vocab_size", "eos_token_id")})
    for name in _TOKENIZER:
        shutil.copy(other / name, folder)
    return folder


def _save(folder: Path, config: dict[str, Any]) -> Path:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 0.02, shape).astype(np.float32) for name, shape in _shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """By the names of Hugging Face's Qwen3."""
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * config["head_dim"]
    key, head = config["num_key_value_heads"] * config["head_dim"], config["head_dim"]
    attention = {"q_proj": (heads, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, heads)}
    mlp = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{layer}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes
