"""A tiny Qwen3 with a real tokenizer whose next token follows from the last one alone: an API test's answers are known beforehand.

Its layers add nothing. Each token of a script has a dimension of its own, which the head maps to the token after it; other tokens
have random directions, so that what follows them is random. The last dimension holds a bias of each token: quotes, brackets and
digits are likelier and blanks less so, so that JSON that a grammar asks for ends soon. A call is one added token of the vocabulary:
tokens of its text would need two successors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

HIDDEN, MAX_SCRIPT = 128, 63
NORM, CERTAIN = 0.9, 80.0  # of an embedding without its bias' dimension; the logit of a script's next token
BIASES = {'"': 9.0, "}": 9.0, "]": 9.0, '"}': 9.0, "}}": 9.0, '"]': 9.0, '",': 8.0, ":": 6.0, ",": 5.0}
BIASES |= dict.fromkeys("0123456789", 6.0)
BLANK = -10.0
THINKING = "We need to respond briefly and say what one would expect of us, because they asked for it so kindly"
SAID = "Hello! How can I help you today or tomorrow instead"  # longer than the 10 tokens that many tests ask for
CONTINUED = (" keeps",)  # ends of unfinished answers that tests have continued, and expect to end
THOUGHT = ("<think>", THINKING, "</think>")


def save(
    folder: Path,
    tokenizer_folder: Path,
    call: str = "",
    end: str = "<|im_end|>",
    before: Sequence[str] = (*THOUGHT, SAID),
    first: str = "",
) -> Path:
    """Writes a checkpoint. tokenizer_folder: with a ChatML tokenizer and its config.

    Without `call` an answer is a greeting, and what follows other text goes on and on. With it, an answer is a tool call of that
    text after `before`: by default a thought and the greeting. Texts begin with the special token `first`, if one is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    if call:
        tokenizer.add_tokens([tokenizers.AddedToken(call, special=False, normalized=False)])
        script = [*before, "<tool_call>", call, "</tool_call>", end]
    else:
        script = [SAID, end]
    if first:
        special = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{first} $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    if call:
        added = {"content": call, "special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        tokenizer_config.setdefault("added_tokens_decoder", {})[str(tokenizer.token_to_id(call))] = added
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    end_id = tokenizer.token_to_id(end)
    assert end_id is not None
    tensors = _tensors(tokenizer, script, end_id, 9.0 if THINKING in script else 0.0)
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "rope_theta": 1e4}
    config |= {"vocab_size": len(tensors["lm_head.weight"]), "tie_word_embeddings": False, "max_position_embeddings": 32768}
    config |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": end_id}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tensors(tokenizer: tokenizers.Tokenizer, script: Sequence[str], end: int, end_bias: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    known = tokenizer.get_vocab_size()
    size = -(-known // 128) * 128
    embedding, head = np.zeros((2, size, HIDDEN), np.float32)
    free = rng.normal(size=(size, HIDDEN - MAX_SCRIPT - 1))
    embedding[:, MAX_SCRIPT:-1] = NORM * free / np.linalg.norm(free, axis=1, keepdims=True)
    embedding[:, -1] = np.sqrt(1 - NORM**2)
    head[:, MAX_SCRIPT:-1] = rng.normal(size=free.shape) / 8
    biases = np.zeros(size)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    biases[[not text.strip() for text in texts]] = BLANK
    biases[known:] = -60  # no tokens
    biases[list(tokenizer.get_added_tokens_decoder())] = -30
    for text, bias in BIASES.items():
        if (found := tokenizer.token_to_id(text)) is not None:
            biases[found] = bias
    biases[end] = end_bias
    scale = np.sqrt(HIDDEN)  # a normalised row is a unit vector times this
    head[:, -1] = biases / (scale * embedding[0, -1])

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    last = ids("assistant\n")[-1]  # of a ChatML prompt
    tokens = [token for text in script for token in ids(text)]
    if len(tokens) > MAX_SCRIPT or len({last, *tokens}) <= len(tokens):
        raise ValueError(f"{script=} must have {MAX_SCRIPT} tokens at most, each once, and not the one that ends a prompt")
    for place, token in enumerate(tokens):
        embedding[last, :-1] = np.eye(HIDDEN - 1)[place] * NORM
        head[token, place] = CERTAIN / (scale * NORM)
        last = token
    for text in CONTINUED:
        embedding[ids(text)[-1:]] = embedding[ids("assistant\n")[-1]]
    if "</think>" in script:  # a template without thinking ends with an empty thought
        embedding[ids("\n\n")[-1]] = embedding[ids("</think>")[-1]]
    ones, zeros = np.ones(HIDDEN, np.float32), np.zeros((HIDDEN, 32), np.float32)
    layer = {"input_layernorm": ones, "post_attention_layernorm": ones, "self_attn.o_proj": zeros, "mlp.down_proj": zeros}
    layer |= {"self_attn.q_norm": ones[:16], "self_attn.k_norm": ones[:16]}
    for name, rows in {
        "self_attn.q_proj": 32,
        "self_attn.k_proj": 16,
        "self_attn.v_proj": 16,
        "mlp.gate_proj": 32,
        "mlp.up_proj": 32,
    }.items():
        layer[name] = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
    named = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    return named | {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": head}
