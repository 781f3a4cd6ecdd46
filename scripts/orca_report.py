"""Iteration-level against request-level scheduling: the settings, one run's figures, and their tables. Knows no flags."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.sarathi_report import agreement, table

WORKLOADS = ("short_long_mix", "equal_size")
SETTINGS = {"iteration": "sarathi", "orca": "orca", "shrinking": "request_level", "padded": "request_level"}
PUBLISHED = {"throughput": 1.44, "ttft": 0.62, "e2e": 0.69}
METRICS = ("throughput", "ttft", "e2e")
MAX_MODEL_LEN = 640
BUDGET = 512  # tokens a step: the longest prompt
TWO_PROMPTS = 32 + 512  # of neighbours in short_long_mix
CONTROL = 0.03  # how far from 1 the control's throughput may be


def unbounded_budget(max_num_seqs: int) -> int:
    """Tokens of a step that holds a prompt for each sequence, of short_long_mix's, which come short and long by turns."""
    return max(BUDGET, TWO_PROMPTS * max_num_seqs // 2)


def limits(name: str, max_num_seqs: int) -> dict[str, Any]:
    """A setting's limits. Orca's steps are bounded by their sequences alone: with the others' budget a long prompt, which it does
    not split, could only enter an engine with nothing to decode."""
    budget = unbounded_budget(max_num_seqs) if SETTINGS[name] == "orca" else BUDGET
    return {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}


def bucket_plan(name: str, max_num_seqs: int) -> Any:
    """The buckets of a setting: all have the same mixed ones, from 32 tokens to what Orca's steps hold, and decode buckets of
    2, 4, ... to max_num_seqs; padded has the last alone."""
    from jaxserve import BucketPlan

    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128) if size < max_num_seqs] + [max_num_seqs]
    decode, most = sizes[-1:] if name == "padded" else sizes, unbounded_budget(max_num_seqs)
    tokens = [n for n in (32, 64, 128, 256, BUDGET, *(TWO_PROMPTS << i for i in range(6))) if n < most] + [most]
    return BucketPlan(tuple(decode), tuple((n, min(n, max_num_seqs)) for n in tokens), tuple(decode))


def measure(engine: Any, workload: Any, seed: int, max_num_seqs: int) -> dict[str, float]:
    """One run: output tokens a second, and mean TTFT and E2E in seconds, of answers as they come and as their batch ends."""
    from scripts.open_loop import serve

    times = serve(engine, workload, seed).times
    last = times.last
    ends = np.concatenate(
        [np.full(len(batch), batch.max()) for batch in np.split(last, range(max_num_seqs, len(last), max_num_seqs))]
    )
    seconds = {"ttft": float(times.first.mean()), "e2e": float(last.mean()), "returned": float(ends.mean())}
    return {"throughput": float(times.num_output.sum()) / times.duration, **seconds}


def tables(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: what was measured, and both iteration-level settings over the request-level ones beside what was published."""
    measured, ratios = [], []
    for case, found in results.items():
        for name, r in found.items():
            measured.append([case, name, *(r[m] for m in METRICS), r["returned"] if SETTINGS[name] == "request_level" else ""])
        for ours in ("iteration", "orca"):
            for base in ("padded", "shrinking"):
                over = {m: found[ours][m] / found[base][m] for m in METRICS}
                verdict = control(over["throughput"]) if case.startswith("equal_size") else verdicts(over)
                ratios.append([case, ours, base, *over.values(), found[ours]["e2e"] / found[base]["returned"], verdict])
    head = ("workload, at most", "setting", "output tok/s", "mean TTFT (s)", "mean E2E (s)", "returned (s)")
    first = ("setting", "over", "throughput (published 1.44)", "TTFT (0.62)", "E2E (0.69)", "E2E over returned", "")
    return table(head, measured) + "\n" + table(("workload, at most", *first), ratios)


def verdicts(over: dict[str, float]) -> str:
    """Of each published ratio; the published E2E counts an answer as it comes."""
    return ", ".join(f"{m} {agreement(PUBLISHED[m], over[m])}" for m in METRICS)


def control(throughput: float) -> str:
    """Where nothing ends early, nobody is to gain."""
    return "control, 1 ± 0.03: " + ("agrees" if abs(throughput - 1) <= CONTROL else "contradicts")
