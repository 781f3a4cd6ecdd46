"""Over which devices an engine's model is cut, and what of its options such an engine does not do yet.

Owns the refusals of options beside tensor_parallel_size. The mesh is parallel/mesh.py's, the cut models/shards.py's.
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.hosts.group import HostGroup
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.parallel.mesh import make_mesh
from kernels.all_reduce import resolve_backend as resolve_all_reduce


def model_shards(
    model: ModelConfig, config: EngineConfig, mesh: Mesh | None = None, hosts: HostGroup | None = None
) -> tuple[ModelShards | None, EngineConfig]:
    """How the model lies on the devices that the config or the mesh asks for, None for JAX's default device alone; and the config
    with their number in it. hosts: the group whose devices all share the model.

    Raises:
      ValueError: as `make_mesh` and `ModelShards`.
      NotImplementedError: an option that an engine of several devices does not have; the message names it.
    """
    made = make_mesh(config.tensor_parallel_size, mesh, all_hosts=hosts is not None)
    if made is None:
        check_sharding(config)
        return None, config
    config = replace(config, tensor_parallel_size=made.size)
    check_sharding(config)
    whole_sums = config.deterministic == "always"
    return ModelShards(model, made, _all_reduce(config.all_reduce_backend, made), whole_sums=whole_sums), config


def _all_reduce(backend: str, mesh: Mesh) -> str:
    """The backend of sums over the mesh. NotImplementedError, ValueError where a kernel can't."""
    found = resolve_all_reduce(backend)
    ids, processes = ([getattr(device, name) for device in mesh.devices.flat] for name in ("id", "process_index"))
    if found == "mosaic" and (ids != list(range(mesh.size)) or len(set(processes)) > 1):
        raise NotImplementedError(
            f"all_reduce_backend='mosaic' needs the first {mesh.size} devices of one process, in their order, and the mesh has the "
            f"devices {ids} of processes {sorted(set(processes))}: use 'xla'"
        )
    return found


def check_sharding(config: EngineConfig) -> None:
    """NotImplementedError, or ValueError, for an option that can't be had beside the config's tensor_parallel_size."""
    if config.tensor_parallel_size == 1:
        if config.graph_collectives:
            raise ValueError("graph_collectives=True is of several devices, and tensor_parallel_size=1: leave it out")
        if config.all_reduce_backend != "auto":
            given = f"all_reduce_backend={config.all_reduce_backend!r}"
            raise ValueError(f"{given} is of several devices, and tensor_parallel_size=1: leave it out")


def local_part(model: Decoder | ShardedModel) -> ModelConfig:
    """What one device computes with."""
    return model.shards.local if isinstance(model, ShardedModel) else model.config
