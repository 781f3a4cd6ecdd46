"""Small GGUF files for tests, written with the gguf package's own writer as llama.cpp's converter would."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

SPECIALS = ("<|end|>", "<|turn|>", "<tool>", "[PAD]")  # control, control, user-defined, unused
KINDS = (gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED)
SIZES = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64, "layers": 2, "experts": 5, "expert_ffn": 32}


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: four special tokens, the 256 bytes, and a few merged words and digits."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "3 4", "12 34", "Ġ Ġ", "' s", "' S", "Ċ Ċ", "å ®"]
    words = ["Ġworld", *("".join(merge.split()) for merge in merges)]  # "Ġworld" has no merges that make it
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    return tokens, [*KINDS, *[gguf.TokenType.NORMAL] * (256 + len(words))], merges


def layer_tensors(arch: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The tensors of one layer by GGUF name, in row-major shapes."""
    D, F, H = SIZES["hidden"], SIZES["ffn"], SIZES["head_dim"]
    N, K = SIZES["heads"], SIZES["kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (D,), "attn_q.weight": (N * H, D), "attn_k.weight": (K * H, D), "attn_v.weight": (K * H, D),
        "attn_output.weight": (D, N * H), "ffn_norm.weight": (D,), "ffn_gate.weight": (F, D), "ffn_up.weight": (F, D),
        "ffn_down.weight": (D, F),
    }  # fmt: skip
    if arch == "qwen2":
        shapes |= {"attn_q.bias": (N * H,), "attn_k.bias": (K * H,), "attn_v.bias": (K * H,)}
    if arch == "qwen3moe":
        E, F = SIZES["experts"], SIZES["expert_ffn"]
        for name in ("gate", "up", "down"):
            del shapes[f"ffn_{name}.weight"]
        shapes |= {"ffn_gate_inp.weight": (E, D), "ffn_gate_exps.weight": (E, F, D), "ffn_up_exps.weight": (E, F, D)}
        shapes |= {"ffn_down_exps.weight": (E, D, F)}
    if arch in ("qwen3", "qwen3moe"):
        shapes |= {"attn_q_norm.weight": (H,), "attn_k_norm.weight": (H,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    tensors: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    pre: str = "smollm",
    tied: bool = True,
) -> dict[str, np.ndarray]:
    """Write a model of SIZES; returns its tensors by GGUF name.

    tensors: more of them, or others in place of the usual; (array, type) is quantised data. metadata: likewise; None leaves a
    key out.
    """
    rng = np.random.default_rng(0)
    tokens, kinds, merges = vocabulary()
    values: dict[str, Any] = {
        f"{arch}.block_count": SIZES["layers"],
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": SIZES["hidden"],
        f"{arch}.feed_forward_length": SIZES["ffn"],
        f"{arch}.attention.head_count": SIZES["heads"],
        f"{arch}.attention.head_count_kv": SIZES["kv_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    if arch == "qwen3moe":
        values |= {f"{arch}.expert_count": SIZES["experts"], f"{arch}.expert_used_count": 2}
        values |= {f"{arch}.expert_feed_forward_length": SIZES["expert_ffn"], f"{arch}.attention.key_length": SIZES["head_dim"]}
    arrays: dict[str, Any] = {"token_embd.weight": rng.standard_normal((len(tokens), SIZES["hidden"])).astype(np.float32)}
    for i in range(SIZES["layers"]):
        arrays |= {f"blk.{i}.{name}": array for name, array in layer_tensors(arch, rng).items()}
    arrays["output_norm.weight"] = rng.standard_normal(SIZES["hidden"]).astype(np.float32)
    if not tied:
        arrays["output.weight"] = rng.standard_normal((len(tokens), SIZES["hidden"])).astype(np.float32)
    arrays |= tensors or {}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (values | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, array in arrays.items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](key, value)
