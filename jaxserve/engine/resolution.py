"""An EngineConfig resolved against a model and the device at hand: what it means here.

Owns the questions to the device about its memory and to the profile of a dynamic budget. What
follows from the answers is execution/resolved_config.py's.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import EngineConfig
from jaxserve.execution.draft_functions import kv_bytes
from jaxserve.execution.model_functions import LayerKernels, ModelFunctions
from jaxserve.execution.page_transfer import transfer_bytes
from jaxserve.execution.pipeline_programs import make_programs
from jaxserve.execution.resolved_config import ResolvedConfig, resolve_config
from jaxserve.hosts.group import HostGroup
from jaxserve.models import transpose_kernels
from jaxserve.models.row_tiles import RowTiles, whole
from jaxserve.models.shard_placement import transpose_sharded
from jaxserve.models.shards import ShardedModel
from jaxserve.parallel.mesh import spans_hosts
from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE
from kernels.backends import FUSED_MATMUL, current_platform

if TYPE_CHECKING:
    from jaxserve.models import Decoder, ModelConfig
    from jaxserve.scheduling.step_budget import StepBudget
    from jaxserve.step_times.fitted import StepTimeModel

logger: logging.Logger = logging.getLogger("jaxserve")

ROW_TILE = 16  # rows that a CPU computes at once where bits must not follow the bucket


def model_functions(model: Decoder | ShardedModel, config: EngineConfig, kernels: LayerKernels) -> ModelFunctions:
    """The model taken apart for programs as the config wants them on JAX's default device. kernels: chosen ones.

    Where bits must not follow shapes, XLA computes on a CPU with transposed weights, of which it makes copies unless the model has
    them: with the weight on the left a column's bits do not depend on how many columns there are.
    """
    tiled = config.deterministic == "always" and current_platform() == "cpu"
    if tiled and FUSED_MATMUL[kernels.matmul].plain_xla:
        if isinstance(model, ShardedModel):
            model = transpose_sharded(model)
        elif not model.is_transposed:
            model = transpose_kernels(nnx.clone(model))
    return ModelFunctions(model, kernels, RowTiles(ROW_TILE) if tiled else whole)


def resolve(
    functions: ModelFunctions, config: EngineConfig, attention_backend: str, hosts: HostGroup | None = None
) -> ResolvedConfig:
    """The config with everything decided for this model on its devices, of which the fullest counts; of a pipeline's stages, the
    one that has room for the fewest pages. attention_backend: that is chosen, never "auto". hosts: the group whose fullest device
    counts.

    On a device that states its memory, the largest programs are compiled first, from shapes alone, to learn what they need beside
    weights and pages. Raises ValueError and NotImplementedError as `resolve_config`.
    """
    shards = functions.shards
    # Of other processes' devices no memory is known here; a stage may have no others.
    devices = [jax.local_devices()[:1]] if shards is None else [mesh.local_devices for mesh in shards.meshes]
    stats = [[device.memory_stats() or {} for device in each] for each in devices]
    limit = min((s["bytes_limit"] for each in stats for s in each if "bytes_limit" in s), default=None)
    in_use = [max((s.get("bytes_in_use", 0) for s in each), default=0) for each in stats]  # of each stage's devices
    if hosts is not None:
        limits, used = zip(*hosts.exchange((limit, in_use)), strict=True)
        limit, in_use = min((x for x in limits if x is not None), default=None), list(map(max, *used))
    draft_page_bytes = 0 if functions.draft is None else kv_bytes(functions.draft, 1, config.page_size or DEFAULT_PAGE_SIZE)
    decide_stage = functools.partial(
        resolve_config,
        config,
        functions.model_config,
        kv_dtype=functions.dtype,
        platform=jax.local_devices()[0].platform,
        device_limit=limit,
        attention_backend=attention_backend,
        local=None if shards is None else shards.local,
        draft_page_bytes=draft_page_bytes,
    )

    def decide(temp_bytes: int = 0) -> ResolvedConfig:
        found = []
        draft_weights = 0 if functions.draft is None else functions.draft.num_bytes
        for stage, used in zip(functions.stages, in_use, strict=True):
            weight_bytes = max(stage.num_bytes + draft_weights, used)  # what else the process holds is not ours to use
            found.append(decide_stage(num_layers=len(stage.layers), weight_bytes=weight_bytes, temp_bytes=temp_bytes))
        return min(found, key=lambda resolved: resolved.cache.num_pages)

    resolved = decide()
    if limit is not None and config.num_pages is None:
        programs = make_programs(functions, resolved)
        temp_bytes = programs.largest_temp_bytes() + programs.draft_bytes - resolved.cache.num_pages * draft_page_bytes
        if config.kv_store is not None:
            gathered = 1 if shards is None or not any(map(spans_hosts, shards.meshes)) else shards.size
            temp_bytes += transfer_bytes(resolved.pages.page_bytes, gathered)
        resolved = decide(temp_bytes if hosts is None else max(hosts.exchange(temp_bytes)))  # compilers may choose otherwise there
    return resolved


def check_options(config: EngineConfig, model: ModelConfig, dtype: Any, platform: str) -> None:
    """Raises what `resolve` and `step_budget` raise on this platform (as JAX calls it), however much memory there is and whatever
    "auto" is: before anything that takes long, while JAX may not have taken the device. dtype: of the weights."""
    resolved = resolve_config(
        config,
        model,
        kv_dtype=jnp.dtype(dtype),
        platform=platform,
        device_limit=2**60,
        attention_backend="mosaic_sm90" if config.attention_backend == "auto" and platform == "gpu" else None,
        weight_bytes=0,
    )
    if config.tbt_slo_ms is not None:
        _read_step_times(resolved)


_SHAPE = (
    *("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("num_experts", "num_experts_per_token", "moe_intermediate_size"),
)


def model_shape(config: ModelConfig) -> dict[str, int]:
    """The sizes by which a profile of step times knows its model."""
    return {name: getattr(config, name) for name in _SHAPE}


def step_budget(config: ResolvedConfig) -> StepBudget | None:
    """The dynamic budget that the config asks for; a warning if no step meets its objective. ValueError if the profile
    can't be used, or not with these pages, or is of a model of another shape, of another `deterministic` (where it says so) or of
    other devices."""
    if config.engine.tbt_slo_ms is None:
        return None
    from jaxserve.scheduling.step_budget import StepBudget

    limits, slo_ms = config.scheduler, config.engine.tbt_slo_ms
    budget = StepBudget(_read_step_times(config), config.plan, slo_ms / 1e3, limits.max_num_seqs, limits.max_num_batched_tokens)
    warn_of_objective(budget)
    return budget


def _read_step_times(config: ResolvedConfig) -> StepTimeModel:
    """The profile that the config names. ValueError if it can't be used with it."""
    from jaxserve.step_times.fitted import DEVICES, StepTimeModel

    assert config.engine.step_times is not None
    step_times = StepTimeModel.load(config.engine.step_times)
    if step_times.page_size != config.cache.page_size:
        raise ValueError(f"step_times was profiled with page_size={step_times.page_size}, not {config.cache.page_size}")
    level = step_times.about.get("deterministic", config.deterministic)
    if level != config.deterministic:
        raise ValueError(
            f"step_times was profiled with deterministic={level!r}, not {config.deterministic!r}: give deterministic={level!r}, or "
            "profile again"
        )
    step_times.check_devices({name: getattr(config.engine, name) for name in DEVICES})
    shape, profiled = model_shape(config.model), step_times.about.get("model_shape", {})
    others = [f"{name}={size} (here {shape.get(name)})" for name, size in profiled.items() if size != shape.get(name)]
    if others:
        raise ValueError(f"step_times is of another model, with {', '.join(others)}: profile this one with `jaxserve tune profile`")
    return step_times


def warn_of_objective(budget: StepBudget) -> None:
    """A warning if no step meets a dynamic budget's objective."""
    tokens, seconds = budget.least()
    if seconds > budget.objective:
        logger.warning(
            "tbt_slo_ms=%g: the fastest step of a decode and a part of a prompt, of %d tokens, takes %.3g ms by the profile, so "
            "every such step is late; raise it, or give a bucket_plan with smaller mixed buckets",
            1e3 * budget.objective,
            tokens,
            1e3 * seconds,
        )
