"""GGUF checkpoints as if they were Hugging Face ones: tensors, config, generation config, tokenizer and chat template.

It undoes what llama.cpp's convert_hf_to_gguf.py does to names, layouts and metadata, for the architectures of `ARCHITECTURES` and
byte-level BPE vocabularies. Anything else that a file asks for is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import TokenType

from checkpoints.gguf_file import GGUFFile
from checkpoints.weights import WeightsError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_MODEL_TYPES = {"qwen3moe": "qwen3_moe"}  # where Hugging Face has another word

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}  # [E, out, in] each
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_YARN_KEYS = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_ROPE_SCALING_KEYS = (
    "type",
    "factor",
    "finetuned",
    *_YARN_KEYS.values(),
)  # finetuned: said of the model, changes nothing
_ROPE_FACTORS = "rope_freqs.weight"  # not a weight: what llama.cpp makes of Llama 3's rope scaling

# Llama 3.1 and later: the only such parameters ever published, besides the factor. Meta's apply_scaling.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Metadata under "<architecture>." that would change the mathematics and that no supported model has, with its neutral values.
_FOREIGN = {
    "attention.sliding_window": (0,),
    "expert_count": (0,),  # but for qwen3moe's
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_weights_norm": (True,),  # llama.cpp always normalises those of qwen3moe
    "expert_gating_func": (1,),  # softmax
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}


@dataclass(frozen=True)
class _Scheme:
    """What a pre-tokenizer's name in a GGUF file stands for.

    splits: regular expressions that cut the text one after the other. nfc: the text is normalised first. ignore_merges: a whole
    word of the vocabulary is taken without merging. add_bos: the default where the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_SPLIT = (  # of OpenAI's cl100k_base, with a choice of how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCHEMES = {
    "smollm": _Scheme((r"\p{N}", _GPT2_SPLIT)),
    "qwen2": _Scheme((_CL100K_SPLIT.format(digits=""),), nfc=True),
    "llama-bpe": _Scheme((_CL100K_SPLIT.format(digits="{1,3}"),), ignore_merges=True, add_bos=True),
}
_CONTROL, _USER_DEFINED, _UNUSED = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED


class GGUFReader:
    """The tensors of a GGUF file under Hugging Face's names and in its layout; quantised ones are read as float32.

    A layer's experts, which lie in one tensor, are presented one by one. A tensor whose name has no counterpart keeps its own, so
    that loading a model reports it.

    Raises:
      FileNotFoundError: no such file.
      WeightsError: the file is no GGUF file, corrupt, one part of several, or of an architecture that is not supported.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.file: GGUFFile = GGUFFile(path)
        self.metadata: dict[str, Any] = self.file.metadata
        self.architecture: str = self.metadata.get("general.architecture", "")
        if self.metadata.get("split.count", 1) > 1:
            raise WeightsError(f"{path} is one of {self.metadata['split.count']} parts: join them with `llama-gguf-split --merge`")
        if self.architecture not in ARCHITECTURES:
            raise WeightsError(f"{path} is of architecture {self.architecture!r}; supported: {', '.join(ARCHITECTURES)}")
        self._names: dict[str, tuple[str, int | None]] = {}  # Hugging Face's name: the tensor, and which of its experts
        for name, info in self.file.tensors.items():
            if name != _ROPE_FACTORS:
                self._names |= _huggingface_names(name, info.shape)

    def keys(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        name, expert = self._names[key]
        shape = self.file.tensors[name].shape
        return shape if expert is None else shape[1:]

    def dtype(self, key: str) -> str:
        """What `read` gives: "float32" for a quantised tensor."""
        info = self.file.tensors[self._names[key][0]]
        return "float32" if info.is_quantised else info.dtype

    def read(self, key: str) -> np.ndarray:
        tensor = self.file.read(*self._names[key])
        projection = re.search(r"\.([qk])_proj\.(weight|bias)$", key)
        if self.architecture == "llama" and projection:
            return unpermute(tensor, self.num_heads if projection[1] == "q" else self.num_kv_heads)
        return tensor

    @property
    def num_heads(self) -> int:
        return self.required("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        return self.setting("attention.head_count_kv", self.num_heads)

    def setting(self, key: str, default: Any = None) -> Any:
        """The architecture's metadata under `key`."""
        return _shortest(self.metadata.get(f"{self.architecture}.{key}", default))

    def required(self, key: str) -> Any:
        """The same, where the file must have it: one number. WeightsError if it has none or a list (a value for each layer)."""
        value = self.setting(key)
        if not isinstance(value, (int, float)):
            raise WeightsError(f"{self.file.path}: {self.architecture}.{key} must be one number, found {value!r}")
        return value


