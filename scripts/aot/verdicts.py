"""What a compiled step must be, and whether a model fits a GPU: faults as sentences, from reports alone.

Knows neither jax nor how the reports came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scripts.aot.compiled_report import CompiledReport, Kernel
from scripts.aot.roofline import Roofline

# Part of the op_name of the call that does a layer's attention: the scope that the entry gives it, the kernel's own name.
ATTENTION_OP = "ragged_paged_attention_mosaic_sm90/ragged_paged_attention/"
ATTENTION, JOIN = "ragged_paged_attention_mosaic_gpu_kernel", "join_partial_results_mosaic_gpu_kernel"
EXPERTS = "grouped_matmul_mosaic_gpu_kernel"
PORTABLE_OP = "ragged_paged_attention_mosaic_portable/portable_attention/"
PORTABLE_ATTENTION, PORTABLE_JOIN = "portable_attention_mosaic_gpu_kernel", "portable_join_mosaic_gpu_kernel"
PORTABLE_EXPERTS = "portable_grouped_matmul_mosaic_gpu_kernel"
FUSED_OP, FUSED_MATMUL = "fused_matmul_mosaic_sm90/fused_matmul/", "fused_matmul_mosaic_gpu_kernel"
ROTARY_OP, ROTARY_WRITE = "rotary_write_mosaic/rotary_write/", "rotary_write_mosaic_gpu_kernel"
LAYOUT = "lay_out_groups_mosaic_gpu_kernel"
ALL_REDUCE_OP, ALL_REDUCE = "all_reduce_mosaic/one_shot_all_reduce/", "one_shot_all_reduce_mosaic_gpu_kernel"
LOADING_WARPGROUPS = {ATTENTION: 1, FUSED_MATMUL: 1}  # of a block: those that compute nothing
# Of our kernels: the PTX features (compiled_report.PTX_FEATURES) without which one is the slow variant.
FEATURES = {
    ATTENTION: ("TMA", "wgmma from registers"),
    JOIN: (),
    EXPERTS: ("TMA", "wgmma"),
    PORTABLE_ATTENTION: ("cp.async", "mma.sync"),
    PORTABLE_JOIN: (),
    PORTABLE_EXPERTS: ("cp.async", "mma.sync"),
    ROTARY_WRITE: (),
    FUSED_MATMUL: ("TMA", "wgmma from registers"),
    LAYOUT: (),
    ALL_REDUCE: ("signals to other devices",),
}


@dataclass(frozen=True)
class StepDemands:
    """What the programs of one plan are held to. Bytes.

    num_layers: attention calls that a body makes; num_draft_layers: those that it makes for a draft model. kv_layer_shape: of one
    layer's pages. pool_bytes: of all pages, which a body must update in place. temp_bytes: what the plan set aside for programs.
    num_sums, num_gathers: over devices, that a body makes. one_graph: whether a program must be one CUDA graph, which it can't be
    where sums over devices run outside.
    """

    num_layers: int
    kv_layer_shape: tuple[int, ...]
    pool_bytes: int
    temp_bytes: int
    num_sums: int = 0
    num_gathers: int = 0
    one_graph: bool = True
    num_draft_layers: int = 0


def body_faults(
    report: CompiledReport, demands: StepDemands, attention_kernel: str | None, others: Mapping[str, int] | None = None
) -> list[str]:
    """Faults of a body program. attention_kernel: the op that must do every layer's attention (part of its op_name); None where
    the attention backend is XLA's, which runs loops outside the graph. others: how often other ops must be called."""
    faults = program_faults(report, demands) if attention_kernel else _memory_faults(report, demands)
    demanded = {attention_kernel: demands.num_layers + demands.num_draft_layers} if attention_kernel else {}
    for kernel, wanted in {**demanded, **(others or {})}.items():
        calls = [i.op_name for i in report.mosaic_calls if kernel in i.op_name]
        if len(calls) != wanted:
            faults.append(
                f"{len(calls)} Mosaic calls named {kernel!r}, not {wanted}, of {demands.num_layers} layers "
                f"and {demands.num_draft_layers} of a draft; "
                f"Mosaic calls: {sorted({i.op_name for i in report.mosaic_calls}) or 'none'}"
            )
    if report.alias_bytes < demands.pool_bytes:
        faults.append(f"{report.alias_bytes} bytes are updated in place, the KV pages take {demands.pool_bytes}")
    sums = sum(i.opcode in ("all-reduce", "all-reduce-start") for i in report.instructions)
    sums += sum(ALL_REDUCE_OP in i.op_name for i in report.mosaic_calls)
    if sums != demands.num_sums:
        faults.append(f"{sums} sums over devices; must be {demands.num_sums}, those of the layers and that of the embedding")
    gathers = sum(i.opcode in ("all-gather", "all-gather-start") for i in report.instructions)
    if gathers != demands.num_gathers:
        faults.append(f"{gathers} gathers over devices; must be {demands.num_gathers}")
    copies = report.copies_of(demands.kv_layer_shape)
    if copies:
        faults.append(f"{len(copies)} copies of a layer's KV pages: {', '.join(i.name for i in copies[:4])}")
    return [f"{report.name}: {fault}" for fault in faults]


