"""The engine's own programs for a GPU that is not there: which there are, compiled and held to verdicts.py.

Owns the way from a model's config to abstract weights, a resolved plan and its programs. Nothing is allocated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.cli.common.bench_models import RANDOM
from scripts.aot.compiled_report import CompiledReport
from scripts.aot.compiler import Compiler, arch_of, device_of, smem_limit_of, target_fact
from scripts.aot.equal_bits import order_faults
from scripts.aot.verdicts import (
    ATTENTION_OP,
    FUSED_OP,
    PORTABLE_OP,
    ROTARY_OP,
    MemoryFit,
    StepDemands,
    body_faults,
    head_faults,
    kernel_faults,
    update_faults,
    variant_faults,
)

OPS = {"mosaic_sm90": ATTENTION_OP, "mosaic_portable": PORTABLE_OP}  # what does a layer's attention, by its backend


def read_config(model: str) -> Any:
    """The ModelConfig of a preset, or of a folder with a config.json (or that file).

    Raises ValueError for neither, NotImplementedError for an architecture that is not supported.
    """
    from jaxserve.models import ModelConfig

    if model in RANDOM:
        return ModelConfig.from_hf(RANDOM[model])
    path = Path(model)
    if not (path / "config.json").exists() and not path.is_file():
        raise ValueError(f"{model=} is neither one of {', '.join(RANDOM)} nor a folder with a config.json")
    return ModelConfig.from_hf(path)


def split_fraction(model: str, default: float) -> tuple[str, float]:
    """("NAME@SHARE", default) -> (NAME, SHARE); ("NAME", default) -> (NAME, default). ValueError for no share in (0, 1]."""
    name, at, share = model.rpartition("@")
    fraction = float(share) if at else default
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction} must be a share in (0, 1]")
    return (name if at else model), fraction


@dataclass(frozen=True)
class AbstractStep:
    """A model and plan on a target: the programs, from shapes alone, and how the device's memory is shared out beside them.

    resolve: (temp_bytes=what is set aside for programs) -> ResolvedConfig. programs: those of a config for which nothing was, as
    the engine takes them to learn what they need.
    """

    programs: Any
    resolve: Callable[..., Any]
    device_bytes: int
    limit_bytes: int
    target: str

    @classmethod
    def make(cls, model: Any, options: dict[str, Any], target: str, memory_fraction: float, mesh: Any = None) -> AbstractStep:
        """model: a ModelConfig. options: EngineConfig's. memory_fraction: the share of the device that the process may allocate.
        mesh: of the devices that share the model, where the options ask for several.

        Raises ValueError as `resolve_config`: limits that contradict each other or the memory; NotImplementedError for an
        attention backend that can't.
        """
        import jax.numpy as jnp

        from jaxserve.config import EngineConfig
        from jaxserve.engine.kernel_choice import choose_kernels
        from jaxserve.engine.resolution import model_functions
        from jaxserve.engine.sharding import model_shards
        from jaxserve.execution.programs import Programs
        from jaxserve.execution.resolved_config import resolve_config
        from jaxserve.models import Decoder
        from jaxserve.models.shards import ShardedModel
        from kernels import gpu

        config = EngineConfig(**options)
        dtype = (model.dtype or "bfloat16") if config.dtype == "auto" else config.dtype
        device = int(target_fact(target, "device_memory_size"))
        limit = int(memory_fraction * device)
        with gpu.assume(device_of(target)):
            shards, config = model_shards(model, config, mesh)
            if shards is None:
                local, whole = model, Decoder.abstract(model, jnp.dtype(dtype))
            else:
                form: dict[str, Any] = {"dtype": jnp.dtype(dtype), "transposed": False}
                local, whole = shards.local, ShardedModel(shards, shards.module(**form), shards.abstract(**form))
            kernels = choose_kernels(local, jnp.dtype(dtype), replace(config, skip_qualification=True))
            functions = model_functions(whole, config, kernels.layer)
            resolve = functools.partial(
                resolve_config,
                config,
                model,
                kv_dtype=functions.dtype,
                platform="gpu",
                device_limit=limit,
                attention_backend=kernels.attention,
                weight_bytes=functions.num_bytes,
                local=local,
            )
            return cls(Programs(functions, resolve()), resolve, device, limit, target)

    @property
    def config(self) -> Any:
        return self.programs.config

    def fit(self, reserve: int) -> MemoryFit:
        """The pool and the max_model_len that the engine takes once it knows that programs need `reserve` bytes.

        Raises ValueError as `resolve_config`, where the engine would refuse.
        """
        from jaxserve.sampling.edit_rows import EditLayout

        reserve += self.programs.draft_bytes
        config = self.resolve(temp_bytes=reserve)
        engine, limits, page_size = config.engine, config.scheduler, config.cache.page_size
        longest = engine.max_model_len or config.model.max_position_embeddings  # before the pool shortens it
        return MemoryFit(
            device=self.device_bytes,
            limit=self.limit_bytes,
            utilization=engine.gpu_memory_utilization,
            weights=self.programs.functions.num_bytes,
            reserve=reserve,
            edits=limits.max_num_seqs * EditLayout(limits.max_model_len, config.model.vocab_size).row_bytes,
            page=config.pages.page_bytes,
            page_size=page_size,
            num_pages=config.cache.num_pages,
            wanted_pages=limits.max_num_seqs * math.ceil(longest / page_size),
            max_model_len=limits.max_model_len,
        )

    def select(self, names: Iterable[str]) -> list[Any]:
        """Buckets by name: "8" is a decode bucket, "256x128" a mixed one, "all" is all. ValueError for one that the plan lacks."""
        plan = self.config.plan
        known = {(str(b.seqs) if b.max_q_len == 1 else f"{b.tokens}x{b.seqs}"): b for b in plan.buckets}
        if list(names) == ["all"]:
            return list(plan.buckets)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"buckets {unknown} are not in the plan; it has {', '.join(known)}")
        return [known[name] for name in names]

    def default_buckets(self) -> list[Any]:
        """The smallest decode bucket, whose step is shortest, the largest with drafts, if any has, and the largest mixed one, which
        needs the most memory."""
        plan = self.config.plan
        decodes = [b for b in plan.buckets if b.max_q_len == 1]
        drafts = [b for b in plan.buckets if b.max_q_len > 1 and not b.is_mixed]
        return [*decodes[:1], *drafts[-1:], plan.buckets[-1]]


@dataclass
class StepResult:
    """fit: None where the engine would refuse to start, which is the last fault then."""

    reports: list[CompiledReport]
    fit: MemoryFit | None
    faults: list[str]
    config: Any


def check_step(step: AbstractStep, compiler: Compiler, buckets: list[Any], on_report: Any = lambda report: None) -> StepResult:
    """Compiles these buckets' bodies, the smallest and largest heads, scoring and the state's update, and says what is wrong with
    them.

    The largest body, the largest head and scoring decide how much memory the plan must set aside.
    """
    from jaxserve.execution.memory import reserve_bytes
    from jaxserve.execution.programs import ProgramKey, gpu_compiler_options, name_of

    plan, config, programs = step.config.plan, step.config, step.programs
    heads = [(plan.head_rows[0], False), (plan.max_head_rows, True)]

    def compile_one(key: ProgramKey) -> CompiledReport:
        options = gpu_compiler_options(config.deterministic, config.engine.graph_collectives)
        return _compile(compiler, on_report, name_of(key), options, *programs.spec(key))

    bodies = {b: compile_one(b) for b in dict.fromkeys([*buckets, plan.buckets[-1]])}
    tops = {h: compile_one(h) for h in dict.fromkeys(heads)}
    score, update = compile_one("score"), compile_one("update")
    reserve = reserve_bytes(r.temp_bytes for r in (bodies[plan.buckets[-1]], tops[heads[-1]], score))
    shard = programs.functions.shard
    demands = StepDemands(
        num_layers=config.pages.num_layers,
        kv_layer_shape=config.pages.layer(config.cache.num_pages),
        pool_bytes=config.pool_bytes,
        temp_bytes=reserve,
        num_sums=0 if shard.is_alone else 1 if shard.whole_sums else 2 * config.pages.num_layers + 1,
        num_gathers=4 * config.pages.num_layers if shard.whole_sums else 0,
        one_graph=programs.functions.shards is None or config.engine.graph_collectives,
    )
    attention = OPS.get(config.attention_backend)
    others = _calls(programs.functions.kernels, config.model) if attention is not None else {}
    faults: list[str] = []
    for report in bodies.values():
        faults += body_faults(report, demands, attention, others)
    for report in (*tops.values(), score):
        faults += head_faults(report, demands)
    faults += update_faults(update, demands)
    beside = [*tops.values(), score, update]
    for report in (*bodies.values(), *beside):
        ours = [k for k in report.kernels if k.source == "mosaic"]
        faults += variant_faults(report, compiler.mosaic_kernels)
        faults += kernel_faults(ours, smem_limit=smem_limit_of(step.target), where=report.name, arch=arch_of(step.target))
    reports = [*bodies.values(), *beside]
    if config.deterministic == "always":  # a row is computed in any of the bodies, and sampled in any of the heads
        kernels = programs.functions.kernels
        for same, ours in ((bodies, kernels.matmul == "mosaic_sm90" and kernels.fuse_residuals), (tops, False)):
            orders = {report.name: report.order for report in same.values() if report.order is not None}
            faults += order_faults(orders, ours=ours)
    try:
        fit = step.fit(reserve)
    except ValueError as error:  # the engine's own words
        return StepResult(reports, None, [*faults, str(error)], config)
    return StepResult(reports, fit, faults + fit.faults, config)


def _calls(kernels: Any, model: Any) -> dict[str, int]:
    """How often a body calls a kernel of ours beside attention and experts."""
    found, dense = {}, model.num_layers - len(model.sparse_layers)
    if kernels.rotary == "mosaic":
        found[ROTARY_OP] = model.num_layers
    if kernels.matmul == "mosaic_sm90":  # qkv_proj and gate_up_proj; o_proj and down_proj with what they are added to
        found[FUSED_OP] = (model.num_layers + dense) * (2 if kernels.fuse_residuals else 1)
    return found


def _compile(
    compiler: Compiler, on_report: Any, name: str, options: Any, function: Any, donate: tuple[int, ...], args: Any
) -> CompiledReport:
    report = compiler.compile(name, function, args, donate=donate, options=options)
    on_report(report)
    return report