def unpermute(
    rows: np.ndarray,  # [num_heads * H, ...]
    num_heads: int,
) -> np.ndarray:  # [num_heads * H, ...]
    """Undo the row order that llama.cpp gives the q and k projections of llama models.

    There a head's rows interleave its two halves (0, H/2, 1, H/2+1, ...), for a rotary embedding of adjacent pairs; Hugging Face's
    rotates halves (LlamaModel.permute in convert_hf_to_gguf.py).
    """
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def hf_config(reader: GGUFReader) -> dict[str, Any]:
    """The file's equivalent of config.json.

    "dtype" is there only if the weights are not quantised: a file does not say what its model was trained in.

    Raises:
      WeightsError: a size is missing, or the file has a feature that is not supported (named).
    """
    _refuse_foreign(reader)
    num_heads, hidden = reader.num_heads, reader.required("embedding_length")
    head_dim = reader.setting("attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.setting(key, head_dim) != head_dim:
            raise WeightsError(f"{reader.file.path}: {key}={reader.setting(key)} must equal the head size {head_dim}")
    keys = reader.keys()
    if "model.embed_tokens.weight" not in keys:
        raise WeightsError(f"{reader.file.path} has no token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[reader.architecture]],
        "model_type": _MODEL_TYPES.get(reader.architecture, reader.architecture),
        "hidden_size": hidden,
        "num_hidden_layers": reader.required("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.required("feed_forward_length"),
        "vocab_size": reader.shape("model.embed_tokens.weight")[0],
        "max_position_embeddings": reader.required("context_length"),
        "rms_norm_eps": reader.required("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.setting("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader),
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in keys,
        "mlp_bias": "model.layers.0.mlp.down_proj.bias" in keys,
        "tie_word_embeddings": "lm_head.weight" not in keys,
    }
    embedding = reader.file.tensors["token_embd.weight"]
    return config | _experts(reader) | _token_ids(reader) | ({} if embedding.is_quantised else {"dtype": embedding.dtype})


def generation_config(reader: GGUFReader) -> dict[str, Any]:
    """The file's equivalent of generation_config.json: bos, pad, every id that ends a turn, and the sampling it recommends."""
    metadata = reader.metadata
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config = _token_ids(reader) | {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    sampling = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in names.items()}
    sampling = {name: _shortest(value) for name, value in sampling.items() if value is not None}
    return config | sampling | ({"do_sample": True} if sampling else {})


def tokenizer_json(reader: GGUFReader) -> dict[str, Any]:
    """The file's equivalent of tokenizer.json, for `tokenizers.Tokenizer.from_str(json.dumps(...))`.

    Raises:
      WeightsError: a vocabulary other than byte-level BPE, or one with a pre-tokenizer that is not supported (named).
    """
    scheme = _scheme(reader)
    tokens, types, merges = (_vocabulary(reader, key) for key in ("tokens", "token_type", "merges"))
    kinds = list(enumerate(zip(tokens, types, strict=True)))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    splits = [{"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False} for s in scheme.splits]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": kind == _CONTROL} | flags
            for i, (token, kind) in kinds
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if scheme.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _post_processor(reader, tokens, scheme),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": scheme.ignore_merges,
            "vocab": {token: i for i, (token, kind) in kinds if kind != _UNUSED},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """The file's equivalent of tokenizer_config.json: the special tokens as text, and the chat template or templates."""
    tokens = _vocabulary(reader, "tokens")
    ids = {name: reader.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    default = reader.metadata.get("tokenizer.chat_template")
    named = {
        name: reader.metadata[f"tokenizer.chat_template.{name}"] for name in reader.metadata.get("tokenizer.chat_templates", [])
    }
    if named:
        templates = ({"default": default} if default is not None else {}) | named
        return config | {"chat_template": [{"name": name, "template": text} for name, text in templates.items()]}
    return config | ({"chat_template": default} if default is not None else {})


def _refuse_foreign(reader: GGUFReader) -> None:
    for key, neutral in _FOREIGN.items():
        value = reader.setting(key)
        known = key == "expert_count" and reader.architecture == "qwen3moe"
        if value is not None and value not in neutral and not known:
            raise WeightsError(f"{reader.file.path}: {reader.architecture}.{key}={value!r} is not supported")


def _experts(reader: GGUFReader) -> dict[str, Any]:
    """A mixture of experts as llama.cpp runs it: in every layer, with the chosen experts' weights normalised."""
    if reader.architecture != "qwen3moe":
        return {}
    return {
        "num_experts": reader.required("expert_count"),
        "num_experts_per_tok": reader.required("expert_used_count"),
        "moe_intermediate_size": reader.required("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_scaling(reader: GGUFReader) -> dict[str, Any] | None:
    prefix = f"{reader.architecture}.rope.scaling."
    unknown = {key for key in reader.metadata if key.startswith(prefix)} - {prefix + name for name in _ROPE_SCALING_KEYS}
    if unknown:
        raise WeightsError(f"{reader.file.path}: {', '.join(sorted(unknown))} is not supported")
    factor = reader.setting("rope.scaling.factor", reader.setting("rope.scale_linear", 0.0))  # 0 is off
    kind = reader.setting("rope.scaling.type", "linear")
    if _ROPE_FACTORS in reader.file.tensors:
        return _llama3_rope(reader)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise WeightsError(f"{reader.file.path}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3")
    scaling = {"rope_type": "yarn", "factor": factor}
    for ours, theirs in _YARN_KEYS.items():
        value = reader.setting(f"rope.scaling.{theirs}")
        scaling |= {ours: value} if value is not None else {}
    return scaling


def _llama3_rope(reader: GGUFReader) -> dict[str, Any] | None:
    """Llama 3's rope parameters, found again from the frequency divisors that are all a file keeps of them."""
    divisors = reader.file.read(_ROPE_FACTORS).astype(np.float64)
    factor = round(float(divisors.max()), 4)
    if factor == 1.0:
        return None
    theta, head_dim = reader.setting("rope.freq_base", 10000.0), 2 * len(divisors)
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    low, high, context = _LLAMA3_ROPE.values()
    smooth = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise WeightsError(f"{reader.file.path}: {_ROPE_FACTORS} is not Llama 3's rope scaling with {_LLAMA3_ROPE}")
    return {"rope_type": "llama3", "factor": factor} | _LLAMA3_ROPE


def _scheme(reader: GGUFReader) -> _Scheme:
    kind, pre = reader.metadata.get("tokenizer.ggml.model"), reader.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise WeightsError(f"{reader.file.path} has a vocabulary of kind {kind!r}; only byte-level BPE ('gpt2') is supported")
    if pre not in _SCHEMES:
        raise WeightsError(f"{reader.file.path} has the pre-tokenizer {pre!r}; supported: {', '.join(_SCHEMES)}")
    return _SCHEMES[pre]


def _vocabulary(reader: GGUFReader, key: str) -> list[Any]:
    values = reader.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list):
        raise WeightsError(f"{reader.file.path} has no tokenizer.ggml.{key}")
    return values


def _post_processor(reader: GGUFReader, tokens: list[str], scheme: _Scheme) -> dict[str, Any] | None:
    """What adds bos and eos around a text, where the file says so."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around: dict[str, list[dict[str, Any]]] = {"bos": [], "eos": []}
    specials = {}
    for name, default in (("bos", scheme.add_bos), ("eos", False)):
        token_id = reader.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if reader.metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token_id is not None:
            token = tokens[token_id]
            around[name] = [{"SpecialToken": {"id": token, "type_id": 0}}]
            specials[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    if not specials:
        return None
    single = [*around["bos"], text, *around["eos"]]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *single], "special_tokens": specials}


def _token_ids(reader: GGUFReader) -> dict[str, int]:
    ids = {f"{name}_id": reader.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    return {name: i for name, i in ids.items() if i is not None and name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _shortest(value: Any) -> Any:
    """A 32-bit float as the shortest decimal that stands for it (1e-05, not 9.999999747378752e-06); anything else as it is."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _huggingface_names(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, int | None]]:
    """What Hugging Face calls the tensor, or each of the experts in it."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match:
        layer, stem, kind = match.groups()
        if layer is None and stem in _TOP_NAMES:
            return {f"{_TOP_NAMES[stem]}.{kind}": (name, None)}
        if layer is not None and stem in _LAYER_NAMES:
            return {f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{kind}": (name, None)}
        if layer is not None and stem in _EXPERTS_NAMES and kind == "weight" and len(shape) == 3:
            experts = f"model.layers.{layer}.mlp.experts"
            return {f"{experts}.{e}.{_EXPERTS_NAMES[stem]}.weight": (name, e) for e in range(shape[0])}
    return {name: (name, None)}
