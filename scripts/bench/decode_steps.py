"""A scheduler and a packer with steady decodes, and nothing of a model or a device: what benchmarks of the host's work run."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.batching.layout import StepLayout
from jaxserve.batching.packer import BatchPacker
from jaxserve.buckets.plan import Bucket, BucketPlan
from jaxserve.request import Request
from jaxserve.sampling.edit_rows import EditLayout
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.config import SchedulerConfig
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler

EOS = 2
NUM_SMS, DEVICE_KIND, MAX_KV_LEN = 132, "NVIDIA H100 80GB HBM3", 40_960  # whose attention is planned


def make_scheduler(
    num_running: int, page_size: int, prefix_caching: bool, order: str, num_tokens: int, prompt_len: int = 20
) -> Scheduler:
    """A scheduler with `num_running` requests waiting that may decode `num_tokens` tokens; page boundaries are spread out."""
    rng = np.random.default_rng(0)
    max_model_len = prompt_len + page_size + num_tokens + 1
    budget = max(num_running * (prompt_len + page_size), 2048)
    config = SchedulerConfig(max_model_len=max_model_len, max_num_seqs=num_running, max_num_batched_tokens=budget, order=order)
    pool = PagePool(num_running * -(-max_model_len // page_size), page_size, prefix_caching)
    scheduler = Scheduler(config, pool)
    for i in range(num_running):
        prompt = rng.integers(10, 100_000, prompt_len + i % page_size).tolist()
        params = SamplingParams(max_tokens=None, stop_token_ids=[3, 4])
        scheduler.add(Request(f"r{i}", prompt, params, eos_token_ids=frozenset([EOS]), arrival=float(i), priority=i % 3))
    return scheduler


def planners(bucket: Bucket) -> dict[int | None, Any]:
    """What plans a bucket's attention on a Hopper GPU."""
    from kernels import gpu
    from kernels.ragged_paged_attention.mosaic_sm90.planner import Planner

    with gpu.assume_sm90(NUM_SMS, DEVICE_KIND):
        planner = Planner.make(
            num_tokens=bucket.tokens,
            num_seqs=bucket.seqs,
            max_q_len=bucket.max_q_len,
            num_query_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_kv_len=MAX_KV_LEN,
        )
    return {None: planner}


def make_packer(scheduler: Scheduler, planned: bool = False) -> BatchPacker:
    """A packer for the default plan of the scheduler's limits. planned: attention's work lists too."""
    config, page_size = scheduler.config, scheduler.pool.page_size
    plan = BucketPlan.default(config.max_num_seqs, config.max_num_batched_tokens)
    layouts = {
        b: StepLayout(b, config.max_num_seqs, page_size, plan.max_head_rows, planners(b) if planned else {}) for b in plan.buckets
    }
    return BatchPacker(plan, layouts, config.max_num_seqs, EditLayout(config.max_model_len, vocab_size=100_000))
