"""The weights of a block, `mosaic_sm90/block_weights.py`: what of them is plain arithmetic, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import gpu
from kernels.ragged_paged_attention.geometry import Geometry
from kernels.ragged_paged_attention.mosaic_sm90 import block_weights
from kernels.ragged_paged_attention.work_list import BLOCK

LARGEST_CAP = block_weights.MAX_CAP / block_weights.LOG2E


def bounded(y: np.ndarray, *, soft_cap: float, position: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """(totals, f32[64], and weights of a block's exponents, bfloat16 as float32) of 64 tokens from `position` on, one head."""
    sizes = {"consumers": 1, "stages": 3, "chunk_blocks": 1, "num_kv_heads": 1, "items_at": 0, "order_at": 0, "cta_start_at": 0}
    shape = {"group": 1, "tokens": 64, "page_size": 64, "split_rows": 0, "sliding_window": None, "interpreted": True}
    g = Geometry(**sizes, **shape, scale=1.0, soft_cap=soft_cap)

    def body(y, totals, weights):
        of_block = gpu.load(y, layout=gpu.WGMMA), jnp.bfloat16
        parts, weights[...] = block_weights.bounded(g, jnp.int32(position), jnp.int32(0), block_weights.no_parts(), *of_block)
        totals[...] = parts.sum(axis=1)

    with gpu.interpreted():
        out = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((64, BLOCK), jnp.bfloat16)
        totals, weights = jax.jit(gpu.kernel(body, out_type=out, grid={"cta": 1}, scratch_types=[]))(y)
    return np.asarray(totals), np.asarray(weights.astype(jnp.float32))


def test_exp2_by_products_is_exp2_in_the_range_of_bounded_weights():
    x = np.linspace(-block_weights.LEAST_WEIGHT, 2 * block_weights.MAX_CAP - block_weights.LEAST_WEIGHT, 200_001, dtype=np.float32)
    right = np.exp2(x.astype(np.float64))
    whole = np.arange(-108.0, 73.0, dtype=np.float32)
    with gpu.interpreted():
        exp2 = jax.jit(block_weights.exp2_by_products)
        assert np.abs(np.asarray(exp2(x)) / right - 1).max() < 2**-22.5
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
    [
        *((None, jnp.bfloat16, False), (50.0, jnp.float16, False)),
        *((50.0, jnp.bfloat16, True), (LARGEST_CAP - 0.01, jnp.bfloat16, True), (LARGEST_CAP + 0.01, jnp.bfloat16, False)),
    ],
)
def test_which_weights_are_bounded(soft_cap, dtype, bounded):
    assert block_weights.is_bounded(soft_cap, dtype) == bounded


@pytest.mark.parametrize("soft_cap", [5.0, 50.0, LARGEST_CAP])
def test_weights_and_what_is_summed_are_in_range(soft_cap):
    """Of the largest and the least logits: 2^17 weights, each with a value of 2^37."""
    y = np.full((64, BLOCK), 1e30, np.float32)
    y[:, 1::2] = -1e30
    totals, weights = bounded(y, soft_cap=soft_cap)
    range_ = jnp.finfo(jnp.bfloat16)
    cap = soft_cap * block_weights.LOG2E
    np.testing.assert_allclose(weights[:, ::2].astype(np.float64) / weights[:, 1::2], 2.0 ** (2 * cap), rtol=2**-7)
    np.testing.assert_allclose(totals, weights.sum(axis=1), rtol=2**-8)
    assert (weights >= 2.0**18 * float(range_.smallest_normal)).all()
    assert weights.max() * 2.0**17 * 2.0**37 < float(range_.max) / 2


@pytest.mark.parametrize("position", [BLOCK, 0])  # all of the block is seen; what comes before the query
@pytest.mark.parametrize("column", [5, 40])  # a weight from multiply-adds, and one from an exponential
def test_a_nan_reaches_the_rows_that_see_it(position, column):
    """Their totals are NaN. Of rows that see its column, and none of the three that share its reciprocal, a weight is infinite."""
    y = np.zeros((64, BLOCK), np.float32)
    y[:, column] = np.uint32(0x7FFFFFFF).view(np.float32)  # as a GPU's: of these bits multiply-adds make a number
    totals, weights = bounded(y, soft_cap=50.0, position=position)
    sees = column <= position + np.arange(64)
    assert (~np.isfinite(weights).all(axis=1) == sees).all()
    sees_more = sees & ((column >= block_weights.BY_PRODUCTS) | (column + BLOCK // 4 <= position + np.arange(64)))
    assert (np.isnan(totals) == sees_more).all() and (totals[sees & ~sees_more] > 2.0**127).all()
