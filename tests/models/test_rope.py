import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.rope import inverse_frequencies, rope_cos_sin
from kernels.rotary_write.xla import apply_rope
from tests.goldens.golden import ROPE_FREQUENCIES


@pytest.mark.parametrize("row", ROPE_FREQUENCIES, ids=lambda row: row["name"])
def test_frequencies_are_those_of_transformers(row):
    config = ModelConfig.from_hf(row["config"])
    inv_freq, factor = inverse_frequencies(config.rope, config.head_dim)
    assert inv_freq.dtype == np.float32 and inv_freq.shape == (config.head_dim // 2,)
    np.testing.assert_allclose(inv_freq, np.array(row["inv_freq"]), rtol=5e-7)  # four ulps of float32
    assert factor == pytest.approx(row["factor"], rel=1e-12)


def test_the_settings_differ_from_plain_rope():
    """So that the comparison above can't pass by ignoring the type."""
    for row in ROPE_FREQUENCIES[1:]:
        config = ModelConfig.from_hf(row["config"])
        plain, _ = inverse_frequencies(RopeConfig(theta=config.rope.theta), config.head_dim)
        assert np.abs(plain / np.array(row["inv_freq"]) - 1).max() > 0.1, row["name"]


def test_rotation_is_multiplication_by_a_complex_phase():
    """Pair j of a head at position p, seen as x[j] + i x[j + H/2], is multiplied by exp(i p theta^(-2j/H))."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 16)).astype(np.float32)  # [T, heads, H]
    positions = np.array([0, 1, 7, 1000, 40959], np.int32)
    cos, sin = rope_cos_sin(RopeConfig(theta=1e6), 16, jnp.asarray(positions))
    got = np.asarray(apply_rope(jnp.asarray(x), cos, sin))

    phases = np.exp(1j * positions[:, None] * 1e6 ** (-np.arange(8) / 8))
    want = (x[..., :8] + 1j * x[..., 8:]) * phases[:, None, :]
    np.testing.assert_allclose(got[..., :8] + 1j * got[..., 8:], want, atol=0.01)  # float32 angles at position 40959
    np.testing.assert_allclose((got[..., :8] + 1j * got[..., 8:])[:3], want[:3], atol=2e-6)


def test_yarn_scales_cos_and_sin():
    rope = RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.5)
    cos, sin = rope_cos_sin(rope, 16, jnp.arange(9))
    np.testing.assert_allclose(cos**2 + sin**2, np.full((9, 8), 1.5**2), rtol=1e-6)


def test_bf16_is_rotated_in_float32_and_leading_axes_are_free():
    x = jax.random.normal(jax.random.key(0), (2, 6, 3, 8), jnp.bfloat16)  # [B, T, heads, H]
    angles = rope_cos_sin(RopeConfig(), 8, jnp.arange(6))
    got = apply_rope(x, *angles)
    exact = apply_rope(x.astype(jnp.float32), *angles)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, exact.astype(jnp.bfloat16))
    np.testing.assert_array_equal(got[1], apply_rope(x[1], *angles))
