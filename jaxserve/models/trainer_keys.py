"""Where each weight of `Decoder` lies in a trainer's tree of parameters: names as data, and how a layout becomes ours.

Owns the names of both sides. Known are tunix's Flax NNX models (Qwen3, Qwen2, Llama: `layers.0.attn.q_proj.w`, einsum shapes),
Flax modules named after transformers' (`model/layers/0/self_attn/q_proj/kernel`), torch's own names and layout (`....weight`,
[out, in]), and this package's: fused or not, transposed (`models.transpose_kernels`) or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.models.config import ModelConfig

_PROJECTION = r"([qkvo]|gate|up|down)_proj"
_LAYER = r"layers/(\d+)"

# (a path of theirs, ours, whether it is [out, in] there). Patterns match in full; tried in order. A path that none of them knows
# may be one of ours.
RULES: tuple[tuple[str, str, bool], ...] = (
    # tunix
    (r"embedder/input_embedding", r"embed_tokens/embedding", False),
    (_LAYER + r"/input_layernorm/w", r"layers/\1/attention_norm/scale", False),
    (_LAYER + r"/post_attention_layernorm/w", r"layers/\1/mlp_norm/scale", False),
    (_LAYER + r"/attn/([qkvo])_proj/w", r"layers/\1/attention/\2_proj/kernel", False),
    (_LAYER + r"/attn/([qkvo])_bias", r"layers/\1/attention/\2_proj/bias", False),
    (_LAYER + r"/attn/([qk])_norm/w", r"layers/\1/attention/\2_norm/scale", False),
    (_LAYER + r"/mlp/(gate|up|down)_proj", r"layers/\1/mlp/\2_proj/kernel", False),  # of all experts, [E, in, out]
    (r"final_norm/w", r"final_norm/scale", False),
    (r"lm_head/w", r"lm_head/kernel", False),
    # transformers' names, in Flax and in torch
    (r"(?:model/)?embed_tokens/(?:embedding|weight)", r"embed_tokens/embedding", False),
    (r"(?:model/)?" + _LAYER + r"/input_layernorm/(?:scale|weight)", r"layers/\1/attention_norm/scale", False),
    (r"(?:model/)?" + _LAYER + r"/post_attention_layernorm/(?:scale|weight)", r"layers/\1/mlp_norm/scale", False),
    (r"(?:model/)?" + _LAYER + r"/self_attn/([qk])_norm/(?:scale|weight)", r"layers/\1/attention/\2_norm/scale", False),
    (r"(?:model/)?" + _LAYER + rf"/self_attn/{_PROJECTION}/(kernel|bias)", r"layers/\1/attention/\2_proj/\3", False),
    (r"(?:model/)?" + _LAYER + rf"/self_attn/{_PROJECTION}/weight", r"layers/\1/attention/\2_proj/kernel", True),
    (r"(?:model/)?" + _LAYER + rf"/mlp/{_PROJECTION}/(kernel|bias)", r"layers/\1/mlp/\2_proj/\3", False),
    (r"(?:model/)?" + _LAYER + rf"/mlp/{_PROJECTION}/weight", r"layers/\1/mlp/\2_proj/kernel", True),
    (r"(?:model/)?norm/(?:scale|weight)", r"final_norm/scale", False),
    (r"lm_head/weight", r"lm_head/kernel", True),
    # this package's, transposed (`models.transpose_kernels`)
    (_LAYER + r"/(attention|mlp)/(\w+_proj)/weight", r"layers/\1/\2/\3/kernel", True),
)
_COMPILED = [(re.compile(theirs), ours, transposed) for theirs, ours, transposed in RULES]

FUSED: dict[str, tuple[str, ...]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Named(NamedTuple):
    """What a path of theirs stands for: a path of ours, or of one part of a fused weight of ours."""

    path: str
    transposed: bool  # [out, in] there


class Part(NamedTuple):
    """What may stand for (a part of) a weight: `path`, of this shape, [in, out] or [out]; with heads kept apart, of `by_heads`."""

    path: str
    shape: tuple[int, ...]
    by_heads: tuple[int, ...]


def find_name(path: str) -> Named:
    """The meaning of a path of theirs, components joined by "/" or "."; `layers_3` counts as `layers/3`, a leading `params` not."""
    path = re.sub(r"\blayers_(\d+)\b", r"layers/\1", path.replace(".", "/")).removeprefix("params/")
    for theirs, ours, transposed in _COMPILED:
        match = theirs.fullmatch(path)
        if match:
            return Named(match.expand(ours), transposed)
    return Named(path, False)


def is_transposed(paths: Iterable[str]) -> bool:
    """Whether these are the paths of a `Decoder` whose kernels are transposed."""
    return Named("layers/0/attention/qkv_proj/kernel", True) in map(find_name, paths)


def parts(config: ModelConfig, path: str, shape: tuple[int, ...]) -> list[list[Part]]:
    """The ways to make our weight `path` of this shape: as it is or, where it is fused, of its parts, along the last axis."""
    ways = [[Part(path, shape, _by_heads(config, path, shape))]]
    for fused, names in FUSED.items():
        if f"/{fused}/" in path:
            paths = [path.replace(fused, name) for name in names]
            shapes = [(*shape[:-1], width) for width in _widths(config, fused, shape[-1])]
            ways.append([Part(p, s, _by_heads(config, p, s)) for p, s in zip(paths, shapes, strict=True)])
    return ways


def _widths(config: ModelConfig, fused: str, width: int) -> tuple[int, ...]:
    if fused == "gate_up_proj":
        return (width // 2,) * 2
    N, K, H = config.num_heads, config.num_kv_heads, config.head_dim
    return N * H, K * H, K * H


def _by_heads(config: ModelConfig, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """q, k and v: [D, heads, H] (bias [heads, H]); o: [heads, H, D]; anything else has no heads."""
    H = config.head_dim
    if re.search(r"/attention/[qkv]_proj/", path):
        return (*shape[:-1], shape[-1] // H, H)
    if path.endswith("/attention/o_proj/kernel"):
        return (shape[0] // H, H, *shape[1:])
    return shape
