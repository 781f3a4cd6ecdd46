"""What a user can choose about an engine: EngineConfig, checked on construction.

Knows no model and no device: execution/resolved_config.py decides what is left open.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxserve.buckets.plan import BucketPlan
from jaxserve.models.config import DTYPES
from jaxserve.scheduling.config import check_positive, check_power_of_two, check_within_budget, is_int, require, require_one_of
from jaxserve.scheduling.policies import BATCHING_POLICIES, ORDERS
from jaxserve.speculative.config import SpeculativeConfig

WARM_UPS = ("all", "first_use")
BACKENDS = ("auto", "mosaic_sm90", "xla", "reference")  # of attention
MOE_BACKENDS = ("auto", "xla", "reference", "mosaic_sm90")  # of a mixture of experts' matmuls


def _read_plan(plan: Any) -> BucketPlan | None:
    if plan is None or isinstance(plan, BucketPlan):
        return plan
    ok = isinstance(plan, (str, os.PathLike, dict))
    require(ok, f"bucket_plan={plan!r} must be a BucketPlan, the path of its JSON, what that JSON holds, or None")
    try:
        return BucketPlan.from_dict(plan) if isinstance(plan, dict) else BucketPlan.load(plan)
    except (OSError, ValueError) as error:
        raise ValueError(f"bucket_plan={str(plan)!r} cannot be used: {error}") from error


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
        within tbt_slo_ms milliseconds. step_times: the JSON of a profile of this machine (`jaxserve tune profile`).
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
        require_one_of(tuple(BATCHING_POLICIES), batching_policy=self.batching_policy)
        require_one_of(WARM_UPS, warm_up=self.warm_up)
        require_one_of(BACKENDS, attention_backend=self.attention_backend)
        require_one_of(MOE_BACKENDS, moe_backend=self.moe_backend)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages"):
            if getattr(self, name) is not None:
                check_positive(**{name: getattr(self, name)})
        if self.page_size is not None:
            check_power_of_two(self.page_size)
        if self.max_num_seqs is not None and self.max_num_batched_tokens is not None:
            check_within_budget(self.max_num_seqs, self.max_num_batched_tokens)
        share, threshold = self.gpu_memory_utilization, self.long_prefill_token_threshold
        ok = isinstance(share, numbers.Real) and not isinstance(share, bool) and 0 < share <= 1
        require(ok, f"gpu_memory_utilization={share!r} must be a number in (0, 1]")
        require(
            is_int(threshold) and threshold >= 0, f"long_prefill_token_threshold={threshold!r} must be an integer >= 0 (0: no cap)"
        )
        slo = self.tbt_slo_ms
        ok = slo is None or (isinstance(slo, numbers.Real) and not isinstance(slo, bool) and slo > 0)
        require(ok, f"tbt_slo_ms={slo!r} must be milliseconds above 0, or None")
        require(
            (slo is None) == (self.step_times is None),
            f"tbt_slo_ms={slo!r} and step_times={self.step_times!r} go together: an objective, and a profile to predict steps",
        )
        require(is_int(self.seed), f"seed={self.seed!r} must be an integer")
        for name in ("enable_prefix_caching", "async_scheduling", "enable_chunked_prefill", "enable_mixed_steps"):
            value, optional = getattr(self, name), name in ("enable_chunked_prefill", "enable_mixed_steps")
            ok = isinstance(value, bool) or optional and value is None
            require(ok, f"{name}={value!r} must be True or False" + (", or None for the policy's own" if optional else ""))
        for name in ("compilation_cache_dir", "demand_log", "step_times"):
            value = getattr(self, name)
            require(value is None or isinstance(value, (str, os.PathLike)), f"{name}={value!r} must be a path, or None")
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
