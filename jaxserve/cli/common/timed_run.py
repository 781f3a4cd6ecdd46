"""One timed run of a workload on an engine, which every throughput benchmark shares, and whether it can be run at all."""

from __future__ import annotations

import statistics
import time
from typing import Any

from jaxserve.workloads.workload import Workload, WorkloadRequest


def longest_of(workload: Workload) -> WorkloadRequest:
    return max(workload.requests, key=lambda r: r.num_prompt_tokens + r.num_output_tokens)


def check_length(workload: Workload, max_model_len: int | None) -> None:
    """ValueError if a request would end before its full length. None: not known yet."""
    if max_model_len is not None and workload.max_len > max_model_len:
        longest = longest_of(workload)
        raise ValueError(
            f"{workload.name} has a request of {longest.num_prompt_tokens} prompt and {longest.num_output_tokens} output tokens, "
            f"more than {max_model_len=}: raise it to {workload.max_len} or ask for shorter requests"
        )


def check_fits(workload: Workload, engine: Any) -> None:
    """ValueError if the engine would refuse a request, or end it before its full length."""
    from jaxserve import SamplingParams

    check_length(workload, engine.config.scheduler.max_model_len)
    for request in (longest_of(workload), max(workload.requests, key=lambda r: r.num_prompt_tokens)):  # the pool's limit, a step's
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        engine.check_request("longest", [0] * request.num_prompt_tokens, params)


def serve(engine: Any, workload: Workload, seed: int) -> dict[str, Any]:
    """Serves a workload, given all at once, to its end, every request to its full length; elapsed_time in seconds.

    Prompts that a workload does not spell out are drawn anew for each seed; those that it does find no pages of another seed's run.
    """
    from jaxserve import SamplingParams

    prompts = workload.prompts(engine.config.model.vocab_size, seed)
    steps = engine.stats.num_steps
    start = time.perf_counter()
    added = []
    for i, (prompt, request) in enumerate(zip(prompts, workload.requests, strict=True)):
        params = SamplingParams(
            temperature=workload.temperature, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False
        )
        added += engine.add_request(str(i), prompt, params, cache_salt=f"run {seed}")
    num_output = 0
    while engine.has_unfinished_requests():
        num_output += sum(len(output.new_token_ids) for output in engine.step())
    elapsed = time.perf_counter() - start
    assert num_output == workload.num_output_tokens
    ttft = [r.metrics.first_token_time - r.metrics.arrival_time for r in added]
    e2e = [r.metrics.finished_time - r.metrics.arrival_time for r in added]
    return {
        "elapsed_time": elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "mean_ttft_ms": 1e3 * statistics.fmean(ttft),
        "mean_e2el_ms": 1e3 * statistics.fmean(e2e),
        "num_steps": engine.stats.num_steps - steps,
    }
