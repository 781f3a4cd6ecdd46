"""What an engine is built with: frozen parts, checked on construction; `resolve` returns a new one with every None decided.

Knows no model and no device: what depends on those (how many pages fit) is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.buckets import BucketPlan
from jaxserve.memory import PageShape, decide_num_pages

if TYPE_CHECKING:
    from jaxserve.models import ModelConfig

DEFAULT_NUM_BATCHED_TOKENS = 2048
DEFAULT_NUM_SEQS = 128
DTYPES = ("auto", "bfloat16", "float16", "float32")
WARM_UPS = ("all", "first_use")
POLICIES = ("sarathi", "orca", "prefill_first", "request_level")
ORDERS = ("fcfs", "priority")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _positive(**values: int) -> None:
    for name, value in values.items():
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        _require(ok, f"{name}={value!r} must be an integer >= 1")


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

    def __post_init__(self):
        _positive(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        _require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            f"max_num_seqs={self.max_num_seqs} must not exceed max_num_batched_tokens={self.max_num_batched_tokens}: "
            "a step must hold one token of every running sequence; raise the budget or lower max_num_seqs",
        )
        _require(self.policy in POLICIES, f"policy={self.policy!r} must be one of {', '.join(POLICIES)}")
        _require(self.order in ORDERS, f"order={self.order!r} must be one of {', '.join(ORDERS)}")
        _require(
            self.long_prefill_token_threshold >= 0,
            f"long_prefill_token_threshold={self.long_prefill_token_threshold} must be >= 0 (0: no cap)",
        )


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. page_size: tokens a page; num_pages: pages of the pool, in every layer alike."""

    page_size: int
    num_pages: int
    enable_prefix_caching: bool = True

    def __post_init__(self):
        _positive(page_size=self.page_size, num_pages=self.num_pages)
        _require(
            self.page_size & (self.page_size - 1) == 0, f"page_size={self.page_size} must be a power of two, such as 16 or 64"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything a user can choose about an engine; None means decided by `resolve` from the model and the device.

    dtype: of weights and activations; "auto" is the checkpoint's own (bfloat16 for quantised GGUF). max_model_len: most tokens of a
    request, prompt and output (the model's own length, or what the pool holds if that is less). max_num_seqs, max_num_batched_tokens:
    sequences and tokens a step may hold (128, 2048). page_size: tokens a KV page (64 on a GPU, 16 on a CPU). num_pages: pages of the
    pool. gpu_memory_utilization: the share of the device's memory that weights, programs and the pool may use together (on a CPU: of a
    quarter of the machine's memory, and at most 1 GiB for the pool). enable_chunked_prefill, enable_mixed_steps: override the batching
    policy's own choice. scheduling_policy: who comes first, "fcfs" or "priority". batching_policy: how a step is composed: "sarathi",
    "orca", "prefill_first" or "request_level". seed: seeds requests that bring none. bucket_plan: a BucketPlan or the path of its JSON.
    warm_up: "all" compiles every program of the plan at start, "first_use" each when it is first needed. async_scheduling: step n+1 is
    dispatched before step n's tokens are fetched. attention_backend: "auto", "xla", "reference" or "mosaic_sm90".
    compilation_cache_dir: JAX's persistent compilation cache ("" leaves JAX's own setting alone). demand_log: a path to which each
    step's demand is appended, one JSON line a step.

    Raises:
      ValueError: a value is out of range; the message names it and what it may be.
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
    seed: int = 0
    bucket_plan: BucketPlan | str | Path | None = None
    warm_up: str = "first_use"
    async_scheduling: bool = True
    attention_backend: str = "auto"
    compilation_cache_dir: str | None = None
    demand_log: str | None = None

    def __post_init__(self):
        _require(self.dtype in DTYPES, f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                _positive(**{name: getattr(self, name)})
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, f"gpu_memory_utilization={share} must be in (0, 1]")
        _require(self.scheduling_policy in ORDERS, f"scheduling_policy={self.scheduling_policy!r} must be one of {', '.join(ORDERS)}")
        _require(self.batching_policy in POLICIES, f"batching_policy={self.batching_policy!r} must be one of {', '.join(POLICIES)}")
        _require(self.warm_up in WARM_UPS, f"warm_up={self.warm_up!r} must be one of {', '.join(WARM_UPS)}")

    def resolve(
        self,
        model: ModelConfig,
        *,
        kv_dtype: Any,
        on_gpu: bool,
        device_limit: int | None,  # bytes; None where the device does not say
        weight_bytes: int,
        temp_bytes: int = 0,
    ) -> ResolvedConfig:
        """All limits decided, for this model on this device.

        Raises:
          ValueError: limits that contradict each other, the bucket plan, the model or the memory.
        """
        plan = None if self.bucket_plan is None else BucketPlan.load(self.bucket_plan)
        budget, max_num_seqs = self._step_limits(plan, model)
        page_size = self.page_size or (64 if on_gpu else 16)
        if plan is None:
            plan = BucketPlan.default(max_num_seqs, budget, min_tokens=8 if on_gpu else 2)
        plan.check(max_num_seqs, budget)
        pages = PageShape(model.num_layers, model.num_kv_heads, page_size, model.head_dim, kv_dtype)
        longest = self.max_model_len or model.max_position_embeddings
        _require(
            longest <= model.max_position_embeddings,
            f"max_model_len={longest} must not exceed the model's max_position_embeddings={model.max_position_embeddings}",
        )
        num_pages = self.num_pages or decide_num_pages(
            pages,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            utilization=self.gpu_memory_utilization,
            device_limit=device_limit,
            weight_bytes=weight_bytes,
            temp_bytes=temp_bytes,
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
        cache = CacheConfig(page_size=page_size, num_pages=num_pages, enable_prefix_caching=self.enable_prefix_caching)
        return ResolvedConfig(engine=self, model=model, scheduler=scheduler, cache=cache, plan=plan, pages=pages)

    def _step_limits(self, plan: BucketPlan | None, model: ModelConfig) -> tuple[int, int]:
        """(max_num_batched_tokens, max_num_seqs). What is not given follows what is: a plan's largest bucket, the other limit."""
        budget, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if budget is None:
            budget = plan.mixed[-1][0] if plan else max(DEFAULT_NUM_BATCHED_TOKENS, seqs or 0)
            if plan is None and self.enable_chunked_prefill is False:  # whole prompts must fit a step
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

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.scheduler.max_model_len // self.cache.page_size)

    @property
    def pool_bytes(self) -> int:
        return self.cache.num_pages * self.pages.page_bytes
