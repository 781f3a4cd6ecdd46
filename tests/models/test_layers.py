import contextlib
import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxserve.execution import model_functions
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.config import RopeConfig
from jaxserve.models.layers import FEW_ROWS, RMSNorm, SparseMLP, causal_attention, matmul_transposed
from kernels import gpu
from kernels.rotary_write.xla import split_heads
from tests.goldens.golden import load_golden
from tests.selection import slow_unless


def test_rms_norm_of_bf16_is_rounded_once_before_the_scale():
    rng = np.random.default_rng(0)
    x = (100 * rng.normal(size=(16, 256))).astype(ml_dtypes.bfloat16)
    scale = rng.normal(size=256).astype(ml_dtypes.bfloat16)
    norm = RMSNorm(256, 1e-3, param_dtype=jnp.bfloat16)
    norm.scale[...] = jnp.asarray(scale)
    got = norm(jnp.asarray(x))

    exact = x.astype(np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3)
    rounded = exact.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    want = (rounded * scale.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert got.dtype == jnp.bfloat16
    assert (np.asarray(got) == want).mean() > 0.999  # all but those that stand at the middle of two bf16


@pytest.mark.parametrize("window", [None, 1, 3])
def test_causal_attention_is_a_softmax_over_what_each_position_sees(window):
    B, S, N, K, H = 2, 7, 6, 2, 4
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(B, S, heads, H)).astype(np.float32) for heads in (N, K, K))
    want = np.zeros((B, S, N, H))
    for b, i, n in np.ndindex(B, S, N):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        weights = np.exp(k[b, seen, n // (N // K)] @ q[b, i, n] / np.sqrt(H))
        want[b, i, n] = weights @ v[b, seen, n // (N // K)] / weights.sum()
    got = causal_attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), sliding_window=window)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_softmax_of_bf16_scores_is_float32():
    """Scores near 300, where bf16 steps by 2: only float32 scores tell keys apart whose scores differ by 1."""
    q = jnp.full((1, 2, 1, 1), 100.0, jnp.bfloat16)
    k = jnp.array([3.0, 3.015625], jnp.bfloat16).reshape(1, 2, 1, 1)  # scores 300 and 301.5625
    v = jnp.array([0.0, 1.0], jnp.bfloat16).reshape(1, 2, 1, 1)
    got = causal_attention(q, k, v)
    assert got.dtype == jnp.bfloat16
    assert float(got[0, 1, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1.5625)), abs=0.003)


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
@pytest.mark.parametrize("golden", ["qwen3_tied", "llama"])
def test_a_step_with_the_rotary_write_computes_what_it_does_without(golden, backend, monkeypatch):
    """With norms of heads and without: the step's queries, keys and values are the same, bit for bit."""
    config = dataclasses.replace(ModelConfig.from_hf(load_golden(golden).config_path), head_dim=64)
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    layer, T, page_size = model.layers[0], 6, 4
    assert (layer.attention.norms is not None) == config.qk_norm
    for i, norm in enumerate((layer.attention.q_norm, layer.attention.k_norm)):
        if norm is not None:
            norm.scale[...] = 1 + jax.random.normal(jax.random.key(7 + i), norm.scale.shape, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (T, config.hidden_size)).astype(jnp.bfloat16)
    pages = jnp.zeros((3, 2, config.num_kv_heads, page_size, config.head_dim), jnp.bfloat16)
    slots = jnp.array([3, 0, 11, 5, 12 + 4, 7], jnp.int32)

    context: Any = SimpleNamespace(slot_mapping=slots)
    monkeypatch.setattr(model_functions, "_attend_pages", lambda window, kv, context, q: (q, kv))
    attend = functools.partial(model_functions.attend_paged, None, pages, context)
    attend_heads = functools.partial(model_functions._attend_heads, backend, None, pages, context)
    rope = model.rope(jnp.arange(T))
    want = jax.jit(lambda x: layer(x, rope, attend))(x)
    with gpu.interpreted() if backend == "mosaic" else contextlib.nullcontext():
        got = jax.jit(lambda x: layer(x, rope, attend, attend_heads=attend_heads))(x)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    "case",
    slow_unless(
        lambda case: case in {("qwen2", False)},
        [(golden, residuals) for golden in ("qwen3_tied", "qwen2", "qwen3_moe") for residuals in (False, True)],
    ),
    ids=str,
)
def test_a_layer_with_fused_matmuls_computes_what_it_does_without(case):
    """Dense with and without biases, and sparse; each against the layer in float32 with the same weights, to which it is as near as
    the layer that computes step by step."""
    golden, residuals = case
    config = ModelConfig.from_hf(load_golden(golden).config_path)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    config = dataclasses.replace(config, hidden_size=64, intermediate_size=128, **heads)
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    layer = model.layers[0]
    for i, leaf in enumerate(jax.tree.leaves(nnx.state(layer), is_leaf=lambda x: isinstance(x, nnx.Param))):
        noise = jax.random.normal(jax.random.key(i), leaf.get_value().shape, jnp.float32)
        leaf.set_value((leaf.get_value() + (0.3 if leaf.get_value().ndim == 1 else 0.1) * noise).astype(jnp.bfloat16))
    x = (3 * jax.random.normal(jax.random.key(9), (11, 64))).astype(jnp.bfloat16)
    rope = model.rope(jnp.arange(11))
    attend = lambda q, k, v: (causal_attention(q[None], k[None], v[None])[0], None)  # noqa: E731
    wide = nnx.merge(nnx.graphdef(layer), jax.tree.map(lambda y: y.astype(jnp.float32), nnx.state(layer)))
    want = np.asarray(jax.jit(lambda x: wide(x, rope, attend)[0])(x.astype(jnp.float32)))
    plain = np.asarray(jax.jit(lambda x: layer(x, rope, attend)[0])(x), np.float32)
    fused = model_functions.LayerKernels(matmul="mosaic_sm90", fuse_residuals=residuals).fused
    attend_heads = functools.partial(_attend_plain_heads, config.num_kv_heads)
    with gpu.interpreted():
        got = jax.jit(lambda x: layer(x, rope, attend, attend_heads=attend_heads, fused=fused)[0])(x)
    error = np.abs(np.asarray(got, np.float32) - want).max()
    assert error <= 1.5 * np.abs(plain - want).max()


