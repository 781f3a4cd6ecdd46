"""`Decoder`: the llama-like transformer that every supported architecture is a setting of, and its flat view by path.

Called as a whole it is a plain causal forward for training code and tests. Serving code calls its parts (embed, rope,
layers, final_norm, logits) and brings its own attention.
"""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import (
    INIT_STD,
    AnyLinear,
    DecoderLayer,
    Embedding,
    Fused,
    Linear,
    RMSNorm,
    RopeAngles,
    SwiGLU,
    causal_attention,
    matmul_transposed,
    transposed,
    vocabulary_logits,
)
from jaxserve.models.rope import rope_cos_sin
from jaxserve.parallel.shard import ALONE, Shard
from kernels.checks import Shapes


class Decoder(nnx.Module):
    """A decoder-only transformer; weights are `nnx.Param`s in `param_dtype`, activations have the same dtype.

    `embed` takes i32[...] token ids to [..., D], each of `layers` takes [..., D] to [..., D], `final_norm` and `logits` take that
    to f32[..., V]. Leading axes are free: [T] packed for serving, [B, S] for training. Axis letters as in `models.layers`.

    Weights by path: embed_tokens/embedding [V, D]; layers/i/attention/qkv_proj/kernel [D, (N + 2K) * H] and o_proj/kernel
    [N * H, D]; layers/i/mlp/gate_up_proj/kernel [D, 2F] and down_proj/kernel [F, D]; norms [D]; lm_head/kernel [D, V] unless
    embeddings are tied.

    Fresh weights are normal(0, 0.02), norm scales 1, biases 0. `random_params` makes a big model faster.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, param_dtype: Any = jnp.bfloat16):
        self.config = config
        self.embed_tokens: Embedding = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, param_dtype=param_dtype)
        self.layers: nnx.List[DecoderLayer] = nnx.List(
            DecoderLayer(config, window, sparse=i in config.sparse_layers, rngs=rngs, param_dtype=param_dtype)
            for i, window in enumerate(config.sliding_windows)
        )
        self.final_norm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps, param_dtype=param_dtype)
        tied = config.tie_word_embeddings
        lm_head = functools.partial(Linear, use_bias=False, rngs=rngs, param_dtype=param_dtype)
        self.is_transposed = False  # see transpose_kernels
        self.lm_head: AnyLinear | None = None if tied else lm_head(config.hidden_size, config.vocab_size)

    @classmethod
    def abstract(cls, config: ModelConfig, param_dtype: Any = jnp.bfloat16) -> "Decoder":
        """The module with ShapeDtypeStructs for weights: nothing is allocated or compiled."""
        return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))

    def embed(self, token_ids: jax.Array, shard: Shard = ALONE) -> jax.Array:  # i32[...] -> [..., D]
        """What the first layer takes. shard: whose part of the vocabulary the table is. Raises ValueError if token_ids are not
        integers."""
        Shapes().check("token_ids", token_ids, "...", int)
        with jax.named_scope("embed"):
            return self.embed_tokens(token_ids, shard)

    def rope(self, positions: jax.Array) -> RopeAngles:  # i32[...] -> cos, sin f32[..., H/2]
        """What every layer needs of the positions, computed once a step. Raises ValueError if positions are not integers."""
        Shapes().check("positions", positions, "...", int)
        with jax.named_scope("rope_angles"):
            return rope_cos_sin(self.config.rope, self.config.head_dim, positions)

    def normed_logits(self, x: jax.Array, fused: Fused | None = None) -> jax.Array:  # [T, D] -> f32[T, V]
        """Logits of what the last layer gives. fused: what computes the norm and the matmul as one, where it takes any layout."""
        if fused is None or not fused.any_layout:
            return self.logits(self.final_norm(x))
        with jax.named_scope("logits"):
            weight, vocab_axis = self.head_weight()
            how = {"scale": self.final_norm.scale[...], "eps": self.final_norm.eps, "dtype": jnp.float32}
            return fused.matmul(x, weight, **how, transposed=vocab_axis == 0)

    def logits(self, x: jax.Array) -> jax.Array:  # [..., D] -> f32[..., V]
        """Logits of normed hidden states, accumulated and returned in float32 whatever the weights' dtype.

        Raises ValueError if x's last axis is not D.
        """
        Shapes(D=self.config.hidden_size).check("x", x, "... D")
        with jax.named_scope("logits"):
            weight, vocab_axis = self.head_weight()
            return matmul_transposed(x, weight, jnp.float32) if self.is_transposed else vocabulary_logits(x, weight, vocab_axis)

    def head_weight(self) -> tuple[jax.Array, int]:
        """The weight that logits are made with, and which of its axes is the vocabulary's: lm_head's [D, V], 1, or where that is
        transposed or the embedding is tied, [V, D], 0."""
        if isinstance(self.lm_head, Linear):
            return self.lm_head.kernel[...], 1
        return (self.embed_tokens.embedding if self.lm_head is None else self.lm_head.weight)[...], 0

    def __call__(self, tokens: jax.Array) -> jax.Array:  # i32[B, S] -> f32[B, S, V]
        """Plain causal forward of whole sequences from position 0, differentiable; memory grows with S * S a layer.

        Raises ValueError if tokens are not integers [B, S].
        """
        Shapes().check("tokens", tokens, "B S", int)
        rope = self.rope(jnp.arange(tokens.shape[1]))
        x = self.embed(tokens)
        for layer in self.layers:
            attend = functools.partial(causal_attention, sliding_window=layer.sliding_window)
            x, _ = layer(x, rope, lambda q, k, v, attend=attend: (attend(q, k, v), None))
        return self.logits(self.final_norm(x))


def transpose_kernels(model: Decoder) -> Decoder:
    """`model` itself, its dense kernels [in, out] replaced by weights [out, in], one at a time: what a CPU computes fastest
    with, up to twice as fast where a step has few tokens. The router of a mixture of experts and the experts stay as they are.

    A leaf `.../kernel` becomes `.../weight`, a new `nnx.Param`. For serving: make optimizers, save and convert before. Abstract
    modules stay abstract.
    """
    for layer in model.layers:
        blocks: list[tuple[nnx.Module, tuple[str, str]]] = [(layer.attention, ("qkv_proj", "o_proj"))]
        if isinstance(layer.mlp, SwiGLU):
            blocks.append((layer.mlp, ("gate_up_proj", "down_proj")))
        for block, names in blocks:
            for name in names:
                setattr(block, name, transposed(getattr(block, name)))
    if model.lm_head is not None:
        model.lm_head = transposed(model.lm_head)
    model.is_transposed = True
    return model


def named_leaves(module: nnx.Module) -> dict[str, Any]:
    """{path: array or ShapeDtypeStruct}, e.g. "layers/0/attention/qkv_proj/kernel", in the order of `jax.tree.leaves`
    of the module's state."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(module))}


