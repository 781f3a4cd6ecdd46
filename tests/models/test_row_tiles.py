"""jaxserve.models.row_tiles: a row's bits, whatever the number of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.layers import matmul_transposed
from jaxserve.models.row_tiles import RowTiles, whole
from kernels.rotary_write.xla import rms_normalize
from tests.selection import slow_unless

OPTIMISED = True
ROWS = (1, 2, 7, 8, 16, 17, 32, 64, 65, 200)
D, F = 640, 96


def bits_by_rows(map_rows, dtype):
    """{number of rows: f32[rows, F]} of one computation over the first rows of one array."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal((max(ROWS), D)), dtype), jnp.asarray(rng.standard_normal((F, D)), dtype)

    def f(x):
        return jax.nn.softmax(matmul_transposed(jnp.exp(rms_normalize(x, 1e-6)), w, jnp.float32), axis=-1)

    run = jax.jit(lambda x: map_rows(f, x))
    return {n: np.asarray(run(x[:n])) for n in ROWS}


@pytest.mark.parametrize("dtype", slow_unless(lambda dtype: dtype == "float32", ["float32", "bfloat16"]))
def test_bits_do_not_depend_on_the_number_of_rows(dtype):
    found = bits_by_rows(RowTiles(16), dtype)
    for n, rows in found.items():
        np.testing.assert_array_equal(rows, found[max(ROWS)][:n], err_msg=f"{n} rows")


def test_all_rows_at_once_do():
    """Or the test above could not fail."""
    found = bits_by_rows(whole, "float32")
    assert any((rows != found[max(ROWS)][:n]).any() for n, rows in found.items())


def test_several_arrays_in_and_out_and_padding():
    """Rows in order, trailing axes kept, a remainder, and tiles of padding that are not computed."""
    x, ids = jnp.arange(40.0).reshape(20, 2), jnp.arange(20)
    run = jax.jit(lambda n: RowTiles(8)(lambda x, ids: (x + 1, ids[:, None] * 2), x, ids, num_rows=n))
    for n, computed in ((20, 20), (16, 16), (9, 16), (0, 0)):
        y, doubled = run(jnp.int32(n))
        assert y.shape == (20, 2) and doubled.shape == (20, 1)
        np.testing.assert_array_equal(y[:computed], x[:computed] + 1)
        np.testing.assert_array_equal(doubled[:computed, 0], ids[:computed] * 2)
        assert not np.any(y[computed:]) and not np.any(doubled[computed:])
