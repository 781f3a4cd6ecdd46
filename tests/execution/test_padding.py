"""Which matmuls of a step are told how many of their rows are padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.execution.model_functions import LayerKernels
from jaxserve.models.row_tiles import RowTiles, whole
from kernels.fused_matmul import cpu
from tests.dummy import SEVERAL_BUCKETS, dummy_model, make_engine
from tests.kernels.cpu_levels import needs_library

X, W = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)


@needs_library
@pytest.mark.parametrize("num_rows, map_rows, num_computed", [(3, whole, 3), (3, RowTiles(8), 8), ([3], whole, 8)])
def test_rows_that_are_counted(num_rows, map_rows, num_computed):
    """Tiles have rows of their own, and groups of devices are counted one by one: there all are computed."""
    fused = LayerKernels(matmul="cpu").fused_of(jnp.asarray(num_rows, jnp.int32), map_rows)
    assert fused is not None
    assert (np.asarray(fused.matmul(jnp.asarray(X), jnp.asarray(W)))[:, 0] != 0).sum() == num_computed


def test_xla_has_nothing_to_count():
    assert LayerKernels(matmul="xla").fused_of(jnp.int32(3), whole) is None


@needs_library
def test_every_matmul_of_a_step_leaves_padding_out(monkeypatch):
    """Of layers and of the head, in every program that is compiled."""
    given, matmul = list[bool](), cpu.matmul

    def counted(*arrays: jax.Array | None, num_rows: jax.Array | None = None, **options) -> jax.Array:
        given.append(num_rows is not None)
        return matmul(*arrays, num_rows=num_rows, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(cpu, "matmul", counted)
    engine = make_engine(dummy_model(transposed=True), bucket_plan=SEVERAL_BUCKETS, matmul_backend="cpu", compile_anew="all")
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(given) >= 2 * 4 + 1 and all(given)
