"""Where each weight of `Decoder` comes from in a Hugging Face checkpoint, and how its layout changes on the way.

Owns the names of both sides. Does not read files and does not know the file format: readers give tensors by Hugging
Face name in Hugging Face layout ([out, in]), here they become ours ([in, out], q, k, v fused and gate, up fused).
"""

import numpy as np

from checkpoints.weights import Source
from jaxserve.models.config import ModelConfig


def key_table(config: ModelConfig) -> dict[str, Source]:
    """{our path: Source(keys, convert)} for every weight of the model that `config` describes."""
    table = {"embed_tokens/embedding": Source(("model.embed_tokens.weight",), _as_is)}
    for i in range(config.num_layers):
        table |= _layer_table(config, f"layers/{i}", f"model.layers.{i}")
    table["final_norm/scale"] = Source(("model.norm.weight",), _as_is)
    if not config.tie_word_embeddings:
        table["lm_head/kernel"] = Source(("lm_head.weight",), _fused_kernel)
    return table


def hf_tensors(config: ModelConfig, path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The Hugging Face tensors that our weight `path` is made of, by name, in Hugging Face layout: `key_table` backwards. Views."""
    source = key_table(config)[path]
    if source.convert is _as_is:
        parts = [array]
    elif array.ndim == 3:  # [E, in, out]: each expert's matrix, or its gate and up by turns
        parts = [x.T for matrix in array for x in np.split(matrix, len(source.keys) // len(array), axis=-1)]
    else:
        ends = np.cumsum([_out_dim(config, key, array.shape[-1]) for key in source.keys])[:-1]
        parts = [x.T for x in np.split(array, ends, axis=-1)]  # a bias is its own transpose
    return dict(zip(source.keys, parts, strict=True))


def _out_dim(config: ModelConfig, key: str, width: int) -> int:
    """Of a projection that may be fused with others; `width` of one that is not."""
    N, K, H, F = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
    projection = key.split(".")[-2]
    return {"q_proj": N * H, "k_proj": K * H, "v_proj": K * H, "gate_proj": F, "up_proj": F}.get(projection, width)


def ignorable_keys(config: ModelConfig) -> tuple[str, ...]:
    """Regular expressions for tensors that a checkpoint may hold and the model does not need: rotary frequencies that
    old versions of transformers saved, and the copy of a tied embedding."""
    patterns = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
    return (*patterns, r"lm_head\.weight") if config.tie_word_embeddings else patterns


def _layer_table(config: ModelConfig, ours: str, theirs: str) -> dict[str, Source]:
    table = {
        f"{ours}/attention_norm/scale": Source((f"{theirs}.input_layernorm.weight",), _as_is),
        f"{ours}/mlp_norm/scale": Source((f"{theirs}.post_attention_layernorm.weight",), _as_is),
    }
    if config.qk_norm:
        table[f"{ours}/attention/q_norm/scale"] = Source((f"{theirs}.self_attn.q_norm.weight",), _as_is)
        table[f"{ours}/attention/k_norm/scale"] = Source((f"{theirs}.self_attn.k_norm.weight",), _as_is)
    linears = (
        ("attention/qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        ("attention/o_proj", ("self_attn.o_proj",), config.o_bias),
        ("mlp/gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        ("mlp/down_proj", ("mlp.down_proj",), config.mlp_bias),
    )
    for path, names, has_bias in linears:
        weights = tuple(f"{theirs}.{name}.weight" for name in names)
        table[f"{ours}/{path}/kernel"] = Source(weights, _fused_kernel)
        if has_bias:
            biases = tuple(f"{theirs}.{name}.bias" for name in names)
            table[f"{ours}/{path}/bias"] = Source(biases, _fused_bias)
    return table


def _as_is(arrays: list[np.ndarray]) -> np.ndarray:
    (array,) = arrays
    return array


def _fused_kernel(arrays: list[np.ndarray]) -> np.ndarray:
    """[out_i, in] each -> [in, sum of out_i]; a transposed view, not a copy."""
    return (arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)).T


def _fused_bias(arrays: list[np.ndarray]) -> np.ndarray:
    """[out_i] each -> [sum of out_i]."""
    return np.concatenate(arrays)
