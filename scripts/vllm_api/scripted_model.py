"""A tiny Qwen3 with a real tokenizer whose next token follows from the last one alone: an API test's answers are known beforehand.

Each token of a script has a dimension of its own, which the head maps to the token after it; other tokens have random directions,
so that what follows them is random. The last dimension holds a bias of each token: quotes, brackets and digits are likelier and
blanks less so, so that JSON that a grammar asks for ends soon. Texts that are one added token each need no successor within: a tool
call, or JSON.

The layer adds nothing but at the end of a script with `names`: there its attention finds which of them the prompt has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file

HIDDEN, HEAD, MAX_SCRIPT = 128, 16, 63
SCALE = np.sqrt(HIDDEN)  # a normalised row is a unit vector times this
NORM, CERTAIN = 0.9, 80.0  # of an embedding without its bias' dimension; the logit of a script's next token
BIASES = {'"': 9.0, "}": 9.0, "]": 9.0, '"}': 9.0, "}}": 9.0, '"]': 9.0, '",': 8.0, ":": 6.0, ",": 5.0}
BIASES |= dict.fromkeys("0123456789", 6.0)
BLANK = -10.0
THINKING = "We need to respond briefly and say what one would expect of us, because they asked for it so kindly"
SAID = "Hello! How can I help you today or tomorrow instead with all 27 member states"  # more than the 10 tokens many tests ask for
CONTINUED = (" keeps",)  # ends of unfinished answers that tests have continued, and expect to end
THOUGHT = ("<think>", THINKING, "</think>")
MAX_NAMES = 2
SURE = (4.0, 1.0)  # how far a name's key leans to the axis of names, against that of the bias


class Whole(str):
    """A part of a script that is one added token of the vocabulary."""


def called(call: str, before: Sequence[str] = (*THOUGHT, SAID)) -> list[str]:
    """The script of a tool call: its text, one token, after others."""
    return [*before, "<tool_call>", Whole(call), "</tool_call>"]


def save(
    folder: Path,
    tokenizer_folder: Path,
    script: Sequence[str] = (SAID,),
    *,
    names: Sequence[str] = (),
    otherwise: str = "",
    first: str = "",
    end: str = "<|im_end|>",
) -> Path:
    """Writes a checkpoint whose answers are `script`. tokenizer_folder: with a ChatML tokenizer and its config.

    names: tokens, MAX_NAMES at most; the first of them that the prompt has comes behind the script. otherwise: one added token, the
    answer where a form forbids the script. first: a special token that texts begin with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    added = [text for text in (*script, Whole(otherwise)) if text and isinstance(text, Whole)]
    tokenizer.add_tokens([tokenizers.AddedToken(str(text), special=False, normalized=False) for text in added])
    if first:
        special = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{first} $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    for text in added:
        entry = {"content": text, "special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        tokenizer_config.setdefault("added_tokens_decoder", {})[str(tokenizer.token_to_id(text))] = entry
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    tensors = _tensors(tokenizer, script, end, names, otherwise)
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD, "intermediate_size": 32, "rope_theta": 1e9}
    config |= {"vocab_size": len(tensors["lm_head.weight"]), "tie_word_embeddings": False, "max_position_embeddings": 32768}
    config |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": tokenizer.token_to_id(end)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _tensors(
    tokenizer: tokenizers.Tokenizer, script: Sequence[str], end: str, names: Sequence[str], otherwise: str
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    known = tokenizer.get_vocab_size()
    size = -(-known // 128) * 128
    embedding, head = np.zeros((2, size, HIDDEN), np.float32)
    free = rng.normal(size=(size, HIDDEN - MAX_SCRIPT - 1))
    embedding[:, MAX_SCRIPT:-1] = NORM * free / np.linalg.norm(free, axis=1, keepdims=True)
    embedding[:, -1] = np.sqrt(1 - NORM**2)
    head[:, MAX_SCRIPT:-1] = rng.normal(size=free.shape) / 8
    head[:, -1] = _biases(tokenizer, size, end, 9.0 if THINKING in script else 0.0) / (SCALE * embedding[0, -1])

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    last = ids("assistant\n")[-1:]  # of a ChatML prompt
    steps = [[token] for text in script for token in ids(text)]  # the tokens that may be next
    steps += [[ids(name)[0] for name in names]] * bool(names) + [ids(end)]
    tokens = [*last, *(token for step in steps for token in step)]
    if len(steps) > MAX_SCRIPT - MAX_NAMES or len(set(tokens)) < len(tokens):
        raise ValueError(
            f"{script=} must have {MAX_SCRIPT - MAX_NAMES} tokens at most, each once, and not the one that ends a prompt"
        )
    place_of = np.eye(HIDDEN)[:MAX_SCRIPT] * NORM
    for place, step in enumerate(steps):
        embedding[last, :-1] = place_of[place, :-1]
        head[step, place] = CERTAIN / (SCALE * NORM)
        last = step
    if otherwise:
        embedding[ids(otherwise), :-1] = place_of[len(steps) - 1, :-1]
        head[ids(otherwise), 0] = 0.75 * CERTAIN / (SCALE * NORM)
    for text in CONTINUED:
        embedding[ids(text)[-1:]] = embedding[ids("assistant\n")[-1]]
    # A template without thinking ends with an empty thought.
    embedding[ids("\n\n")[-1]] = embedding[ids("</think>")[-1] if "</think>" in script else ids("assistant\n")[-1]]
    layer = _layer(rng)
    if names:
        _remember(embedding, head, layer, steps[-3][0], steps[-2], len(steps) - 2)
    named = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
    ones = np.ones(HIDDEN, np.float32)
    return named | {"model.embed_tokens.weight": embedding, "model.norm.weight": ones, "lm_head.weight": head}


def _biases(tokenizer: tokenizers.Tokenizer, size: int, end: str, end_bias: float) -> np.ndarray:
    biases = np.zeros(size)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    biases[[not text.strip() for text in texts]] = BLANK
    biases[tokenizer.get_vocab_size() :] = -60  # no tokens
    biases[list(tokenizer.get_added_tokens_decoder())] = -30
    for text, bias in BIASES.items():
        if (found := tokenizer.token_to_id(text)) is not None:
            biases[found] = bias
    biases[tokenizer.token_to_id(end)] = end_bias
    return biases


def _layer(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A layer that adds nothing."""
    ones = np.ones(HIDDEN, np.float32)
    layer = {
        "input_layernorm": ones,
        "post_attention_layernorm": ones,
        "self_attn.q_norm": ones[:HEAD],
        "self_attn.k_norm": ones[:HEAD],
    }
    rows = {
        "self_attn.q_proj": 2 * HEAD,
        "self_attn.k_proj": HEAD,
        "self_attn.v_proj": HEAD,
        "mlp.gate_proj": 32,
        "mlp.up_proj": 32,
    }
    layer |= {name: rng.normal(size=(number, HIDDEN)).astype(np.float32) for name, number in rows.items()}
    layer["self_attn.o_proj"] = np.zeros((HIDDEN, 2 * HEAD), np.float32)
    layer["mlp.down_proj"] = np.zeros((HIDDEN, 32), np.float32)
    return layer


def _remember(
    embedding: np.ndarray, head: np.ndarray, layer: dict[str, np.ndarray], asking: int, names: Sequence[int], place: int
) -> None:
    """Behind the token `asking` comes the first of the names that the prompt has.

    Every token's key points along one axis, a name's along another too, the first one's most; `asking` asks along that one. Its
    attention then sees that name alone, whose value leads to the name: a dimension for each, from MAX_SCRIPT - MAX_NAMES on.
    """
    query, key, value = (np.zeros((rows, HIDDEN), np.float32) for rows in (2 * HEAD, HEAD, HEAD))
    out = layer["self_attn.o_proj"]
    name_axis, bias_axis = HEAD // 2 - 1, HEAD // 2 - 2  # of the lowest frequencies: positions hardly turn them
    own = MAX_SCRIPT - MAX_NAMES  # a dimension of each name
    key[bias_axis, -1] = query[bias_axis, -1] = 1.0
    query[name_axis, place] = 100.0
    for i, name in enumerate(names):
        embedding[name, own + i] = NORM / 2
        key[name_axis, own + i], value[i, own + i] = SURE[i], 1.0
        head[name, own + i] = CERTAIN / (SCALE * NORM)
        head[name, place] = 0.0
        out[own + i, i] = 4.0 / SCALE
    embedding[asking, :-1] = 0.0
    embedding[asking, place] = NORM
    layer |= {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}
    layer["self_attn.q_norm"] = np.full(HEAD, 10.0, np.float32)
