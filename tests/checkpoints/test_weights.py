"""Loading by key table: values, dtypes, shardings, and the account of what does not fit."""

import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints.weights import Source, WeightsError, load_weights


class Arrays:
    """A checkpoint of arrays in memory that counts its reads and how many of the arrays it gave out are alive."""

    def __init__(self, **arrays):
        self.arrays = arrays
        self.num_reads = 0
        self.alive = 0
        self.most_alive = 0

    def keys(self):
        return self.arrays.keys()

    def shape(self, key):
        return self.arrays[key].shape

    def dtype(self, key):
        return str(self.arrays[key].dtype)

    def read(self, key):
        self.num_reads += 1
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        array = self.arrays[key].copy()
        weakref.finalize(array, self._forget)
        return array

    def _forget(self):
        self.alive -= 1


def only(arrays):
    return arrays[0]


def transposed(arrays):
    return np.concatenate(arrays).T


def spec(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_fuses_in_key_order_and_transposes():
    q, k = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.array([[10, 11, 12]], np.float32)
    loaded = load_weights(
        Arrays(q=q, k=k, n=np.array([7, 8], np.float32)),
        {"norm/scale": spec(2), "qk/kernel": spec(3, 3)},
        {"qk/kernel": Source(("q", "k"), transposed), "norm/scale": Source(("n",), only)},
    )
    assert list(loaded) == ["norm/scale", "qk/kernel"]
    np.testing.assert_array_equal(loaded["qk/kernel"], [[0, 3, 10], [1, 4, 11], [2, 5, 12]])
    np.testing.assert_array_equal(loaded["norm/scale"], [7, 8])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_casts_every_float_dtype_to_every_other(stored, wanted):
    values = np.array([0.5, -3.0, 0.0, 1024.0]).astype(stored)  # exact in all of them
    loaded = load_weights(Arrays(w=values), {"w": spec(4, dtype=wanted)}, {"w": Source(("w",), only)})["w"]
    assert loaded.dtype == wanted
    assert loaded.tolist() == [0.5, -3.0, 0.0, 1024.0]


def test_cast_rounds_to_nearest_even():
    # bfloat16 keeps 7 bits after the leading one: 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway between neighbours.
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)], np.float32)
    loaded = load_weights(Arrays(w=values), {"w": spec(4, dtype=jnp.bfloat16)}, {"w": Source(("w",), only)})["w"]
    assert loaded.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_a_tensor_may_feed_two_parameters():
    table = {"embedding": Source(("e",), only), "lm_head": Source(("e",), transposed)}
    loaded = load_weights(Arrays(e=np.ones((3, 2), np.float32)), {"embedding": spec(3, 2), "lm_head": spec(2, 3)}, table)
    assert loaded["lm_head"].shape == (2, 3)


def test_every_problem_is_listed_with_names_and_shapes_and_nothing_is_read():
    reader = Arrays(
        good=np.ones(2, np.float32),
        wide=np.ones((2, 5), np.float32),
        a=np.ones((2, 3), np.float32),
        b=np.ones((2, 4), np.float32),
        eight=np.ones(2, ml_dtypes.float8_e4m3fn),
        whole=np.ones(2, np.int32),
        extra=np.ones((9,), np.float32),
        other=np.ones(1, np.float32),
    )
    table = {
        "good": Source(("good",), only),
        "norm": Source(("wide",), only),
        "fused": Source(("a", "b"), lambda arrays: np.concatenate(arrays, axis=0)),
        "gone": Source(("absent_1", "absent_2"), transposed),
        "eight": Source(("eight",), only),
        "whole": Source(("whole",), only),
    }
    shapes = {"good": (2,), "norm": (5, 2), "fused": (4, 3), "gone": (1,), "eight": (2,), "whole": (2,)}
    with pytest.raises(WeightsError) as caught:
        load_weights(reader, {path: spec(*shape) for path, shape in shapes.items()}, table, ignore=("oth.*",))
    lines = str(caught.value).splitlines()
    assert "7 problems" in lines[0] and len(lines) == 8
    assert lines[1:3] == ["  missing: absent_1 (for gone)", "  missing: absent_2 (for gone)"]
    assert lines[3].startswith("  dtype: eight is float8_e4m3fn;") and lines[4].startswith("  dtype: whole is int32;")
    assert lines[5] == "  shape: norm expects (5, 2); found wide (2, 5), which makes (2, 5)"
    assert lines[6].startswith("  shape: fused expects (4, 3); found a (2, 3), b (2, 4), which do not go together")
    assert lines[7] == "  unused: extra (9,) has no place in the model"
    assert reader.num_reads == 0


