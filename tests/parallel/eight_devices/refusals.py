"""What an engine on several devices is not asked for, or is refused by name."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxserve import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.sharding import model_shards
from jaxserve.parallel.mesh import make_mesh
from kernels import gpu
from tests.dummy import CONFIG, SETTINGS, Ask, dummy_model, stages
from tests.parallel.models import GREEDY, PROMPTS, answers, engine_of


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"tensor_parallel_size": 9}, ValueError, "tensor_parallel_size=9 needs 9 devices, and this process has 8"),
        ({"tensor_parallel_size": 5}, ValueError, "tensor_parallel_size=5 must divide the model's intermediate_size=48"),
        ({"tensor_parallel_size": 2, "graph_collectives": True}, ValueError, "graph_collectives=True is of GPUs' programs"),
        ({"graph_collectives": True}, ValueError, "graph_collectives=True is of several devices, and tensor_parallel_size=1"),
        ({"tensor_parallel_size": 2, "all_reduce_backend": "mosaic"}, NotImplementedError, "compute capability 9.0, found cpu"),
        ({"all_reduce_backend": "xla"}, ValueError, "all_reduce_backend='xla' is of several devices, and tensor_parallel_size=1"),
    ],
)
def test_options_that_can_not_be_had(settings, kind, message):
    with pytest.raises(kind, match=message):
        Engine(dummy_model(), EngineConfig(**SETTINGS, **settings))


def test_a_mesh_has_one_axis_that_counts():
    devices = np.array(jax.devices())
    with pytest.raises(NotImplementedError, match="fsdp=2, tp=4; an engine runs on 'tp' alone"):
        make_mesh(1, Mesh(devices.reshape(2, 4), ("fsdp", "tp")))
    with pytest.raises(ValueError, match="the axes x=8; it needs one named 'tp'"):
        make_mesh(1, Mesh(devices, ("x",)))
    with pytest.raises(ValueError, match="tensor_parallel_size=4 contradicts the mesh, whose axis 'tp' has 2"):
        model_shards(CONFIG, EngineConfig(tensor_parallel_size=4), Mesh(devices[:2], ("tp",)))


def test_the_kernel_of_sums_is_for_the_first_devices_in_their_order():
    """JAX numbers the devices of a kernel so."""
    devices = np.array(jax.devices())
    config = EngineConfig(tensor_parallel_size=2, all_reduce_backend="mosaic")
    with gpu.assume_sm90(132, "NVIDIA H100 80GB HBM3"):
        shards, _ = model_shards(CONFIG, config, Mesh(devices[:2], ("tp",)))
        assert shards is not None and shards.shard.all_reduce == "mosaic"
        with pytest.raises(NotImplementedError, match=r"the mesh has the devices \[3, 2\] of processes \[0\]: use 'xla'"):
            model_shards(CONFIG, config, Mesh(devices[3:1:-1], ("tp",)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_an_engine_runs_on_the_devices_of_a_mesh(kind):
    devices = jax.devices()[3:1:-1]
    mesh = Mesh(np.array(devices).reshape(1, 2), ("replica", "tp"), axis_types=(kind, kind))
    engine = engine_of(dummy_model(), 1, mesh=mesh)
    assert engine.config.engine.tensor_parallel_size == 2
    assert {s.device for s in stages(engine)[0].state.kv_pages[0].addressable_shards} == set(devices)
    asks = [Ask(PROMPTS[1], GREEDY)]
    assert answers(engine, asks) == answers(engine_of(dummy_model(), 2), asks)
