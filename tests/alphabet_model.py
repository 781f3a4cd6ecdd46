"""A checkpoint whose greedy output anyone can predict: after a byte comes the next byte, so that "a" goes on "bcdefgh...".

A Qwen3 whose layers add nothing (their output projections are zero) and whose lm_head maps each token's embedding to the one after
it. The tokenizer has a token a byte, in order, and three special ones. What a test expects of text, stops and log-probabilities can
thus be written down by hand.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

BOS, EOS, TURN = "<s>", "</s>", "<|turn|>"
SPECIALS = {EOS: 256, BOS: 257, TURN: 258}
VOCABULARY = 260
HIDDEN = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or 'A' }}{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": SPECIALS[EOS],
}


def ids(text: str) -> list[int]:
    """The token ids of a text without special tokens: its bytes."""
    return list(text.encode())


def after(text: str, num_tokens: int) -> str:
    """The greedy continuation of an ASCII text."""
    return "".join(chr(ord(text[-1]) + i) for i in range(1, num_tokens + 1))


def logits(token: int) -> np.ndarray:  # f32[VOCABULARY]
    """What the model says after `token`."""
    embedding, head = _tables()
    x = embedding[token] / np.sqrt((embedding[token] ** 2).mean() + CONFIG["rms_norm_eps"])
    return x @ head.T


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(embedding, lm_head), [VOCABULARY, HIDDEN] each: unit vectors, lm_head's row t + 1 being half the embedding's row t, so that
    the next token's logit is 4 and the others' at most about 2."""
    embedding = np.random.default_rng(0).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    return embedding, 0.5 * np.roll(embedding, 1, axis=0)


def weights(poisoned: str = "", num_layers: int = 1) -> dict[str, np.ndarray]:
    """The tensors under their Hugging Face names. The embeddings of the characters in `poisoned` are NaN. More than one layer need
    `save(num_hidden_layers=...)`."""
    rng = np.random.default_rng(1)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    embedding, head = _tables()
    embedding[[ord(c) for c in poisoned]] = np.nan
    layer = {
        "input_layernorm.weight": np.ones(HIDDEN, np.float32),
        "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        "self_attn.q_proj.weight": draw(32, HIDDEN),
        "self_attn.k_proj.weight": draw(16, HIDDEN),
        "self_attn.v_proj.weight": draw(16, HIDDEN),
        "self_attn.o_proj.weight": np.zeros((HIDDEN, 32), np.float32),
        "self_attn.q_norm.weight": np.ones(16, np.float32),
        "self_attn.k_norm.weight": np.ones(16, np.float32),
        "mlp.gate_proj.weight": draw(32, HIDDEN),
        "mlp.up_proj.weight": draw(32, HIDDEN),
        "mlp.down_proj.weight": np.zeros((HIDDEN, 32), np.float32),
    }
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": np.ascontiguousarray(head),
        **{f"model.layers.{i}.{name}": tensor for i in range(num_layers) for name, tensor in layer.items()},
    }


def backend(added_tokens: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A byte-level tokenizer without merges: the id of a byte's token is the byte. added_tokens: ids from 259, no special ones."""
    letters = {byte: c for c, byte in _byte_of_letter().items()}
    made = tokenizers.Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    made.add_tokens(list(added_tokens))
    return made


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of the byte-level alphabet stands for, as the tokenizers library has it."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    known = {split(chr(byte))[0][0]: byte for byte in range(128)}
    for byte in range(128, 256):  # bytes that are no text of their own: the second byte of a character, or the first
        character = bytes([0xC2, byte]) if byte < 0xC0 else bytes([byte, *[0x80, 0x90, 0x80, 0x80][: _length(byte) - 1]])
        try:
            letters = split(character.decode())[0][0]
            known[letters[1 if byte < 0xC0 else 0]] = byte
        except UnicodeDecodeError:  # bytes that UTF-8 never has
            continue
    rest = [byte for byte in range(256) if byte not in known.values()]
    free = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(known))
    return known | dict(zip(free, rest, strict=True))


def _length(byte: int) -> int:
    return 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


def save(
    folder: Path,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
    generation_config: dict | None = None,
    chat_template: str = CHAT_TEMPLATE,
    added_tokens: Sequence[str] = (),
    **config: object,
) -> Path:
    """Writes the checkpoint; `config` changes keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config or {}))
    save_file(weights() if tensors is None else tensors, folder / "model.safetensors")
    if tokenizer:
        backend(added_tokens).save(str(folder / "tokenizer.json"))
        said = {"eos_token": EOS, "bos_token": BOS, "chat_template": chat_template}
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


if __name__ == "__main__":  # python -m tests.alphabet_model FOLDER: for `make soak`
    import sys

    calls = "{% if tools %}<tool_call>{% endif %}"
    print(save(Path(sys.argv[1]), chat_template=calls + CHAT_TEMPLATE, max_position_embeddings=1024))
