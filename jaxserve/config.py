"""What an engine is built with: frozen parts, checked on construction; `resolve` returns a new one with every None decided.

Knows no model and no device: what depends on those (how many pages fit) is passed in.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.buckets.plan import BucketPlan
from jaxserve.execution.memory import PageShape, decide_num_pages
from jaxserve.speculative.config import SpeculativeConfig

if TYPE_CHECKING:
    from jaxserve.models import ModelConfig

DEFAULT_NUM_BATCHED_TOKENS = 2048
DEFAULT_NUM_SEQS = 128
DEFAULT_PAGE_SIZE = 64  # on a CPU too: XLA gathers whole pages, and pages of 16 made a decode step up to a third slower
DTYPES = ("auto", "bfloat16", "float16", "float32")
WARM_UPS = ("all", "first_use")
POLICIES = ("sarathi", "orca", "prefill_first", "request_level")
ORDERS = ("fcfs", "priority")
BACKENDS = ("auto", "mosaic_sm90", "xla", "reference")  # of attention
MOE_BACKENDS = ("auto", "xla", "reference", "mosaic_sm90")  # of a mixture of experts' matmuls


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _positive(**values: Any) -> None:
    for name, value in values.items():
        _require(_is_int(value) and value >= 1, f"{name}={value!r} must be an integer >= 1")


def require_one_of(choices: tuple[str, ...], **values: Any) -> None:
    for name, value in values.items():
        _require(value in choices, f"{name}={value!r} must be one of {', '.join(choices)}")


def _within_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    _require(
        max_num_seqs <= max_num_batched_tokens,
        f"max_num_seqs={max_num_seqs} must not exceed max_num_batched_tokens={max_num_batched_tokens}: "
        "a step must hold one token of every running sequence; raise the budget or lower max_num_seqs",
    )


def _power_of_two(page_size: int) -> None:
    _require(page_size & (page_size - 1) == 0, f"page_size={page_size} must be a power of two, such as 16 or 64")


def _read_plan(plan: Any) -> BucketPlan | None:
    if plan is None or isinstance(plan, BucketPlan):
        return plan
    ok = isinstance(plan, (str, os.PathLike, dict))
    _require(ok, f"bucket_plan={plan!r} must be a BucketPlan, the path of its JSON, what that JSON holds, or None")
    try:
        return BucketPlan.from_dict(plan) if isinstance(plan, dict) else BucketPlan.load(plan)
    except (OSError, ValueError) as error:
        raise ValueError(f"bucket_plan={str(plan)!r} cannot be used: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Which request gets how many tokens a step.

    max_num_batched_tokens: the token budget of a step. max_num_seqs: most sequences running at once. max_model_len: most tokens
    (prompt + output) of a request. policy: how a step is composed (policies.py); chunked and mixed override the policy's own
    choice of chunking prompts and of mixing prefills with decodes (None keeps it). order: who comes first, and who is preempted
    last. long_prefill_token_threshold: most prompt tokens of one request a step while another waits (0: no cap).
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    policy: str = "sarathi"
    order: str = "fcfs"
    chunked: bool | None = None
    mixed: bool | None = None
    long_prefill_token_threshold: int = 0

    def __post_init__(self) -> None:
        _positive(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        _within_budget(self.max_num_seqs, self.max_num_batched_tokens)
        require_one_of(POLICIES, policy=self.policy)
        require_one_of(ORDERS, order=self.order)
        _require(
            _is_int(self.long_prefill_token_threshold) and self.long_prefill_token_threshold >= 0,
            f"long_prefill_token_threshold={self.long_prefill_token_threshold!r} must be an integer >= 0 (0: no cap)",
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. page_size: tokens a page; num_pages: pages of the pool, in every layer alike."""

    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _positive(page_size=self.page_size, num_pages=self.num_pages)
        _power_of_two(self.page_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a user can choose about an engine; None means decided by `resolve` from the model and the device.

    Args:
      dtype: of weights and activations; "auto" is the checkpoint's own (bfloat16 for quantised GGUF).
      max_model_len: most tokens of a request, prompt and output (the model's own length, or what the pool holds if that is less).
      max_num_seqs, max_num_batched_tokens: sequences and tokens that a step may hold (128, 2048).
      page_size: tokens a KV page (64).
      num_pages: pages of the pool (as many as fit, and never more than max_num_seqs requests of max_model_len could use).
      gpu_memory_utilization: the share of the device's memory that weights, programs and the pool may use together (on a CPU: of a
        quarter of the machine's memory, and at most 1 GiB for the pool).
      enable_prefix_caching: requests share the pages of equal prefixes.
      scheduling_policy: who comes first, "fcfs" or "priority".
      batching_policy: how a step is composed: "sarathi", "orca", "prefill_first" or "request_level" (policies.py).
      enable_chunked_prefill, enable_mixed_steps: override the batching policy's own choice.
      long_prefill_token_threshold: most prompt tokens of one request a step while another waits (0: no cap).
      tbt_slo_ms, step_times: a dynamic budget: a step with decodes holds only as many prompt tokens as keep its predicted time
        within tbt_slo_ms milliseconds. step_times: the JSON of a profile of this machine (jaxserve.cli.tune.profile).
      seed: seeds requests that bring none.
      bucket_plan: a BucketPlan, the path of its JSON, or what that JSON holds.
      warm_up: "all" compiles every program of the plan at start, "first_use" each when it is first needed.
      async_scheduling: step n+1 is dispatched before step n's tokens are fetched.
      attention_backend: "auto" ("mosaic_sm90" on a Hopper GPU where it fits, else "xla"), "mosaic_sm90", "xla" or "reference".
      moe_backend: of the matmuls of a mixture of experts, "auto", "xla", "reference" or "mosaic_sm90" (kernels/grouped_matmul).
      compilation_cache_dir: JAX's persistent compilation cache ("" leaves JAX's own setting alone).
      speculative_config: a SpeculativeConfig, or a dict of its fields, such as {"method": "ngram", "num_speculative_tokens": 4};
        None: every step brings a sequence one token.
      demand_log: a path to which each step's demand is appended, one JSON line a step.

    Raises:
      ValueError: a value is of the wrong type or out of range, or the plan or the profile can't be read; the message names it and
        what it may be.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool | None = None
    enable_mixed_steps: bool | None = None
    scheduling_policy: str = "fcfs"
    batching_policy: str = "sarathi"
    long_prefill_token_threshold: int = 0
    tbt_slo_ms: float | None = None
    step_times: str | Path | None = None
    seed: int = 0
    bucket_plan: BucketPlan | str | Path | dict[str, Any] | None = None
    warm_up: str = "first_use"
    async_scheduling: bool = True
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    compilation_cache_dir: str | None = None
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    demand_log: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # numpy's integers too
                object.__setattr__(self, field.name, int(value))
        require_one_of(DTYPES, dtype=self.dtype)
        require_one_of(ORDERS, scheduling_policy=self.scheduling_policy)
        require_one_of(POLICIES, batching_policy=self.batching_policy)
        require_one_of(WARM_UPS, warm_up=self.warm_up)
        require_one_of(BACKENDS, attention_backend=self.attention_backend)
        require_one_of(MOE_BACKENDS, moe_backend=self.moe_backend)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                _positive(**{name: getattr(self, name)})
        if self.page_size is not None:
            _power_of_two(self.page_size)
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            _within_budget(self.max_num_seqs, self.max_num_batched_tokens)
        share, threshold = self.gpu_memory_utilization, self.long_prefill_token_threshold
        ok = isinstance(share, numbers.Real) and not isinstance(share, bool) and 0 < share <= 1
        _require(ok, f"gpu_memory_utilization={share!r} must be a number in (0, 1]")
        _require(
            _is_int(threshold) and threshold >= 0, f"long_prefill_token_threshold={threshold!r} must be an integer >= 0 (0: no cap)"
        )
        slo = self.tbt_slo_ms
        ok = slo is None or (isinstance(slo, numbers.Real) and not isinstance(slo, bool) and slo > 0)
        _require(ok, f"tbt_slo_ms={slo!r} must be milliseconds above 0, or None")
        _require(
            (slo is None) == (self.step_times is None),
            f"tbt_slo_ms={slo!r} and step_times={self.step_times!r} go together: an objective, and a profile to predict steps",
        )
        _require(_is_int(self.seed), f"seed={self.seed!r} must be an integer")
        for name in ("enable_prefix_caching", "async_scheduling", "enable_chunked_prefill", "enable_mixed_steps"):
            value, optional = getattr(self, name), name in ("enable_chunked_prefill", "enable_mixed_steps")
            ok = isinstance(value, bool) or optional and value is None
            _require(ok, f"{name}={value!r} must be True or False" + (", or None for the policy's own" if optional else ""))
        for name in ("compilation_cache_dir", "demand_log", "step_times"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, (str, os.PathLike)), f"{name}={value!r} must be a path, or None")
        # Read now: a bad file should not wait for the weights to load.
        object.__setattr__(self, "bucket_plan", _read_plan(self.bucket_plan))
        if self.step_times is not None:
            from jaxserve.step_times.fitted import StepTimeModel

            StepTimeModel.load(self.step_times)
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.make(self.speculative_config))

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """speculative_config, as the one that was made of whatever was given."""
        assert self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)
        return self.speculative_config

    def resolve(
        self,
        model: ModelConfig,
        *,
        kv_dtype: Any,
        on_gpu: bool,
        device_limit: int | None,  # bytes; None where the device does not say
        weight_bytes: int,
        temp_bytes: int = 0,
        attention_backend: str | None = None,  # what "auto" is on this device; None: "xla"
    ) -> ResolvedConfig:
        """All limits decided, for this model on this device.

        Raises:
          ValueError: limits that contradict each other, the bucket plan, the model or the memory.
        """
        from jaxserve.sampling.edit_rows import EditLayout
        from jaxserve.scheduling.policies import resolve_policy

        plan = self.bucket_plan
        assert plan is None or isinstance(plan, BucketPlan)
        budget, max_num_seqs = self._step_limits(plan, model)
        page_size = self.page_size or DEFAULT_PAGE_SIZE
        num_drafts = self.speculative.num_speculative_tokens if self.speculative is not None else 0
        if plan is None:
            sizes = {"min_tokens": 8, "max_draft_tokens": 256} if on_gpu else {"min_tokens": 2, "max_draft_tokens": 64}
            plan = BucketPlan.default(max_num_seqs, budget, num_drafts=num_drafts, **sizes)
        plan.check(max_num_seqs, budget, num_drafts)
        pages = PageShape(model.num_layers, model.num_kv_heads, page_size, model.head_dim, kv_dtype)
        longest = self.max_model_len or model.max_position_embeddings
        _require(
            longest <= model.max_position_embeddings,
            f"max_model_len={longest} must not exceed the model's max_position_embeddings={model.max_position_embeddings}",
        )
        edit_bytes = max_num_seqs * EditLayout(longest, model.vocab_size).row_bytes
        num_pages = self.num_pages or decide_num_pages(
            pages,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            utilization=self.gpu_memory_utilization,
            device_limit=device_limit,
            weight_bytes=weight_bytes,
            temp_bytes=temp_bytes + edit_bytes,
        )
        if num_pages * page_size < longest:
            _require(
                self.max_model_len is None,
                f"max_model_len={longest} needs {-(-longest // page_size)} pages of {page_size} tokens, the pool has {num_pages}: "
                "raise num_pages or gpu_memory_utilization, or lower max_model_len",
            )
            longest = num_pages * page_size
        scheduler = SchedulerConfig(
            max_model_len=longest,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            policy=self.batching_policy,
            order=self.scheduling_policy,
            chunked=self.enable_chunked_prefill,
            mixed=self.enable_mixed_steps,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
        )
        resolve_policy(scheduler)  # refuses switches that contradict the policy before anything is compiled
        cache = CacheConfig(page_size=page_size, num_pages=num_pages, enable_prefix_caching=self.enable_prefix_caching)
        if attention_backend is None:
            attention_backend = "xla" if self.attention_backend == "auto" else self.attention_backend
        return ResolvedConfig(
            engine=self,
            model=model,
            scheduler=scheduler,
            cache=cache,
            plan=plan,
            pages=pages,
            attention_backend=attention_backend,
        )

    def _step_limits(self, plan: BucketPlan | None, model: ModelConfig) -> tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs). What is not given follows what is: a plan's largest bucket, the other limit."""
        from jaxserve.scheduling.policies import POLICIES

        budget, seqs, chunked = self.max_num_batched_tokens, self.max_num_seqs, self.enable_chunked_prefill
        if chunked is None:
            chunked = POLICIES[self.batching_policy].chunked
        if budget is None:
            budget = plan.mixed[-1][0] if plan else max(DEFAULT_NUM_BATCHED_TOKENS, seqs or 0)
            if plan is None and not chunked:  # whole prompts must fit a step
                budget = max(budget, self.max_model_len or model.max_position_embeddings)
        if seqs is None:
            seqs = min(DEFAULT_NUM_SEQS, budget, *((plan.mixed[-1][1], plan.max_head_rows) if plan else ()))
        return budget, seqs


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An EngineConfig with everything decided: what the scheduler, the pool, the packer and the runner are made from."""

    engine: EngineConfig
    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    plan: BucketPlan
    pages: PageShape
    attention_backend: str  # never "auto"

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return self.engine.speculative

    @property
    def max_pages_per_seq(self) -> int:
        """Columns of the page table: pages of a request of max_model_len."""
        return -(-self.scheduler.max_model_len // self.cache.page_size)

    @property
    def pool_bytes(self) -> int:
        """Of the KV pages of all layers."""
        return self.cache.num_pages * self.pages.page_bytes