def head_faults(report: CompiledReport, demands: StepDemands) -> list[str]:
    """Faults of a head program, or of scoring."""
    return [f"{report.name}: {fault}" for fault in program_faults(report, demands)]


def update_faults(report: CompiledReport, demands: StepDemands) -> list[str]:
    """Faults of the state's update: so few kernels that XLA makes no graph of them, and nothing that the host would wait for."""
    faults = _memory_faults(report, demands)
    if set(report.outside) - {"CustomKernel", "Kernel", "Copy", "CopyDone"}:
        faults.append(f"runs {', '.join(f'{n} {kind}' for kind, n in sorted(report.outside.items()))}; must be kernels and copies")
    return [f"{report.name}: {fault}" for fault in faults]


def link_faults(report: CompiledReport) -> list[str]:
    """Faults of what passes hidden rows between the processes of two stages: one collective permute and no other command."""
    if report.num_graphs == 0 and report.outside == {"CollectivePermute": 1}:
        return []
    outside = ", ".join(f"{n} {kind}" for kind, n in sorted(report.outside.items())) or "nothing"
    return [f"{report.name}: runs {report.num_graphs} command buffers and {outside}; must be 1 CollectivePermute"]


def program_faults(report: CompiledReport, demands: StepDemands) -> list[str]:
    """Faults of any program: one CUDA graph where it can be, nothing beside it, and no more memory than was set aside."""
    faults = []
    if demands.one_graph and (report.num_graphs != 1 or report.outside):
        outside = ", ".join(f"{n} {kind}" for kind, n in sorted(report.outside.items())) or "nothing"
        faults.append(f"{report.num_graphs} command buffers and {outside} outside them; must be one that holds everything")
    return faults + _memory_faults(report, demands)


def _memory_faults(report: CompiledReport, demands: StepDemands) -> list[str]:
    if report.temp_bytes > demands.temp_bytes:
        return [f"needs {mib(report.temp_bytes)} of temporary memory, the plan set aside {mib(demands.temp_bytes)}"]
    return []


def variant_faults(report: CompiledReport, compiled: Iterable[Kernel]) -> list[str]:
    """Faults of the Mosaic kernels that a program calls: one of which the compiler told nothing, so that neither its registers nor
    its shared memory are known, and one that is not the fast variant.

    compiled: all Mosaic kernels so far. One that an earlier program called too isn't compiled again: all of its name then count.
    """
    faults, compiled = [], list(compiled)
    for name in sorted({call.mosaic_kernel for call in report.mosaic_calls}):
        found = [k for k in report.kernels if k.name == name] or [k for k in compiled if k.name == name]
        if not found:
            faults.append(f"{report.name}: {name} is called and nothing is known of it: Mosaic dumped no such kernel")
        for lacking in sorted({use for k in found for use in FEATURES.get(name, ()) if use not in k.uses}):
            faults.append(f"{report.name}: {name} has no {lacking}: this is not the fast variant")
    return faults


def kernel_faults(kernels: Iterable[Kernel], *, smem_limit: int, where: str, arch: str = "sm_90a") -> list[str]:
    """Faults of our own kernels: spills, more registers asked for than there are, too much shared memory, another architecture than
    `arch`."""
    faults = []
    for k in kernels:
        if k.spills:
            faults.append(f"{where}: {k.name} spills {k.spill_stores} bytes to memory and {k.spill_loads} back")
        if k.smem > smem_limit:
            faults.append(f"{where}: {k.name} needs {k.smem} bytes of shared memory, a block has {smem_limit}")
        if k.missing_registers:
            faults.append(
                f"{where}: {k.name} has {k.registers} registers a thread at launch for {k.warpgroups} warpgroups, which ask for "
                f"{max(k.asked_registers)} and {min(k.asked_registers)}: {k.missing_registers} too many, it would wait for ever"
            )
        if k.arch != arch:
            why = "wgmma and TMA need sm_90a" if arch == "sm_90a" else f"the target is {arch}"
            faults.append(f"{where}: {k.name} was compiled for {k.arch}, {why}")
    return faults


