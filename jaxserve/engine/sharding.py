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
    return ModelShards(model, made), config


def check_sharding(config: EngineConfig) -> None:
    """NotImplementedError, or ValueError, for an option that can't be had beside the config's tensor_parallel_size."""
    if config.tensor_parallel_size == 1:
        if config.graph_collectives:
            raise ValueError("graph_collectives=True is of several devices, and tensor_parallel_size=1: leave it out")
        return
    several = f"tensor_parallel_size={config.tensor_parallel_size}"
    if config.deterministic == "always":
        raise NotImplementedError(f"deterministic='always' is for one device, and {several}: use 'bucket', or one device")


def local_part(model: Decoder | ShardedModel) -> ModelConfig:
    """What one device computes with."""
    return model.shards.local if isinstance(model, ShardedModel) else model.config
