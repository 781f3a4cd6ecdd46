"""Versions of an Orbax checkpoint: exact, placed as asked, listed where they don't fit, and intact whenever a save is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from checkpoints import orbax
from checkpoints.weights import WeightsError

ROOT = Path(__file__).parents[2]
LEAVES = {
    "embed_tokens/embedding": jnp.arange(24, dtype=jnp.bfloat16).reshape(6, 4) / 7,
    "layers/0/mlp/kernel": jnp.arange(32.0).reshape(4, 8) / 3,
    "layers/1/mlp/kernel": -jnp.arange(32.0).reshape(4, 8),
    "final_norm/scale": jnp.ones(4, jnp.float16),
}


def abstract(leaves=LEAVES) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in leaves.items()}


def test_a_round_trip_is_exact_and_files_lie_beside_it(tmp_path):
    version = orbax.save(tmp_path / "model", LEAVES, {"config.json": "{}", "templates/a.jinja": b"\xc3\xa9"})
    assert version == tmp_path / "model" / "1"
    assert (version / "config.json").read_text() == "{}" and (version / "templates/a.jinja").read_text() == "é"
    assert orbax.stored(version) == abstract()
    loaded = orbax.load(version, abstract())
    assert list(loaded) == list(LEAVES)
    chex.assert_trees_all_equal(loaded, LEAVES, strict=True)


def test_dtypes_are_cast_to_those_asked_for(tmp_path):
    version = orbax.save(tmp_path, LEAVES)
    wanted = {path: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for path, x in LEAVES.items()}
    cast = {path: x.astype(jnp.bfloat16) for path, x in LEAVES.items()}
    chex.assert_trees_all_equal(orbax.load(version, wanted), cast, strict=True)


def test_versions_are_numbered_and_the_newest_is_found(tmp_path):
    folder = tmp_path / "model"
    assert orbax.find_version(folder) is None
    first = orbax.save(folder, LEAVES)
    second = orbax.save(folder, LEAVES, keep=2)
    assert (first.name, second.name) == ("1", "2") and first.exists()
    assert orbax.find_version(folder) == second and orbax.find_version(first) == first
    third = orbax.save(folder, LEAVES)
    assert [path.name for path in folder.iterdir()] == ["3"] and orbax.find_version(folder) == third
    orbax.save(folder, {**LEAVES, "more": jnp.zeros(1)}, keep=8)
    for _ in range(6):
        (folder / f"{orbax.save(folder, {'x': jnp.zeros(1)}, keep=8).name}.partial").mkdir()
    assert orbax.find_version(folder) == folder / "10", "numbers are no text"


def test_what_does_not_fit_is_listed(tmp_path):
    version = orbax.save(tmp_path, LEAVES)
    wanted = abstract() | {"lm_head/kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    wanted["final_norm/scale"] = jax.ShapeDtypeStruct((5,), jnp.float16)
    del wanted["layers/0/mlp/kernel"]
    with pytest.raises(WeightsError) as error:
        orbax.load(version, wanted)
    assert [line.strip() for line in str(error.value).splitlines()] == [
        "the checkpoint does not fit the model (3 problems):",
        "missing: lm_head/kernel (4, 6)",
        "shape: final_norm/scale is (4,), the model expects (5,)",
        "unused: layers/0/mlp/kernel (4, 8) has no place in the model",
    ]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other things than checkpoints"):
        orbax.save(tmp_path, LEAVES)
    for leaves, keep in ((LEAVES, 0), ({}, 1)):
        with pytest.raises(ValueError, match="keep=|0 leaves"):
            orbax.save(tmp_path / "new", leaves, keep=keep)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "1" / "weights").mkdir(parents=True)
    with pytest.raises(WeightsError, match="cannot be read as an Orbax checkpoint"):
        orbax.load(tmp_path / "1", abstract())


TWO_DEVICES = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from checkpoints import orbax
mesh = jax.make_mesh((2,), ("model",))
specs = {"layers/0/mlp/kernel": P(None, "model"), "layers/1/mlp/kernel": P("model")}
stored = orbax.stored(sys.argv[1])
wanted = {
    path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs.get(path, P()))) for path, x in stored.items()
}
for path, x in orbax.load(sys.argv[1], wanted).items():
    assert x.sharding == wanted[path].sharding and len(x.sharding.device_set) == 2, path
    print(path, [s.data.shape for s in x.addressable_shards], float(np.asarray(x, np.float64).sum()))
orbax.save(sys.argv[2], orbax.load(sys.argv[1], wanted))
"""


def test_restored_onto_two_devices_and_back_onto_one(tmp_path):
    version = orbax.save(tmp_path / "one", LEAVES)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", TWO_DEVICES, str(version), str(tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "layers/0/mlp/kernel [(4, 4), (4, 4)]" in done.stdout and "layers/1/mlp/kernel [(2, 8), (2, 8)]" in done.stdout
    assert "final_norm/scale [(4,), (4,)] 4.0" in done.stdout
    chex.assert_trees_all_equal(orbax.load(tmp_path / "two" / "1", abstract()), LEAVES, strict=True)


SAVE_MUCH = """
import sys, numpy as np
from checkpoints import orbax
orbax.save(sys.argv[1], {f"layers/{i}/kernel": np.full((4, 1 << 20), i, np.float32) for i in range(24)})
"""


def test_a_save_that_is_killed_leaves_the_last_version(tmp_path):
    """Killed as soon as Orbax has begun to write, in a save of 400 MB; the next save clears what is left of it."""
    first = orbax.save(tmp_path, LEAVES)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    writer = subprocess.Popen([sys.executable, "-c", SAVE_MUCH, str(tmp_path)], cwd=ROOT, env=environment)
    partial, deadline = tmp_path / "2.partial", time.monotonic() + 120
    while not any(path.is_file() for path in partial.rglob("*")) and time.monotonic() < deadline and writer.poll() is None:
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    assert writer.wait() == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.partial"]
    assert orbax.find_version(tmp_path) == first
    chex.assert_trees_all_equal(orbax.load(first, abstract()), LEAVES, strict=True)
    assert orbax.save(tmp_path, LEAVES) == tmp_path / "2"
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