def test_ignore_matches_whole_names_only():
    reader = Arrays(w=np.ones(1, np.float32), inv_freq=np.ones(1, np.float32), inv_freq2=np.ones(1, np.float32))
    load = ({"w": spec(1)}, {"w": Source(("w",), only)})
    with pytest.raises(WeightsError, match="unused: inv_freq2"):
        load_weights(reader, *load, ignore=("inv_freq",))
    assert load_weights(reader, *load, ignore=("inv_freq", "inv_.*2"))["w"].tolist() == [1.0]


def test_abstract_and_table_must_name_the_same_paths():
    with pytest.raises(ValueError, match=r"only in abstract: \['a'\], only in table: \['b'\]"):
        load_weights(Arrays(), {"a": spec(1)}, {"b": Source(("b",), only)})


def test_one_parameter_at_a_time_is_on_the_host():
    # float16 to float32, so that the arrays read are not themselves kept as the CPU's device buffers.
    parts = {f"w{i}": np.full((4, 4), i, np.float16) for i in range(12)}
    reader = Arrays(**parts)
    table = {f"p{i}": Source((f"w{2 * i}", f"w{2 * i + 1}"), transposed) for i in range(6)}
    loaded = load_weights(reader, {path: spec(4, 8) for path in table}, table)
    assert reader.num_reads == 12 and reader.most_alive == 2 and reader.alive == 0
    assert loaded["p5"][0].tolist() == [10] * 4 + [11] * 4


def test_progress_is_told_after_each_parameter(capsys):
    reader = Arrays(a=np.ones(1, np.float32), b=np.ones(1, np.float32))
    load = (reader, {"x": spec(1), "y": spec(1)}, {"x": Source(("a",), only), "y": Source(("b",), only)})
    seen = []
    load_weights(*load, progress=lambda *args: seen.append(args))
    assert seen == [("x", 1, 2), ("y", 2, 2)]
    load_weights(*load)
    assert capsys.readouterr().err == ""
    load_weights(*load, progress=True)
    assert "2/2" in capsys.readouterr().err


_SHARDED = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from checkpoints.weights import Source, load_weights

class Reader:
    def keys(self): return ["w"]
    def shape(self, key): return (6, 4)
    def dtype(self, key): return "float32"
    def read(self, key): return np.arange(24, dtype=np.float32).reshape(6, 4)

mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
sharding = NamedSharding(mesh, P("y", "x"))
abstract = {"w": jax.ShapeDtypeStruct((4, 6), np.float16, sharding=sharding)}
w = load_weights(Reader(), abstract, {"w": Source(("w",), lambda arrays: arrays[0].T)})["w"]
assert w.sharding == sharding and w.dtype == np.float16, w.sharding
full = np.arange(24).reshape(6, 4).T
for i, row in enumerate(mesh.devices):
    for j, device in enumerate(row):
        (shard,) = [s for s in w.addressable_shards if s.device == device]
        assert np.array_equal(shard.data, full[2 * j : 2 * j + 2, 3 * i : 3 * i + 3]), (i, j, shard.data)
print("placed")
"""


def test_places_shards_on_their_devices():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run([sys.executable, "-c", _SHARDED], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "placed\n"