def _attend_plain_heads(num_kv_heads, qkv, rope, norms):
    q_scale, k_scale, eps = norms or (None, None, 0.0)
    cos, sin = rope
    q, k, v = split_heads(qkv, num_kv_heads, cos, sin, q_scale, k_scale, eps=eps)
    return causal_attention(q[None], k[None], v[None])[0], None


def test_padding_reaches_no_expert_and_leading_axes_are_free():
    """Rows from num_tokens on are NaN here: the others get what they get without them, and padding gets zeros."""
    config = ModelConfig.from_hf(load_golden("qwen3_moe").config_path)
    mlp = SparseMLP(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    run = nnx.jit(lambda mlp, x, n: mlp(x, n))
    x = jax.random.normal(jax.random.key(0), (12, config.hidden_size)).at[7:].set(jnp.nan)
    out = np.asarray(run(mlp, x, jnp.int32(7)))
    assert np.abs(out[:7]).min() > 0 and not out[7:].any()
    other = np.asarray(run(mlp, x.at[7:].set(1.0), jnp.int32(12)))
    np.testing.assert_array_equal(out[:7], other[:7])
    assert other[7:].all()
    folded = nnx.jit(lambda mlp, x: mlp(x))(mlp, x.at[7:].set(1.0).reshape(3, 4, -1))
    np.testing.assert_array_equal(folded.reshape(12, -1), other)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (16,), (17,), (64,), (65,), (3, 5), (2, 40)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_matmul_with_a_transposed_weight(dtype, rows):
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((*rows, 96), (40, 96)))
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    wide = jax.jit(lambda x, w: matmul_transposed(x, w, jnp.float32))(x, weight)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, want, atol=3e-5)
    narrow = jax.jit(matmul_transposed)(x, weight)
    assert narrow.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(narrow, np.float64), want, atol=1e-5 + 50 * jnp.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_rows_meet_the_weight_on_the_left(dtype):
    """The order of the operands is the whole point."""
    few, weight = FEW_ROWS[jnp.dtype(dtype).itemsize], jax.ShapeDtypeStruct((40, 96), dtype)
    for rows, shape in ((few, f"<40x{few}x"), (few + 1, f"<{few + 1}x40x")):
        text = jax.jit(matmul_transposed).lower(jax.ShapeDtypeStruct((rows, 96), dtype), weight).as_text()
        (dot,) = [line for line in text.splitlines() if "dot_general" in line]
        assert shape in dot.split("->")[1]


def test_gradients_pass_through_few_rows():
    rng = np.random.default_rng(3)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 24), (10, 24)))
    got = jax.jit(jax.grad(lambda x, w: (matmul_transposed(x, w) ** 2).sum(), argnums=(0, 1)))(x, weight)
    want = jax.grad(lambda x, w: ((x @ w.T) ** 2).sum(), argnums=(0, 1))(x, weight)
    chex.assert_trees_all_close(got, want, rtol=1e-5)


def wrong_call(what):
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, rope=RopeConfig(), sliding_windows=(None,),
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    rope = model.rope(jnp.arange(3))
    q, k = jnp.zeros((1, 3, 2, 8)), jnp.zeros((1, 3, 1, 8))
    calls = {
        "token ids": lambda: model.embed(jnp.zeros(3)),
        "positions": lambda: model.rope(jnp.zeros(3)),
        "hidden states": lambda: model.logits(jnp.zeros((3, 15))),
        "packed tokens": lambda: model(jnp.zeros(3, jnp.int32)),
        "layer's input": lambda: model.layers[0](jnp.zeros((3, 15)), rope, lambda q, k, v: (q, None)),
        "angles": lambda: model.layers[0](jnp.zeros((3, 16)), (rope[0], rope[1][:, :3]), lambda q, k, v: (q, None)),
        "keys": lambda: causal_attention(q, k[:, :2], k),
    }
    return calls[what]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("token ids", r"token_ids is float32\(3,\); must be int\[\.\.\.\]"),
        ("positions", r"positions is float32\(3,\); must be int\[\.\.\.\]"),
        ("hidden states", r"x is float32\(3, 15\); must be \[\.\.\., D\] with D=16"),
        ("packed tokens", r"tokens is int32\(3,\); must be int\[B, S\]"),
        ("layer's input", r"x is float32\(3, 15\); must be \[\.\.\., D\] with D=16"),
        ("angles", r"sin is float32\(3, 3\); must be float32\[\.\.\., half_H\] with half_H=4"),
        ("keys", r"k is float32\(1, 2, 1, 8\); must be \[B, S, K, H\] with B=1 and S=3 and H=8"),
    ],
)
def test_a_wrong_shape_is_named_with_what_is_wanted(what, message):
    with pytest.raises(ValueError, match=message):
        wrong_call(what)()
