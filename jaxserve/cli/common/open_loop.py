"""One timed run of a workload on an engine, its requests arriving at the workload's own times."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.workloads.latency import ServedTimes
from jaxserve.workloads.workload import Workload


@dataclass(frozen=True)
class ServedRun:
    """times: of every token, in seconds from the run's beginning. steps: f64[m, 4], one row a call of the engine's step: when it
    was called and when it returned; prompt and output tokens of what it waited for, which with a step in flight is the step that
    the call before dispatched. counts: padding, preemptions, prefix hits."""

    times: ServedTimes
    steps: np.ndarray
    counts: dict[str, Any]


def _take(
    outputs: Sequence[Any],
    now: float,
    first: np.ndarray,  # f64[n]: when each request's first token was there, NaN before
    last: np.ndarray,  # f64[n]: and its newest
    gaps: list[float],  # between two tokens of a request
    num_made: list[int],
) -> int:
    """Takes in what a step brought at the time `now`; returns how many requests it ended."""
    for output in outputs:
        i = int(output.request.request_id)
        assert output.new_token_ids, "a request broke off"
        for _ in output.new_token_ids:  # those of one step are there at once
            if np.isnan(first[i]):
                first[i] = now
            else:
                gaps.append(now - last[i])
            last[i] = now
        num_made[i] += len(output.new_token_ids)
    return sum(output.finished for output in outputs)


def serve(engine: Any, workload: Workload, seed: int, *, max_concurrency: int | None = None, progress: Any = None) -> ServedRun:
    """Serves a workload to its end, every request to its full length; prompts whose ids it leaves open are drawn by `seed`.
    RuntimeError if a request brought fewer tokens than the workload asks for: its figures would be of tokens never made.

    A request counts as arrived at its time in the workload, though the engine may be in a step then and take it in later. With
    max_concurrency it is not sent before an earlier one has ended, and counts as arrived when it is.
    """
    from jaxserve import SamplingParams
    from jaxserve.buckets.padding import PaddingAccount

    requests, n = workload.requests, len(workload.requests)
    prompts = workload.prompts(engine.config.model.vocab_size, seed)
    arrivals, first, last = np.array([r.arrived_at for r in requests]), np.full(n, np.nan), np.full(n, np.nan)
    added: list[Any] = []
    gaps: list[float] = []
    steps: list[tuple[float, float, int, int]] = []
    in_flight: deque[int] = deque()  # prompt tokens of each step that is not back
    engine.stats.padding = PaddingAccount()
    before = engine.scheduler.stats()
    num_sent = num_ended = 0
    num_made = [0] * n
    begin, cpu = time.monotonic(), time.process_time()  # the clock of the engine's own metrics
    while num_ended < n:
        now = time.monotonic() - begin
        while num_sent < n and arrivals[num_sent] <= now and num_sent - num_ended < (max_concurrency or n):
            request = requests[num_sent]
            if max_concurrency and num_sent >= max_concurrency:
                arrivals[num_sent] = now
            params = SamplingParams(
                temperature=workload.temperature, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False
            )
            added += engine.add_request(str(num_sent), prompts[num_sent], params, cache_salt=f"run {seed}")
            prompts[num_sent] = []
            num_sent += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[num_sent] - (time.monotonic() - begin)))
            continue
        num_steps, num_prefill = engine.stats.num_steps, engine.stats.prefill_tokens
        called = time.monotonic() - begin
        outputs = engine.step()
        now = time.monotonic() - begin
        num_ended += _take(outputs, now, first, last, gaps, num_made)
        if engine.stats.num_steps > num_steps:
            in_flight.append(engine.stats.prefill_tokens - num_prefill)
        num_back = len(in_flight) - engine.scheduler.num_steps_in_flight
        num_prompt_back = sum(in_flight.popleft() for _ in range(num_back))
        num_new = sum(len(output.new_token_ids) for output in outputs)
        steps.append((called, now, num_prompt_back, num_new))
        if progress is not None:
            progress.update(num_ended - progress.n)
    _check_made(num_made, workload)
    num_prompt, num_output = np.array([(r.num_prompt_tokens, r.num_output_tokens) for r in requests]).T
    counts = {**_counts(engine, before), "cpu_seconds": time.process_time() - cpu}  # of this process: the host, and a CPU device
    scheduled = np.array([request.metrics.first_scheduled_time for request in added]) - begin
    times = ServedTimes(arrivals, first, last, num_prompt, num_output, np.array(gaps), np.ones(len(gaps), np.int64), scheduled)
    return ServedRun(times, np.array(steps), counts)


def _check_made(num_made: list[int], workload: Workload) -> None:
    short = [i for i, request in enumerate(workload.requests) if num_made[i] != request.num_output_tokens]
    if short:
        i, request = short[0], workload.requests[short[0]]
        raise RuntimeError(
            f"{len(short)} requests of {workload.name} did not run to their full length: number {i}, of "
            f"{request.num_prompt_tokens} prompt tokens, brought {num_made[i]} of {request.num_output_tokens} output tokens; is "
            "max_model_len too small?"
        )


def _counts(engine: Any, before: Any) -> dict[str, Any]:
    """What the scheduler and the buckets counted since `before`."""
    stats, padding = engine.scheduler.stats(), engine.stats.padding
    queried = stats.num_queried_tokens - before.num_queried_tokens
    return {
        "num_steps": stats.num_steps - before.num_steps,
        "num_preemptions": stats.num_preemptions - before.num_preemptions,
        "prefix_hit_share": (stats.num_hit_tokens - before.num_hit_tokens) / queried if queried else 0.0,
        "padding_share": padding.padding_share,
        "steps_by_bucket": {str(bucket): count for bucket, count in padding.by_bucket()},
    }