def loop_faults(rooflines: Iterable[Roofline], where: str) -> list[str]:
    """What must be in no loop of our kernels: local memory, an instruction that empties the L1 cache."""
    return [f"{where}: {fault}" for r in rooflines for fault in r.faults]


def bits_faults(rooflines: Mapping[str, Roofline]) -> list[str]:
    """Faults of kernels whose outputs must agree in every bit, by the name of what was compiled: main loops whose float
    operations are not as many as the first one's."""
    names = list(rooflines)
    faults = [f"{name}: no loop of it runs wgmma" for name in names if rooflines[name].main is None]
    for name in names[1:]:
        for which in ("quickest", "slowest"):
            here, there = (_float_operations(rooflines[n], which) for n in (name, names[0]))
            if here != there:
                faults.append(
                    f"{name}: the {which} way round its main loop has {here}, that of {names[0]} {there}: bits would differ"
                )
    return faults


def _float_operations(r: Roofline, which: str) -> dict[str, int]:
    way = getattr(r.main, which) if r.main else None
    return {name: way.counts.get(name, 0) for name in ("FFMA", "FMUL", "FADD", "MUFU")} if way else {}


@dataclass(frozen=True)
class StageFit:
    """A stage of a pipeline, on one of its devices. Bytes, except pages. page: of its own layers; room: as many pages as the pool
    would have if all stages were like this one."""

    num_layers: int
    weights: int
    page: int
    room: int


@dataclass(frozen=True)
class MemoryFit:
    """How a model shares out a GPU's memory. Bytes, except pages and tokens.

    limit: what the process may allocate, utilization: the share of it that the engine takes, reserve: temporary memory of the
    largest programs and what drafts take, edits: what sequences' logit edits take. num_pages: pages of a device; wanted_pages: more
    than this many are never used. num_pools: groups of devices that attend, each with so many pages.
    max_model_len: as asked for, else the model's or what the pool holds. stages: of a pipeline;
    weights and page are then those of the stage with the least room, whose num_pages all have.
    """

    device: int
    limit: int
    utilization: float
    weights: int
    reserve: int
    edits: int
    page: int
    page_size: int
    num_pages: int
    wanted_pages: int
    max_model_len: int
    stages: tuple[StageFit, ...] = ()
    num_pools: int = 1

    @property
    def num_tokens(self) -> int:
        """Of all pools."""
        return self.num_pools * self.num_pages * self.page_size

    @property
    def faults(self) -> list[str]:
        """Of a num_pages that was asked for, which the engine takes as it is. What it finds itself fits, or it refuses to start."""
        room = int(self.utilization * self.limit) - self.weights - self.reserve - self.edits
        if self.num_pages * self.page > room:
            return [f"pool of {gib(self.num_pages * self.page)} is larger than the {gib(room)} that are left for it"]
        return []

    def __str__(self) -> str:
        pool = self.num_pages * self.page
        pools = "" if self.num_pools == 1 else f"in each of {self.num_pools} groups "
        capped = " (no more would ever be used)" if self.num_pages >= self.wanted_pages else ""
        return (
            f"memory: {gib(self.device)} on the device, {gib(self.limit)} for the process, {self.utilization:g} of that for us: "
            f"weights {gib(self.weights)}, programs {gib(self.reserve)}, logit edits {gib(self.edits)}, KV pool {gib(pool)} = "
            f"{pools}{self.num_pages} pages of {self.page_size} tokens ({self.page / self.page_size / 1024:.1f} KiB a token) = "
            f"{self.num_tokens} tokens{capped}, "
            f"that is {self.num_tokens / self.max_model_len:.1f} requests of max_model_len={self.max_model_len}"
        ) + self._shown_stages()

    def _shown_stages(self) -> str:
        """A line for each stage, and what bounds the pool."""
        lines = []
        for number, stage in enumerate(self.stages):
            bound = " (bounds the pool)" if stage.room == self.num_pages < self.wanted_pages else ""
            lines.append(
                f"\n    stage {number}: {stage.num_layers} layers, weights {gib(stage.weights)}, KV pool "
                f"{gib(self.num_pages * stage.page)}, room for {stage.room} pages{bound}"
            )
        return "".join(lines)


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
