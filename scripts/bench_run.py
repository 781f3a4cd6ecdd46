"""One timed run of a workload on an engine, which every throughput benchmark shares."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np


def serve(engine: Any, requests: list[tuple[int, int]], seed: int) -> dict[str, Any]:
    """Serves a workload, given all at once, to its end: random prompts, greedy, to the full length; elapsed_time in seconds."""
    from jaxserve import SamplingParams

    rng = np.random.default_rng(seed)
    vocab = engine.config.model.vocab_size
    prompts = [rng.integers(0, vocab, n).tolist() for n, _ in requests]
    steps = engine.stats.num_steps
    start = time.perf_counter()
    added = []
    for i, (prompt, (_, num_output)) in enumerate(zip(prompts, requests, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
        added += engine.add_request(str(i), prompt, params)
    num_output = 0
    while engine.has_unfinished_requests():
        num_output += sum(len(output.new_token_ids) for output in engine.step())
    elapsed = time.perf_counter() - start
    assert num_output == sum(n for _, n in requests)
    ttft = [r.metrics.first_token_time - r.metrics.arrival_time for r in added]
    e2e = [r.metrics.finished_time - r.metrics.arrival_time for r in added]
    return {
        "elapsed_time": elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "mean_ttft_ms": 1e3 * statistics.fmean(ttft),
        "mean_e2el_ms": 1e3 * statistics.fmean(e2e),
        "num_steps": engine.stats.num_steps - steps,
    }
