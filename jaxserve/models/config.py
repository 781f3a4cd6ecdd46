"""What a model is, in numbers: `ModelConfig` and `RopeConfig`, the only place that reads a Hugging Face config.json.

Reads the files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype). A setting that would
change the mathematics and is not implemented is refused by name. Imports no jax.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from checkpoints.json_files import read_object
from jaxserve.models.registry import Architecture, find_architecture

DTYPES = ("auto", "bfloat16", "float16", "float32")  # of weights and activations
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
_ACTIVATIONS = ("silu", "swish")  # two names of one function
_DTYPES = ("float32", "bfloat16", "float16")

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)

_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}

# Words that rope_scaling / rope_parameters may hold. Another word is refused: it means a variant that we don't know.
_ROPE_KEYS = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale "
    "mscale_all_dim truncate low_freq_factor high_freq_factor partial_rotary_factor finetuned".split()
)

_NUM_EXPERTS = ("num_experts", "num_local_experts")  # of transformers 4 and 5

# Config keys of other models that would change the mathematics, with the value that leaves it alone besides null,
# false, 0 and empty. A supported architecture never has them set, unless someone has modified the model.
_FOREIGN_KEYS: dict[str, Any] = {
    "quantization_config": None,
    "compression_config": None,
    "partial_rotary_factor": 1.0,
    "rotary_pct": 1.0,
    **dict.fromkeys(_NUM_EXPERTS, 1),
    "n_routed_experts": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "no_rope_layers": None,
    "dual_chunk_attention_config": None,
    "use_mrope": None,
    "is_encoder_decoder": None,
    "add_cross_attention": None,
    "per_layer_config": None,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, and by how much cos and sin are scaled.

    The fields are those of transformers' `rope_parameters`; a field that the type does not use is ignored, as there.
    original_max_position_embeddings is in tokens.

    Raises:
        NotImplementedError: an unknown rope_type.
        ValueError: a field that the type needs is missing or out of range.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise NotImplementedError(f"rope_type={self.rope_type!r}; supported: {', '.join(ROPE_TYPES)}")
        for name in ("theta", *_ROPE_NEEDS[self.rope_type]):
            value = getattr(self, name)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"rope_type={self.rope_type!r} needs a positive {name}, found {value!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and low >= high:
            raise ValueError(f"rope_type='llama3' needs low_freq_factor < high_freq_factor, found {low} and {high}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters`, or `rope_scaling` and `rope_theta` (transformers 4), of a whole config."""
        rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"rope_scaling or rope_parameters must be an object, found {rope!r}")
        nested = sorted(key for key, value in rope.items() if isinstance(value, Mapping))
        if nested:
            raise NotImplementedError(f"rope_parameters per layer type ({', '.join(nested)}); one set for all layers is supported")
        unknown = sorted(set(rope) - _ROPE_KEYS)
        if unknown:
            raise NotImplementedError(f"rope parameters {', '.join(unknown)}; known: {', '.join(sorted(_ROPE_KEYS))}")
        if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise NotImplementedError(f"partial_rotary_factor={rope['partial_rotary_factor']}; supported: 1.0 (the whole head)")
        max_len = hf["max_position_embeddings"]
        original = hf.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or max_len
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        said = {key: value for key, value in rope.items() if value is not None}
        said |= {"theta": said.get("rope_theta") or hf.get("rope_theta") or 10_000.0}
        said |= {"original_max_position_embeddings": original}
        if rope_type == "yarn":
            said.setdefault("factor", max_len / original)
        missing = [name for name in _ROPE_NEEDS.get(rope_type, ()) if name not in said]
        if missing:
            raise ValueError(f"rope_type={rope_type!r} needs {', '.join(missing)}")
        names = {field.name for field in fields(cls)} - {"rope_type"}
        return cls(rope_type=rope_type, **{name: said[name] for name in names & said.keys()})


