"""The engine's own programs for a GPU that is not there: which there are, compiled and held to verdicts.py.

Owns the way from a model's config to abstract weights, a resolved plan and its programs. Nothing is allocated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
    StageFit,
    StepDemands,
    body_faults,
    head_faults,
    kernel_faults,
    link_faults,
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

    resolve: (weight_bytes, num_layers and temp_bytes of a stage) -> ResolvedConfig. programs: those of a config for which nothing
    was set aside, as the engine takes them to learn what they need.
    """

    programs: Any
    resolve: Callable[..., Any]
    device_bytes: int
    limit_bytes: int
    target: str
    draft_page_bytes: int = 0  # of a page, beside the target's

    @classmethod
    def make(cls, model: Any, options: dict[str, Any], target: str, memory_fraction: float, mesh: Any = None) -> AbstractStep:
        """model: a ModelConfig. options: EngineConfig's. memory_fraction: the share of the device that the process may allocate.
        mesh: of the devices that share the model, where the options ask for several; with an axis "pp" where for stages.

        Raises ValueError as `resolve_config`: limits that contradict each other or the memory; NotImplementedError for an
        attention backend that can't.
        """
        import jax.numpy as jnp

        from jaxserve.config import EngineConfig
        from jaxserve.engine.drafting import draft_functions
        from jaxserve.engine.kernel_choice import choose_kernels
        from jaxserve.engine.resolution import model_functions
        from jaxserve.engine.sharding import model_shards
        from jaxserve.execution.draft_functions import kv_bytes
        from jaxserve.execution.pipeline_programs import make_programs
        from jaxserve.execution.resolved_config import resolve_config
        from jaxserve.models import Decoder
        from jaxserve.models.shards import ShardedModel
        from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE
        from kernels import gpu
        from scripts.aot.drafts import abstract_draft

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
            draft = abstract_draft(config, model, functions.dtype)
            functions.draft = None if draft is None else draft_functions(draft, config, functions)
            page_size = config.page_size or DEFAULT_PAGE_SIZE
            page_bytes = 0 if draft is None else kv_bytes(functions.draft, 1, page_size)
            resolve = functools.partial(
                resolve_config,
                config,
                model,
                kv_dtype=functions.dtype,
                platform="gpu",
                device_limit=limit,
                attention_backend=kernels.attention,
                local=local,
                draft_page_bytes=page_bytes,
            )
            programs = make_programs(functions, _tightest(_resolved(functions, resolve)))
            return cls(programs, resolve, device, limit, target, page_bytes)

    @property
    def config(self) -> Any:
        return self.programs.config

    @property
    def stages(self) -> list[Any]:
        """The programs of each stage of the pipeline; of one stage, all."""
        return getattr(self.programs, "stages", [self.programs])

    def fit(self, reserve: int) -> MemoryFit:
        """The pool and the max_model_len that the engine takes once it knows that programs need `reserve` bytes.

        Raises ValueError as `resolve_config`, where the engine would refuse.
        """
        from jaxserve.sampling.edit_rows import EditLayout

        reserve += self.programs.draft_bytes - self.config.cache.num_pages * self.draft_page_bytes
        found = _resolved(self.programs.functions, self.resolve, reserve)
        config = _tightest(found)
        engine, limits, page_size = config.engine, config.scheduler, config.cache.page_size
        longest = engine.max_model_len or config.model.max_position_embeddings  # before the pool shortens it
        stages = [
            StageFit(len(stage.functions.layers), _weight_bytes(stage.functions), one.pages.page_bytes, one.cache.num_pages)
            for stage, one in zip(self.stages, found, strict=True)
        ]
        return MemoryFit(
            device=self.device_bytes,
            limit=self.limit_bytes,
            utilization=engine.gpu_memory_utilization,
            weights=stages[found.index(config)].weights,
            reserve=reserve,
            edits=limits.max_num_seqs * EditLayout(limits.max_model_len, config.model.vocab_size).row_bytes,
            page=config.pages.page_bytes + self.draft_page_bytes,
            page_size=page_size,
            num_pages=config.cache.num_pages,
            wanted_pages=limits.max_num_seqs // limits.num_groups * math.ceil(longest / page_size),
            num_pools=limits.num_groups,
            max_model_len=limits.max_model_len,
            stages=tuple(stages) if len(stages) > 1 else (),
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


def _resolved(functions: Any, resolve: Callable[..., Any], temp_bytes: int = 0) -> list[Any]:
    """The config as each stage would have it, `temp_bytes` set aside for programs."""
    return [
        resolve(weight_bytes=_weight_bytes(stage), num_layers=len(stage.layers), temp_bytes=temp_bytes)
        for stage in functions.stages
    ]


def _weight_bytes(functions: Any) -> int:
    """Of a stage, and of what drafts beside it."""
    return functions.num_bytes + (0 if functions.draft is None else functions.draft.num_bytes)


def _tightest(configs: Sequence[Any]) -> Any:
    """Of stages: that with room for the fewest pages, which all of them then have."""
    return min(configs, key=lambda config: config.cache.num_pages)


@dataclass
class StepResult:
    """fit: None where the engine would refuse to start, which is the last fault then."""

    reports: list[CompiledReport]
    fit: MemoryFit | None
    faults: list[str]
    config: Any


@dataclass
class StageReports:
    """What became of a stage's programs. number: which one it is, programs: its own; heads and scoring are the last stage's."""

    number: int
    programs: Any
    bodies: dict[Any, CompiledReport] = field(default_factory=dict)  # by bucket
    heads: dict[Any, CompiledReport] = field(default_factory=dict)  # by rows and whether with log-probabilities
    score: CompiledReport | None = None
    update: CompiledReport | None = None

    @property
    def all(self) -> list[CompiledReport]:
        beside = [report for report in (self.score, self.update) if report is not None]
        return [*self.bodies.values(), *self.heads.values(), *beside]


def check_step(
    step: AbstractStep, compiler: Compiler, buckets: list[Any], on_report: Callable[[CompiledReport, int], None] = lambda *_: None
) -> StepResult:
    """Compiles these buckets' bodies, the smallest and largest heads, scoring and the state's update, and says what is wrong with
    them. Of a pipeline: the programs of its first stage, of one in the middle and of the last one, and what passes hidden rows from
    the first stage to the next where they belong to several processes.

    The largest body, the largest head and scoring decide how much memory the plan must set aside. on_report: is told of each
    program, and how many layers its stage has.
    """
    from jaxserve.execution.memory import reserve_bytes

    config, stages = step.config, []
    for number in middle_and_ends(len(step.stages)):
        stages.append(StageReports(number, step.stages[number]))
        _compile_stage(stages[-1], step, compiler, buckets, on_report)
    largest = [report for stage in stages for report in (stage.bodies[config.plan.buckets[-1]], *_last_of(stage))]
    reserve = reserve_bytes(report.temp_bytes for report in largest)
    links = _compile_links(step, compiler, buckets, on_report)
    faults = [fault for stage in stages for fault in _stage_faults(stage, step, compiler, reserve)]
    faults += [fault for report in links for fault in link_faults(report)]
    reports = [*(report for stage in stages for report in stage.all), *links]
    try:
        fit = step.fit(reserve)
    except ValueError as error:  # the engine's own words
        return StepResult(reports, None, [*faults, str(error)], config)
    return StepResult(reports, fit, faults + fit.faults, config)


def middle_and_ends(num_stages: int) -> list[int]:
    """The stages whose programs differ: the first, one of those between, the last one. Of those between, the first has the most
    layers."""
    return list(dict.fromkeys([0, min(1, num_stages - 1), num_stages - 1]))


def _last_of(stage: StageReports) -> list[CompiledReport]:
    """The largest head and scoring, of a last stage."""
    return [*list(stage.heads.values())[-1:], *([] if stage.score is None else [stage.score])]


def _compile_stage(stage: StageReports, step: AbstractStep, compiler: Compiler, buckets: list[Any], on_report: Any) -> None:
    from jaxserve.execution.programs import ProgramKey, gpu_compiler_options, name_of

    config, programs = step.config, stage.programs
    options = gpu_compiler_options(config.deterministic, config.engine.graph_collectives)
    where = f" of stage {stage.number}" if len(step.stages) > 1 else ""

    def compile_one(key: ProgramKey) -> CompiledReport:
        function, donate, args = programs.spec(key)
        report = compiler.compile(name_of(key) + where, function, args, donate=donate, options=options)
        on_report(report, len(programs.functions.layers))
        return report

    plan = config.plan
    stage.bodies = {b: compile_one(b) for b in dict.fromkeys([*buckets, plan.buckets[-1]])}
    if programs.functions.is_last:
        heads = [(plan.head_rows[0], False), (plan.max_head_rows, True)]
        stage.heads = {h: compile_one(h) for h in dict.fromkeys(heads)}
        stage.score = compile_one("score")
    stage.update = compile_one("update")


def _compile_links(step: AbstractStep, compiler: Compiler, buckets: list[Any], on_report: Any) -> list[CompiledReport]:
    from jaxserve.execution.programs import name_of
    from jaxserve.execution.stage_links import LINK_OPTIONS

    reports = []
    for bucket in dict.fromkeys([*buckets, step.config.plan.buckets[-1]]) if len(step.stages) > 1 else ():
        permute, rows = step.programs.links[0].program(step.programs.hidden(bucket))
        reports.append(compiler.compile(f"rows of {name_of(bucket)} to stage 1", permute, [rows], options=LINK_OPTIONS))
        on_report(reports[-1], 0)
    return reports


def _demands(programs: Any, config: Any, temp_bytes: int) -> StepDemands:
    """What the programs of one stage are held to."""
    functions = programs.functions
    shard, num_layers = functions.shard, len(functions.layers)
    embedding = int(functions.is_first)
    return StepDemands(
        num_layers=num_layers,
        kv_layer_shape=config.pages.layer(config.cache.num_pages),
        pool_bytes=config.cache.num_pages * replace(config.pages, num_layers=num_layers).page_bytes,
        temp_bytes=temp_bytes,
        num_sums=0 if shard.is_alone else embedding if shard.whole_sums else 2 * num_layers + embedding,
        num_gathers=4 * num_layers if shard.whole_sums else 0,
        one_graph=shard.is_alone or config.engine.graph_collectives,
        num_draft_layers=_draft_layers(programs, config),
    )


def _draft_layers(programs: Any, config: Any) -> int:
    """Layers of a draft model that attend in a body by the target's kernel: but for the last one, of which the keys and values are
    kept and nothing more is wanted. EAGLE's only layer is such a one."""
    pages = getattr(programs.proposer, "pages", None)
    if pages is None or pages.backend != config.attention_backend:
        return 0
    return programs.functions.draft.model_config.num_layers - 1


def _stage_faults(stage: StageReports, step: AbstractStep, compiler: Compiler, reserve: int) -> list[str]:
    """What is wrong with the programs of a stage. reserve: bytes that the plan sets aside for programs."""
    config, functions = step.config, stage.programs.functions
    demands, attention = _demands(stage.programs, config, reserve), OPS.get(config.attention_backend)
    others = _calls(functions, config.model) if attention is not None else {}
    faults: list[str] = []
    for report in stage.bodies.values():
        faults += body_faults(report, demands, attention, others)
    for report in (*stage.heads.values(), *([] if stage.score is None else [stage.score])):
        faults += head_faults(report, demands)
    assert stage.update is not None
    faults += update_faults(stage.update, demands)
    for report in stage.all:
        ours = [k for k in report.kernels if k.source == "mosaic"]
        faults += variant_faults(report, compiler.mosaic_kernels)
        faults += kernel_faults(ours, smem_limit=smem_limit_of(step.target), where=report.name, arch=arch_of(step.target))
    if config.deterministic == "always":  # a row is computed in any of the bodies, and sampled in any of the heads
        kernels = functions.kernels
        for same, ours in ((stage.bodies, kernels.matmul == "mosaic_sm90" and kernels.fuse_residuals), (stage.heads, False)):
            orders = {report.name: report.order for report in same.values() if report.order is not None}
            faults += order_faults(orders, ours=ours)
    return faults


def _calls(functions: Any, model: Any) -> dict[str, int]:
    """How often a body calls a kernel of ours beside attention and experts."""
    kernels, num_layers = functions.kernels, len(functions.layers)
    found, dense = {}, num_layers - len(set(model.sparse_layers) & set(functions.layers))
    if kernels.rotary == "mosaic":
        found[ROTARY_OP] = num_layers
    if kernels.matmul == "mosaic_sm90":  # qkv_proj and gate_up_proj; o_proj and down_proj with what they are added to
        found[FUSED_OP] = (num_layers + dense) * (2 if kernels.fuse_residuals else 1)
    return found
