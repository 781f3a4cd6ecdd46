"""What an engine is, as data: model, device, kernels, memory, limits, programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxserve.engine.kernel_choice import KernelChoice
from jaxserve.engine.resolution import model_shape
from jaxserve.execution.pipeline_programs import AnyPrograms
from kernels.cpu import library as cpu_library


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineDescription:
    """What was decided when an engine was made. str() of it is the line in the log.

    model: its architecture. model_shape: layers, widths, heads and experts by name. dtype: of weights and activations.
    tensor_parallel_size: devices that share the model, or a stage of it; bytes are those of one of them. attention_groups: in which
    they attend. pipeline_parallel_size: stages. weight_bytes: of all weights, or of the fullest stage's. device, platform: as JAX
    calls them. attention_backend, rotary_backend, matmul_backend, moe_backend: the kernels that run; rotary_backend is "xla" beside
    an XLA attention, moe_backend None without experts. instruction_set: of the kernels for CPUs; None where none of them runs.
    deterministic: what bits may depend on.
    qualification: what the card's check of our kernels found, in a line. verdicts: the same as data, None where there was no check.
    page_size: tokens of a KV page. num_pages: of the pool, or of each group's. kv_tokens: that all of them hold. kv_bytes: of a
    device's pages; of a pipeline, in the stage with the least room for them. num_speculative_tokens: drafts of a step, 0 without
    speculation. kv_store: the option; None: there is none. kv_save_share: of the requests, whose pages it is given now.
    bucket_plan: its shapes, in a line. num_programs: that it has.
    """

    model: str
    model_shape: dict[str, int]
    dtype: str
    tensor_parallel_size: int
    attention_groups: int
    pipeline_parallel_size: int
    weight_bytes: int
    device: str
    platform: str
    attention_backend: str
    rotary_backend: str
    matmul_backend: str
    moe_backend: str | None
    instruction_set: str | None
    deterministic: str
    qualification: str
    verdicts: dict[str, Any] | None
    page_size: int
    num_pages: int
    kv_tokens: int
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    kv_store: str | None
    kv_save_share: float | None
    bucket_plan: str
    num_programs: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rotary = "" if self.rotary_backend == "xla" else f"rotary write: {self.rotary_backend}; "
        matmul = "" if self.matmul_backend == "xla" else f"matmuls: {self.matmul_backend}; "
        moe = "" if self.moe_backend is None else f"experts: {self.moe_backend}; "
        isa = "" if self.instruction_set is None else f"instruction set: {self.instruction_set}; "
        devices = "" if self.tensor_parallel_size == 1 else f"devices: {self.tensor_parallel_size}; "
        devices += "" if self.attention_groups == 1 else f"attention groups: {self.attention_groups}; "
        share = "" if self.kv_save_share is None else f", given the pages of {100 * self.kv_save_share:.0f}% of the requests"
        store = "" if self.kv_store is None else f"KV store: {self.kv_store}{share}; "
        stages = "" if self.pipeline_parallel_size == 1 else f"stages: {self.pipeline_parallel_size}; "
        return (
            f"{stages}{devices}attention: {self.attention_backend}; {rotary}{matmul}{moe}{isa}deterministic: {self.deterministic}; "
            f"KV pool: {self.num_pages} pages of {self.page_size} tokens ({self.kv_bytes / 2**20:.0f} MiB); {store}"
            f"steps of up to {self.max_num_batched_tokens} tokens and {self.max_num_seqs} sequences, "
            f"requests of up to {self.max_model_len} tokens; buckets: {self.bucket_plan}; "
            f"qualification: {self.qualification}"
        )


def describe(programs: AnyPrograms, kernels: KernelChoice, kv_save_share: float | None = None) -> EngineDescription:
    """The description of an engine that runs these programs. kv_save_share: as the description's; None without a store."""
    config, functions = programs.config, programs.functions
    device, qualification = jax.local_devices()[0], kernels.qualification
    model = config.model
    backends = (config.attention_backend, kernels.layer.rotary, kernels.layer.matmul, kernels.layer.moe)
    return EngineDescription(
        model=model.architecture,
        model_shape=model_shape(model),
        dtype=str(functions.dtype),
        tensor_parallel_size=functions.shard.size,
        attention_groups=functions.shard.groups,
        pipeline_parallel_size=len(functions.stages),
        weight_bytes=max(stage.num_bytes for stage in functions.stages),
        device=device.device_kind,
        platform=device.platform,
        attention_backend=config.attention_backend,
        rotary_backend=kernels.layer.rotary,
        matmul_backend=kernels.layer.matmul,
        moe_backend=kernels.layer.moe if model.sparse_layers else None,
        instruction_set=cpu_library.level() if "cpu" in backends else None,
        deterministic=config.deterministic,
        qualification=kernels.said,
        verdicts=None if qualification is None else qualification.as_dict(),
        page_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
        kv_tokens=config.cache.num_pages * config.cache.page_size * functions.shard.groups,
        kv_bytes=config.pool_bytes,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_speculative_tokens=0 if config.speculative is None else config.speculative.num_speculative_tokens,
        kv_store=config.engine.kv_store,
        kv_save_share=kv_save_share,
        bucket_plan=str(config.plan),
        num_programs=len(programs.keys),
    )