@dataclass(frozen=True)
class ModelConfig:
    """The switches and sizes of `jaxserve.models.decoder.Decoder`.

    sliding_windows has one entry a layer: None, or the window w in tokens; position q then sees q - w < k <= q.
    sparse_layers are the indices of the layers whose MLP is a mixture of num_experts experts of moe_intermediate_size each, of
    which a token uses num_experts_per_token; norm_topk_prob scales the weights of those to a sum of 1.
    dtype is the checkpoint's own, a string, or None where its config does not say. eos_token_ids, bos_token_id and
    pad_token_id are config.json's; generation_config.json has priority over them (`GenerationDefaults`).

    Raises:
        ValueError: sizes that do not fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sparse_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dtype: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs")
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for num_layers={self.num_layers}")
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ValueError(f"sliding_window={window} must be at least 1")
        if self.sparse_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        if not set(self.sparse_layers) <= set(range(self.num_layers)):
            raise ValueError(f"sparse_layers={self.sparse_layers} must lie in 0 to {self.num_layers - 1}")
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(f"num_experts_per_token={self.num_experts_per_token} must lie in 1 to num_experts={self.num_experts}")
        if self.moe_intermediate_size < 1:
            raise ValueError(f"moe_intermediate_size={self.moe_intermediate_size} must be at least 1")

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "ModelConfig":
        """Reads a Hugging Face config: its dict, the path of a config.json, or the folder that holds one.

        Where a key is missing, the default is that of the architecture's config class in transformers 5.
        attention_dropout is not read: it is a matter of training.

        Raises:
            FileNotFoundError: no config.json there.
            NotImplementedError: an architecture, activation, rope type, quantization or the like that is not built.
            ValueError: a required key is missing, or sizes do not fit together.
        """
        hf = read_json(source, "config.json")
        name, arch = find_architecture(hf)
        missing = [key for key in _REQUIRED if hf.get(key) is None]
        if missing:
            raise ValueError(f"config of {name} lacks {', '.join(missing)}")
        for key in (*_REQUIRED, "num_key_value_heads", "head_dim"):
            if hf.get(key) is not None and not _is_int(hf[key]):
                raise ValueError(f"{key}={hf[key]!r} in the config of {name} must be an integer")
        _refuse_foreign(hf, name, arch)
        num_heads, num_kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", arch.num_kv_heads)
        return cls(
            architecture=name,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=hf.get("head_dim", arch.head_dim) or hf["hidden_size"] // num_heads,
            max_position_embeddings=hf["max_position_embeddings"],
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_hf(hf),
            sliding_windows=_sliding_windows(hf, name, arch),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings")),
            qk_norm=arch.qk_norm,
            qkv_bias=arch.qkv_bias or (arch.reads_attention_bias and bool(hf.get("attention_bias"))),
            o_bias=arch.reads_attention_bias and bool(hf.get("attention_bias")),
            mlp_bias=arch.reads_mlp_bias and bool(hf.get("mlp_bias")),
            **(_experts(hf) if arch.sparse else {}),
            dtype=_dtype(hf),
            eos_token_ids=token_ids(hf.get("eos_token_id")),
            bos_token_id=hf.get("bos_token_id"),
            pad_token_id=hf.get("pad_token_id"),
        )


def read_json(source: Mapping[str, Any] | str | Path, name: str) -> dict[str, Any]:
    """A dict as it is, or the JSON object in the file `source`, or in `source/name` where source is a folder.

    Raises:
        ValueError: the file, which is named, holds no JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    return read_object(path / name if path.is_dir() else path)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Hugging Face writes one id, a list of ids, or null. ValueError for anything else."""
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(map(_is_int, ids)):
        raise ValueError(f"eos_token_id={value!r} must be a token id, a list of them, or null")
    return ids


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _refuse_foreign(hf: Mapping[str, Any], name: str, arch: Architecture) -> None:
    act = hf.get("hidden_act", "silu")
    if act not in _ACTIVATIONS:
        raise NotImplementedError(f"hidden_act={act!r}; supported: {', '.join(_ACTIVATIONS)}")
    for key, neutral in _FOREIGN_KEYS.items():
        if arch.sparse and key in _NUM_EXPERTS:
            continue
        value = hf.get(key)
        if value and value != neutral:
            shown = json.dumps(value, default=str)
            only = f"only {neutral} is" if neutral is not None else "it must be absent or null"
            raise NotImplementedError(f"{key}={shown[:80]} is not supported in {name}: {only}")


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts. Every decoder_sparse_step-th layer is one, unless mlp_only_layers names it."""
    num_experts = next((hf[key] for key in _NUM_EXPERTS if hf.get(key) is not None), 128)
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step} must be at least 1")
    layers = range(hf["num_hidden_layers"]) if num_experts else ()
    return {
        "sparse_layers": tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
        "num_experts": num_experts,
        "num_experts_per_token": hf.get("num_experts_per_tok", 8),
        "moe_intermediate_size": hf.get("moe_intermediate_size", 768),
        "norm_topk_prob": bool(hf.get("norm_topk_prob")),
    }


def _sliding_windows(hf: Mapping[str, Any], name: str, arch: Architecture) -> tuple[int | None, ...]:
    """layer_types where given, otherwise the architecture's own rule. A window that is switched off is no window."""
    num_layers, layer_types = hf["num_hidden_layers"], hf.get("layer_types")
    window = hf.get("sliding_window", 4096)
    if arch.window == "never" or (arch.window.endswith("if_used") and not hf.get("use_sliding_window", False)):
        window = None
    if layer_types is None:
        first = hf.get("max_window_layers", 28) if arch.window == "if_used" else 0
        return tuple(window if i >= first else None for i in range(num_layers))
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise NotImplementedError(f"layer_types {', '.join(unknown)}; supported: full_attention, sliding_attention")
    if "sliding_attention" in layer_types and window is None:
        raise ValueError(f"layer_types of {name} asks for sliding_attention, but no sliding_window is active in this config")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(hf: Mapping[str, Any]) -> str | None:
    dtype = hf.get("dtype") or hf.get("torch_dtype")
    if dtype is None:
        return None
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise NotImplementedError(f"dtype={dtype!r}; supported: {', '.join(_DTYPES)}")
    return dtype
