"""Over which devices an engine's model is cut, and what of its options such an engine does not do yet.

Owns the refusals of options beside tensor_parallel_size and pipeline_parallel_size. The meshes are parallel/mesh.py's, the cut
models/shards.py's.
"""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.hosts.group import HostGroup
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.shards import ModelShards, ShardedModel
from jaxserve.parallel.mesh import stage_meshes
from jaxserve.scheduling.policies import BATCHING_POLICIES
from kernels.all_reduce import resolve_backend as resolve_all_reduce


def model_shards(
    model: ModelConfig, config: EngineConfig, mesh: Mesh | None = None, hosts: HostGroup | None = None
) -> tuple[ModelShards | None, EngineConfig]:
    """How the model lies on the devices that the config or the mesh asks for, None for JAX's default device alone; and the config
    with their number and that of the stages in it. hosts: the group whose devices all share the model.

    Raises:
      ValueError: as `stage_meshes` and `ModelShards`.
      NotImplementedError: an option that an engine of several devices does not have; the message names it.
    """
    meshes = stage_meshes(config.pipeline_parallel_size, config.tensor_parallel_size, mesh, all_hosts=hosts is not None)
    if not meshes:
        check_sharding(config)
        return None, config
    config = replace(config, tensor_parallel_size=meshes[0].size, pipeline_parallel_size=len(meshes))
    check_sharding(config, 1 if hosts is None else hosts.num_hosts)
    whole_sums = config.deterministic == "always"
    all_reduce = [_all_reduce(config.all_reduce_backend, each) for each in meshes]
    how = {"whole_sums": whole_sums, "groups": config.attention_groups}
    return ModelShards(model, meshes[0], all_reduce[0], **how, later=meshes[1:]), config


def _all_reduce(backend: str, mesh: Mesh) -> str:
    """The backend of sums over the mesh; "auto" adds in one order on CPUs, however these are shared out over processes.
    NotImplementedError, ValueError where a backend can't."""
    ids, processes = ([getattr(device, name) for device in mesh.devices.flat] for name in ("id", "process_index"))
    if backend == "auto" and len(set(processes)) > 1 and mesh.devices.flat[0].platform == "cpu":
        backend = "in_order"
    found = resolve_all_reduce(backend)
    if found == "mosaic" and (ids != list(range(mesh.size)) or len(set(processes)) > 1):
        raise NotImplementedError(
            f"all_reduce_backend='mosaic' needs the first {mesh.size} devices of one process, in their order, and the mesh has the "
            f"devices {ids} of processes {sorted(set(processes))}: use 'xla'"
        )
    return found


def check_sharding(config: EngineConfig, num_hosts: int = 1) -> None:
    """NotImplementedError, or ValueError, for an option that can't be had beside the config's tensor_parallel_size and
    pipeline_parallel_size, or beside its attention_groups; or for those beside several hosts."""
    if config.tensor_parallel_size > 1 and config.speculative is not None and config.speculative.model is not None:
        raise NotImplementedError(
            f"speculative_config: method={config.speculative.method!r} runs on one device, and "
            f"tensor_parallel_size={config.tensor_parallel_size}: leave one of them out, or use method='ngram' or 'suffix'"
        )
    if config.pipeline_parallel_size > 1:
        _check_stages(config)
    if config.attention_groups > 1:
        _check_groups(config)
        if num_hosts > 1:
            raise NotImplementedError(
                f"attention_groups={config.attention_groups} is of one process's devices, and there are {num_hosts} hosts"
            )
    if config.tensor_parallel_size == 1:
        if config.graph_collectives:
            raise ValueError("graph_collectives=True is of several devices, and tensor_parallel_size=1: leave it out")
        if config.all_reduce_backend != "auto":
            given = f"all_reduce_backend={config.all_reduce_backend!r}"
            raise ValueError(f"{given} is of several devices, and tensor_parallel_size=1: leave it out")


def _check_stages(config: EngineConfig) -> None:
    stages = f"pipeline_parallel_size={config.pipeline_parallel_size}"
    if config.speculative_config is not None:
        raise NotImplementedError(f"speculative_config: drafts are not verified over stages, and {stages}: leave one of them out")
    if config.tbt_slo_ms is not None:
        raise NotImplementedError(f"tbt_slo_ms={config.tbt_slo_ms} needs a profile, which is of one stage, and {stages}")


def _check_groups(config: EngineConfig) -> None:
    groups = f"attention_groups={config.attention_groups}"
    if config.tensor_parallel_size % config.attention_groups:
        raise ValueError(f"{groups} must divide tensor_parallel_size={config.tensor_parallel_size}")
    refused = {
        f"pipeline_parallel_size={config.pipeline_parallel_size}": config.pipeline_parallel_size > 1,
        "speculative_config": config.speculative_config is not None,
        f"tbt_slo_ms={config.tbt_slo_ms}": config.tbt_slo_ms is not None,
        f"demand_log={str(config.demand_log)!r}": config.demand_log is not None,
        "deterministic='always'": config.deterministic == "always",
        "prompts that are not chunked": not _chunks_prompts(config),
    }
    for what, is_asked in refused.items():
        if is_asked:
            raise NotImplementedError(f"{what} can't be had with {groups}: leave one of them out")


def _chunks_prompts(config: EngineConfig) -> bool:
    chunked = config.enable_chunked_prefill
    return BATCHING_POLICIES[config.batching_policy].chunked if chunked is None else chunked


def local_part(model: Decoder | ShardedModel) -> ModelConfig:
    """What one device computes with."""
    return model.shards.local if isinstance(model, ShardedModel) else model.config