def with_leaves[Module: nnx.Module](module: Module, leaves: Mapping[str, Any]) -> Module:
    """A new module with the structure of `module` (abstract or not) and these weights, which are not copied.

    Raises:
        ValueError: paths, shapes or dtypes differ from the module's; the message lists them.
    """
    wanted = named_leaves(module)
    faults = [f"missing {path}" for path in wanted if path not in leaves]
    faults += [f"unknown {path}" for path in leaves if path not in wanted]
    for path in wanted.keys() & leaves.keys():
        have, want = leaves[path], wanted[path]
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            faults.append(f"{path} is {have.dtype}{list(have.shape)}, not {want.dtype}{list(want.shape)}")
    if faults:
        raise ValueError("weights do not fit the module: " + "; ".join(sorted(faults)))
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), [leaves[path] for path in wanted]))


def random_params(config: ModelConfig, seed: int = 0, param_dtype: Any = jnp.bfloat16) -> dict[str, jax.Array]:
    """Weights for benchmarks and tests, {path: array}: normal(0, 0.02), biases too, and norm scales 1.

    Made on the default device, one program a distinct shape. A leaf depends on the seed and its path alone.
    """
    return {
        path: _random_leaf(np.uint32(seed), np.uint32(zlib.crc32(path.encode())), leaf.shape, leaf.dtype, path.endswith("/scale"))
        for path, leaf in named_leaves(Decoder.abstract(config, param_dtype)).items()
    }


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "ones"))
def _random_leaf(seed: jax.Array, path_hash: jax.Array, shape: tuple[int, ...], dtype: Any, ones: bool) -> jax.Array:
    if ones:
        return jnp.ones(shape, dtype)
    key = jax.random.fold_in(jax.random.key(seed), path_hash)
    return (INIT_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
