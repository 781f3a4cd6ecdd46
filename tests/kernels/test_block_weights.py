"""The weights of a block, `mosaic_sm90/block_weights.py`: what of them is plain arithmetic, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu
from kernels.ragged_paged_attention.mosaic_sm90 import block_weights


def test_exp2_by_products_is_exp2_in_the_range_of_bounded_weights():
    x = np.linspace(-block_weights.LEAST_WEIGHT, 2 * block_weights.MAX_CAP - block_weights.LEAST_WEIGHT, 200_001, dtype=np.float32)
    right = np.exp2(x.astype(np.float64))
    whole = np.arange(-108.0, 73.0, dtype=np.float32)
    with gpu.interpreted():
        exp2 = jax.jit(block_weights.exp2_by_products)
        assert np.abs(np.asarray(exp2(x)) / right - 1).max() < 2**-22
        assert (np.asarray(exp2(whole)) == np.exp2(whole)).all()


def test_halves_make_tanh_of_any_score():
    y = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) * np.logspace(-3, 3, 64, dtype=np.float32)
    y[0, :4] = np.inf, -np.inf, 1e30, -1e30
    with gpu.interpreted(), np.errstate(over="ignore"):
        r = np.asarray(block_weights.halves(jnp.asarray(y)), np.float64)
    assert np.abs(1 - 2 * r - np.tanh(y.astype(np.float64) * np.log(2) / 2)).max() < 5e-7


def test_a_nan_reaches_no_more_than_its_four_columns():
    y = np.zeros((64, 64), np.float32)
    y[3, 5] = np.nan
    with gpu.interpreted():
        r = np.asarray(block_weights.halves(jnp.asarray(y)))
    wrong = np.zeros((64, 64), bool)
    wrong[3, 5::16] = True
    assert (np.isnan(r) == wrong).all() and (r[~wrong] == 0.5).all()


@pytest.mark.parametrize(
    ("soft_cap", "dtype", "bounded"),
    [(None, jnp.bfloat16, False), (50.0, jnp.bfloat16, True), (50.0, jnp.float16, False), (70.0, jnp.bfloat16, False)],
)
def test_which_weights_are_bounded(soft_cap, dtype, bounded):
    assert block_weights.is_bounded(soft_cap, dtype) == bounded
    if bounded:  # whatever is summed: 2^17 weights of the largest logit, each with a value of 2^38
        cap = soft_cap * block_weights.LOG2E
        assert max(0, 2 * cap - block_weights.LEAST_WEIGHT) + 17 + 38 < 127
