"""Rotary position embeddings: the frequencies of each rope type, and cos and sin of positions.

Frequencies are computed on the host in float32, step by step as transformers does (modeling_rope_utils.py), since
models are trained with those very numbers. `kernels.rotary_write` rotates heads by them, halves and not interleaved pairs. Sources:
RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, section 3; Llama 3.1 (`llama3`), meta-llama's apply_scaling.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig,
    head_dim: int,  # H, even
) -> tuple[np.ndarray, float]:
    """How many radians each pair turns a position, f32[H/2], and the factor on cos and sin (1.0 except for yarn)."""
    wavelengths = np.float32(rope.theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    inv_freq = np.float32(1) / wavelengths
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, wavelengths), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def rope_cos_sin(
    rope: RopeConfig,
    head_dim: int,
    positions: jax.Array,  # i32[...]
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles of each position, f32[..., H/2], with the rope type's factor in them."""
    inv_freq, factor = inverse_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _llama3(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between the two bounds blended."""
    factor, low, high = (np.float32(f) for f in (rope.factor, rope.low_freq_factor, rope.high_freq_factor))
    turns = np.float32(rope.original_max_position_embeddings) * inv_freq / np.float32(2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (1 - smooth) * inv_freq / factor + smooth * inv_freq


def _yarn(rope: RopeConfig, wavelengths: np.ndarray) -> np.ndarray:
    """Interpolates the slow pairs, keeps the fast ones, with a linear ramp between beta_fast and beta_slow turns."""
    num_pairs = len(wavelengths)

    def pair_of(num_turns: float) -> float:  # the pair that makes that many turns within the original length
        length = rope.original_max_position_embeddings
        return num_pairs * math.log(length / (num_turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    ramp = np.clip((np.arange(num_pairs, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return interpolated * ramp + (1 / wavelengths) * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature: attention_factor, or 0.1 ln(factor) + 1, or the ratio of two mscales (DeepSeek)."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
