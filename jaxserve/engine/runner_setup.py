"""What an engine runs on, made from a model and a config: kernels chosen, everything decided, programs, and a runner.

Owns the order in which that is made, the same on every host of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, File, options
from jaxserve.engine.drafting import Draft, DraftFiles, attention_config, draft_functions
from jaxserve.engine.kernel_choice import KernelChoice, choose_kernels, decide_deterministic, qualify_kernels
from jaxserve.engine.resolution import model_functions, resolve
from jaxserve.engine.sharding import check_sharding, local_part, model_shards
from jaxserve.execution import host_memory
from jaxserve.execution.compilation import compile_counts, compile_side_by_side, use_persistent_cache
from jaxserve.execution.leading_runner import AnyRunner, LeadingRunner
from jaxserve.execution.model_functions import weights_dtype
from jaxserve.execution.pipeline_programs import make_programs
from jaxserve.execution.pipeline_runner import make_runner
from jaxserve.execution.resolved_config import ResolvedConfig
from jaxserve.execution.warm_up import BackgroundWarmUp
from jaxserve.hosts.group import HostGroup
from jaxserve.models import Decoder
from jaxserve.models.files import ModelFiles
from jaxserve.models.shard_placement import shard_model
from jaxserve.models.shards import ModelShards, ShardedModel, local_config
from jaxserve.qualification.qualify import Qualification

_PACKAGES = ("jaxserve", "jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
# Which files of a host's own may say. What they decide is compared.
_OWN_OPTIONS = ("compilation_cache_dir", "demand_log", "step_times", "bucket_plan")


@dataclass(frozen=True)
class RunnerSetup:
    """A runner and what was decided for it. warm_up: of the programs behind the steps, where the config wants that."""

    kernels: KernelChoice
    config: ResolvedConfig
    runner: AnyRunner
    warm_up: BackgroundWarmUp | None


def set_up_runner(
    model: Decoder | ShardedModel,
    config: EngineConfig,
    mesh: Mesh | None,
    hosts: HostGroup | None,
    is_busy: Callable[[], bool],  # whether requests run; called on the compiling thread
    qualification: Qualification | None = None,
    draft: Draft | None = None,
) -> RunnerSetup:
    """Arguments and errors as those of `Engine`; ValueError too where hosts disagree."""
    use_persistent_cache(config.compilation_cache_dir)
    compile_counts()  # from here on they are counted
    shards, config = model_shards(model.config, config, mesh, hosts)
    if shards is not None and not isinstance(model, ShardedModel):
        model = shard_model(model, shards)
    part, dtype = local_part(model), weights_dtype(model)
    config = decide_deterministic(part, dtype, config)
    kernels = choose_kernels(part, dtype, config, qualification, attention_config(draft))
    functions = model_functions(model, config, kernels.layer)
    if draft is not None:
        functions.draft = draft_functions(draft, config, functions)
    resolved = resolve(functions, config, kernels.attention, hosts)
    programs = make_programs(functions, resolved)
    if hosts is not None:
        _check_decisions(hosts, resolved, kernels)
        hosts.awaits_compile = lambda: programs.num_awaited > 0
    warm_up: BackgroundWarmUp | None = None
    if config.warm_up == "all":  # from shapes, before the pool takes the memory that compiling may need
        compile_side_by_side(programs.get, programs.keys)
    elif config.warm_up == "background":
        warm_up = BackgroundWarmUp(programs, is_busy)
        warm_up.compile_first()
    if hosts is not None:
        hosts.exchange(None)  # whatever each had to compile, all are here before they first wait for one another in XLA
    with contextlib.nullcontext() if hosts is None else hosts.at_work():
        runner = make_runner(programs, hosts)
    if hosts is not None and hosts.leads:
        runner = LeadingRunner(runner, hosts)
    return RunnerSetup(kernels, resolved, runner, warm_up)


def prepare(
    files: ModelFiles, config: EngineConfig, mesh: Mesh | None, hosts: HostGroup | None, draft: DraftFiles | None = None
) -> tuple[ModelShards | None, EngineConfig, Qualification | None]:
    """What comes before the weights: how they are cut, the config with the number of devices in it, and what this card's kernels
    are worth, tried while JAX has not taken the device's memory. The same on every host. draft: what drafts, if a checkpoint does.
    On a CPU threads that begin from then on share a heap. Errors as those of `Engine`."""
    host_memory.share_heap()
    qualification = None
    if mesh is None:
        check_sharding(config)
        several = config.tensor_parallel_size > 1
        part = local_config(files.config, config.tensor_parallel_size, config.attention_groups) if several else files.config
        dtype = files.dtype(config.dtype)
        qualification = qualify_kernels(part, dtype, config, ask_jax=False, draft=attention_config(draft))
    if hosts is not None:
        check_hosts(hosts, files, config)
    shards, config = model_shards(files.config, config, mesh, hosts)
    return shards, config, qualification


def check_hosts(hosts: HostGroup, files: ModelFiles, config: EngineConfig) -> None:
    """All hosts must have the same versions, model and options, those that name files of their own aside: ValueError if not, on
    every host. All of them call it, before anything that takes long."""
    facts: dict[str, Any] = {name: package_version(name) for name in _PACKAGES}
    facts |= {f"the model's {field.name}": getattr(files.config, field.name) for field in fields(files.config)}
    facts["the fingerprint of the weights' files"] = files.fingerprint()
    facts |= {name: str(getattr(config, name)) for name, (_, option) in options().items() if not isinstance(option, File)}
    hosts.agree({name: value for name, value in facts.items() if name not in _OWN_OPTIONS})


def package_version(package: str) -> str | None:
    """Of the installed distribution; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _check_decisions(hosts: HostGroup, config: ResolvedConfig, kernels: KernelChoice) -> None:
    """The same of what was decided from them and the devices."""
    decided: dict[str, Any] = {
        "num_pages": config.cache.num_pages,
        "buckets": str(config.plan),
        "max_model_len": config.scheduler.max_model_len,
    }
    decided["device"] = jax.local_devices()[0].device_kind
    hosts.agree({**decided, "attention": kernels.attention, "kernels of a layer": str(kernels.layer)})
