"""Where each weight of `Decoder` comes from in a Hugging Face checkpoint, and how its layout changes on the way.

Readers give tensors by Hugging Face name in Hugging Face layout, [out, in]. Here they become ours: [in, out], with q, k, v fused
and gate, up fused.
"""

from collections.abc import Collection

import numpy as np

from checkpoints.weights import Source
from jaxserve.models.config import ModelConfig


def key_table(config: ModelConfig, keys: Collection[str] = (), *, transposed: bool = False) -> dict[str, Source]:
    """{our path: Source(keys, convert)} for every weight of the model that `config` describes.

    keys: what the checkpoint holds. It decides between the layouts that a mixture of experts is stored in: a matrix an expert
    (the default, and what is published), or all experts' in one.
    transposed: the model's dense kernels are `.../weight` [out, in], as `transpose_kernels` makes them and checkpoints have them.
    """
    table = {"embed_tokens/embedding": Source(("model.embed_tokens.weight",), as_is)}
    for i in range(config.num_layers):
        table |= _layer_table(config, f"layers/{i}", f"model.layers.{i}", i in config.sparse_layers, transposed)
        if i in config.sparse_layers:
            table |= _experts_table(config, f"layers/{i}/mlp", f"model.layers.{i}.mlp", keys)
    table["final_norm/scale"] = Source(("model.norm.weight",), as_is)
    if not config.tie_word_embeddings:
        table |= linear("lm_head", ("lm_head.weight",), transposed)
    return table


def hf_tensors(config: ModelConfig, path: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """The Hugging Face tensors that our weight `path` is made of, by name, in Hugging Face layout: `key_table` backwards. Views."""
    return tensors_of(key_table(config)[path], config, array)


def tensors_of(source: Source, config: ModelConfig, array: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of which `source` makes this array, by name. config: of the layers whose projections are fused. Views."""
    if source.convert is as_is:
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


def linear(path: str, keys: tuple[str, ...], transposed: bool = False) -> dict[str, Source]:
    """Of a matrix, or several that are fused by columns, in the layout that `key_table` says."""
    return {f"{path}/weight": Source(keys, _fused_weight)} if transposed else {f"{path}/kernel": Source(keys, _fused_kernel)}


def _layer_table(config: ModelConfig, ours: str, theirs: str, sparse: bool, transposed: bool) -> dict[str, Source]:
    table = {
        f"{ours}/attention_norm/scale": Source((f"{theirs}.input_layernorm.weight",), as_is),
        f"{ours}/mlp_norm/scale": Source((f"{theirs}.post_attention_layernorm.weight",), as_is),
    }
    if config.qk_norm:
        table[f"{ours}/attention/q_norm/scale"] = Source((f"{theirs}.self_attn.q_norm.weight",), as_is)
        table[f"{ours}/attention/k_norm/scale"] = Source((f"{theirs}.self_attn.k_norm.weight",), as_is)
    return table | layer_linears(config, f"{ours}/", theirs, sparse=sparse, transposed=transposed)


def layer_linears(
    config: ModelConfig, prefix: str, theirs: str, *, sparse: bool = False, transposed: bool = False
) -> dict[str, Source]:
    """Of the matrices and biases of a layer, whose paths begin with `prefix` and whose keys with `theirs`."""
    table: dict[str, Source] = {}
    linears = [
        ("attention/qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
        ("attention/o_proj", ("self_attn.o_proj",), config.o_bias),
    ]
    if not sparse:
        linears += [
            ("mlp/gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
            ("mlp/down_proj", ("mlp.down_proj",), config.mlp_bias),
        ]
    for path, names, has_bias in linears:
        table |= linear(f"{prefix}{path}", tuple(f"{theirs}.{name}.weight" for name in names), transposed)
        if has_bias:
            biases = tuple(f"{theirs}.{name}.bias" for name in names)
            table[f"{prefix}{path}/bias"] = Source(biases, _fused_bias)
    return table


def _experts_table(config: ModelConfig, ours: str, theirs: str, keys: Collection[str]) -> dict[str, Source]:
    experts = f"{theirs}.experts"
    if f"{experts}.gate_up_proj" in keys:  # transformers 5's own layout: [E, 2F, D] and [E, D, F]
        gate_up = Source((f"{experts}.gate_up_proj",), _stacked_kernel)
        down = Source((f"{experts}.down_proj",), _stacked_kernel)
    else:
        each = range(config.num_experts)
        pairs = tuple(f"{experts}.{e}.{name}_proj.weight" for e in each for name in ("gate", "up"))
        gate_up = Source(pairs, _stacked_pairs)
        down = Source(tuple(f"{experts}.{e}.down_proj.weight" for e in each), _stacked)
    return {
        f"{ours}/router/kernel": Source((f"{theirs}.gate.weight",), _fused_kernel),
        f"{ours}/gate_up_proj/kernel": gate_up,
        f"{ours}/down_proj/kernel": down,
    }


def as_is(arrays: list[np.ndarray]) -> np.ndarray:
    """A tensor that is stored as it is used."""
    (array,) = arrays
    return array


def _fused_weight(arrays: list[np.ndarray]) -> np.ndarray:
    """[out_i, in] each -> [sum of out_i, in]."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)


def _fused_kernel(arrays: list[np.ndarray]) -> np.ndarray:
    """[out_i, in] each -> [in, sum of out_i]; a transposed view, not a copy."""
    return _fused_weight(arrays).T


def _fused_bias(arrays: list[np.ndarray]) -> np.ndarray:
    """[out_i] each -> [sum of out_i]."""
    return np.concatenate(arrays)


def _stacked(arrays: list[np.ndarray]) -> np.ndarray:
    """[out, in] of each expert -> [E, in, out]."""
    out_dim, in_dim = _common_shape(arrays)
    stacked = np.empty((len(arrays), in_dim, out_dim), arrays[0].dtype)  # filled in place: a layer's experts are large
    for e, array in enumerate(arrays):
        stacked[e] = array.T
    return stacked


def _stacked_pairs(arrays: list[np.ndarray]) -> np.ndarray:
    """[F, in] of each expert's gate and up, by turns -> [E, in, 2F]."""
    F, in_dim = _common_shape(arrays)
    stacked = np.empty((len(arrays) // 2, in_dim, 2 * F), arrays[0].dtype)
    for i, array in enumerate(arrays):
        stacked[i // 2, :, i % 2 * F : (i % 2 + 1) * F] = array.T
    return stacked


def _common_shape(arrays: list[np.ndarray]) -> tuple[int, ...]:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"experts of different shapes {sorted(shapes)}")
    return arrays[0].shape


def _stacked_kernel(arrays: list[np.ndarray]) -> np.ndarray:
    """[E, out, in] -> [E, in, out]; a view."""
    (array,) = arrays
    return array.swapaxes(1, 2)
