"""An EngineConfig with everything decided, for one model on one device.

Owns the defaults that follow from other values. What the device says (its memory, its attention backend) is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.buckets.plan import BucketPlan
from jaxserve.config import EngineConfig
from jaxserve.execution.memory import PageShape, decide_num_pages
from jaxserve.models import ModelConfig
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.scheduling.config import DEFAULT_PAGE_SIZE, CacheConfig, SchedulerConfig, check_groups, require, resolve_policy
from jaxserve.scheduling.policies import BATCHING_POLICIES
from jaxserve.speculative.config import SpeculativeConfig
from kernels.backends import ATTENTION


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig with everything decided: what the scheduler, the pool, the packer and the runner are made from."""

    engine: EngineConfig
    model: ModelConfig
    local: ModelConfig  # what one device computes with; the model itself where there is one
    scheduler: SchedulerConfig
    cache: CacheConfig
    plan: BucketPlan
    pages: PageShape  # of one device; of a pipeline, in the stage that has the least room for them
    attention_backend: str  # never "auto"

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.engine.speculative

    @property
    def deterministic(self) -> str:
        """ "bucket" or "always"."""
        return "always" if self.engine.deterministic == "always" else "bucket"

    @property
    def max_pages_per_seq(self) -> int:
        """Columns of the page table: pages of a request of max_model_len."""
        return -(-self.scheduler.max_model_len // self.cache.page_size)

    @property
    def pool_bytes(self) -> int:
        """Of the KV pages of all layers, on one device."""
        return self.cache.num_pages * self.pages.page_bytes


def resolve_config(
    config: EngineConfig,
    model: ModelConfig,
    *,
    kv_dtype: Any,
    platform: str,  # as JAX calls it: "cpu", "gpu", ...
    device_limit: int | None,  # bytes; None where the device does not say
    weight_bytes: int,
    temp_bytes: int = 0,
    attention_backend: str | None = None,  # what "auto" is on this device; None: "xla"
    local: ModelConfig | None = None,  # what one of several devices computes with
    num_layers: int | None = None,  # of the pipeline's stage that is asked about; None: all
    draft_page_bytes: int = 0,  # that a page takes beside, in the layers of a model that drafts
) -> ResolvedConfig:
    """All limits decided, for this model on this device. Bytes are those of one device.

    Raises:
      ValueError: limits that contradict each other, the bucket plan, the model or the memory; what deterministic="always" can't be
        had with.
      NotImplementedError: deterministic="always" on a device, or with a model or attention there, that it was not made for.
    """
    given_plan = config.bucket_plan
    assert given_plan is None or isinstance(given_plan, BucketPlan)
    budget, max_num_seqs = _step_limits(config, given_plan, model)
    plan = _checked_plan(config, given_plan, budget, max_num_seqs, on_gpu=platform == "gpu")
    page_size = config.page_size or DEFAULT_PAGE_SIZE
    local = local or model
    pages = PageShape(num_layers or model.num_layers, local.num_kv_heads, page_size, model.head_dim, kv_dtype)
    longest = _longest_request(config, model)
    num_pages = config.num_pages or decide_num_pages(
        pages,
        max_num_seqs=-(-max_num_seqs // config.attention_groups),  # of which a device has pages
        max_model_len=longest,
        utilization=config.gpu_memory_utilization,
        device_limit=device_limit,
        weight_bytes=weight_bytes,
        temp_bytes=temp_bytes + max_num_seqs * EditLayout(longest, model.vocab_size).row_bytes,
        num_devices=config.tensor_parallel_size * config.pipeline_parallel_size,
        draft_page_bytes=draft_page_bytes,
    )
    if num_pages * page_size < longest:
        require(
            config.max_model_len is None,
            f"max_model_len={longest} needs {-(-longest // page_size)} pages of {page_size} tokens, the pool has {num_pages}: "
            "raise num_pages or gpu_memory_utilization, or lower max_model_len",
        )
        longest = num_pages * page_size
    cache = CacheConfig(page_size=page_size, num_pages=num_pages, enable_prefix_caching=config.enable_prefix_caching)
    attention_backend = attention_backend or ("xla" if config.attention_backend == "auto" else config.attention_backend)
    _check_platform(config, model, attention_backend, platform)
    return ResolvedConfig(
        engine=config,
        model=model,
        local=local,
        scheduler=_scheduler_config(config, longest, budget, max_num_seqs),
        cache=cache,
        plan=plan,
        pages=pages,
        attention_backend=attention_backend,
    )


def _longest_request(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens that a request may have, but for the pool."""
    longest, most = config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    require(longest <= most, f"max_model_len={longest} must not exceed the model's max_position_embeddings={most}")
    if config.speculative is not None:
        config.speculative.check_length(longest)
    return longest


def _check_platform(config: EngineConfig, model: ModelConfig, attention_backend: str, platform: str) -> None:
    """ValueError, or NotImplementedError, for options that this platform's programs can't have."""
    said = f"graph_collectives=True is of GPUs' programs, and the platform is {platform!r}: leave it out"
    require(not config.graph_collectives or platform == "gpu", said)
    if config.deterministic == "always":
        _check_always(config, model, attention_backend, platform)


def _check_always(config: EngineConfig, model: ModelConfig, attention_backend: str, platform: str) -> None:
    """ValueError, or NotImplementedError, for what bits that do not depend on the bucket can't be had with."""
    always, on_gpu = "deterministic='always'", platform == "gpu"
    if platform not in ("cpu", "gpu"):
        raise NotImplementedError(f"{always} is for CPUs and Hopper GPUs, found platform {platform!r}: use 'bucket'")
    if on_gpu and model.sparse_layers:
        raise NotImplementedError(
            f"{always} is for dense models on a GPU: the sums of a mixture's routing were not read; use 'bucket'"
        )
    if on_gpu and attention_backend != "mosaic_sm90":
        raise NotImplementedError(
            f"{always} needs attention_backend='mosaic_sm90' on a GPU, found {attention_backend!r}: use 'bucket'"
        )
    if on_gpu and model.num_kv_heads % config.tensor_parallel_size:
        raise NotImplementedError(
            f"{always} on GPUs needs whole groups of heads on each: num_kv_heads={model.num_kv_heads} is no multiple of "
            f"tensor_parallel_size={config.tensor_parallel_size}; use fewer devices, or 'bucket'"
        )
    require(
        on_gpu or ATTENTION[attention_backend].fixed_tiles,
        f"attention_backend={attention_backend!r} follows the bucket, which {always} rules out: use 'auto' or 'xla'",
    )
    require(
        not model.sparse_layers or config.moe_backend in ("auto", "xla", "cpu"),
        f"moe_backend={config.moe_backend!r} follows the bucket, which {always} rules out: use 'auto' or 'xla'",
    )
    require(
        config.speculative is None or config.speculative.acceptance == "sampled",
        f"speculative_config: acceptance='rejection' draws tokens by the drafts that a step has room for, which {always} rules "
        "out: use acceptance='sampled'",
    )


def _checked_plan(config: EngineConfig, plan: BucketPlan | None, budget: int, max_num_seqs: int, *, on_gpu: bool) -> BucketPlan:
    """The plan that is given, or the default one. ValueError if it can't hold the steps that the limits allow."""
    num_drafts = config.speculative.num_speculative_tokens if config.speculative is not None else 0
    if plan is None:
        sizes = {"min_tokens": 8, "max_draft_tokens": 256} if on_gpu else {"min_tokens": 2, "max_draft_tokens": 64}
        sizes["min_tokens"] *= config.attention_groups  # no group computes one row, and on a GPU fewer than 8, which XLA pads
        plan = BucketPlan.default(max_num_seqs, budget, num_drafts=num_drafts, **sizes)
    plan.check(max_num_seqs, budget, num_drafts, config.attention_groups)
    return plan


def _scheduler_config(config: EngineConfig, max_model_len: int, budget: int, max_num_seqs: int) -> SchedulerConfig:
    """ValueError for switches that contradict the policy."""
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        policy=config.batching_policy,
        order=config.scheduling_policy,
        chunked=config.enable_chunked_prefill,
        mixed=config.enable_mixed_steps,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        num_groups=config.attention_groups,
    )
    resolve_policy(scheduler)
    return scheduler


def _step_limits(config: EngineConfig, plan: BucketPlan | None, model: ModelConfig) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs). What is not given follows what is: a plan's largest bucket, the other limit."""
    budget, seqs, chunked = config.max_num_batched_tokens, config.max_num_seqs, config.enable_chunked_prefill
    if chunked is None:
        chunked = BATCHING_POLICIES[config.batching_policy].chunked
    if budget is None:
        budget = plan.mixed[-1][0] if plan else max(SchedulerConfig.max_num_batched_tokens, seqs or 0)
        if plan is None and not chunked:  # whole prompts must fit a step
            budget = max(budget, config.max_model_len or model.max_position_embeddings)
    if seqs is None:
        seqs = min(SchedulerConfig.max_num_seqs, budget, *((plan.mixed[-1][1], plan.max_head_rows) if plan else ()))
    check_groups(config.attention_groups, max_num_batched_tokens=budget, max_num_seqs=seqs)
    return budget, seqs
