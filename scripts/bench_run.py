"""One timed run of a workload on an engine, which every throughput benchmark shares."""

from __future__ import annotations

import statistics
import time
from typing import Any

from jaxserve.workloads import Workload


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
