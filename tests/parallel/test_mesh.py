"""Meshes that an engine can't run on are refused with what to do, and options that several devices don't have."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve import LLM, EngineConfig
from jaxserve.engine.sharding import model_shards
from jaxserve.parallel.mesh import make_mesh, stage_meshes
from tests.dummy import CONFIG


def mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices() * 8, object)[: int(np.prod(list(axes.values())))]
    return Mesh(devices.reshape(list(axes.values())), tuple(axes))


def test_one_device_needs_no_mesh():
    assert make_mesh(1) is None
    assert make_mesh(1, mesh(tp=1)) is None and make_mesh(1, mesh(fsdp=1, tp=1)) is None


@pytest.mark.parametrize(
    ("size", "axes", "kind", "message"),
    [
        (99, None, ValueError, r"tensor_parallel_size=99 needs 99 devices, and this process has \d+ \(cpu\)"),
        (1, {"model": 1}, ValueError, "mesh has the axes model=1; it needs one named 'tp'"),
        (3, {"tp": 1}, ValueError, "tensor_parallel_size=3 contradicts the mesh, whose axis 'tp' has 1"),
    ],
)
def test_what_can_not_be_is_refused(size, axes, kind, message):
    with pytest.raises(kind, match=message):
        make_mesh(size, axes and mesh(**axes))


def test_a_missing_device_is_told_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="tensor_parallel_size=99 needs 99 devices"):
        model_shards(CONFIG, EngineConfig(tensor_parallel_size=99))
    with pytest.raises(ValueError, match="tensor_parallel_size=0 must be an integer >= 1"):
        LLM(tmp_path, tensor_parallel_size=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (3, 1),
            "pipeline_parallel_size=3 with tensor_parallel_size=1, 3 devices, must be a multiple of the number of hosts, and there",
        ),
        ((2, 4), "pipeline_parallel_size=2 with tensor_parallel_size=4, 8 devices, must be .* 2 hosts with 4 devices"),
        ((1, 3), "^tensor_parallel_size=3 must be a multiple of the number of hosts"),
    ],
)
def test_hosts_have_equally_many_of_all_stages_devices(sizes, message, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(process_index=i // 2) for i in range(4)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        stage_meshes(*sizes, all_hosts=True)
