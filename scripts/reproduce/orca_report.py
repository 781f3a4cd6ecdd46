"""Iteration-level against request-level scheduling: the settings, one run's figures, and their tables. Knows no flags."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from jaxserve.cli.common.tables import agreement, table

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


def order(names: Sequence[str], i: int) -> list[str]:
    """Round i's order: in as many rounds as there are names each comes once at each place; the next so many go backwards, so that
    it does not always follow the same one."""
    k = i % len(names)
    turned = [*names[k:], *names[:k]]
    return turned[::-1] if i // len(names) % 2 else turned


def measure(engine: Any, workload: Any, seed: int, max_num_seqs: int) -> tuple[dict[str, float], dict[str, int]]:
    """One run: output tokens a second, mean TTFT and E2E in seconds, of answers as they come and as their batch ends, and its
    number of steps; and these by bucket."""
    from jaxserve.cli.common.open_loop import serve

    run = serve(engine, workload, seed)
    times, last = run.times, run.times.last
    ends = np.concatenate(
        [np.full(len(batch), batch.max()) for batch in np.split(last, range(max_num_seqs, len(last), max_num_seqs))]
    )
    seconds = {"ttft": float(times.first.mean()), "e2e": float(last.mean()), "returned": float(ends.mean())}
    throughput = float(times.num_output.sum()) / times.duration
    return {"throughput": throughput, **seconds, "num_steps": run.counts["num_steps"]}, run.counts["steps_by_bucket"]


def medians(setting: Any) -> dict[str, float]:
    """Of each figure over a setting's rounds."""
    return {name: statistics.median(r[name] for r in setting["rounds"]) for name in setting["rounds"][0]}


def paired(ours: Any, base: Any, metric: str, base_metric: str | None = None) -> list[float]:
    """Of each round, one setting's figure over another's."""
    return [r[metric] / b[base_metric or metric] for r, b in zip(ours["rounds"], base["rounds"], strict=True)]


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: what was measured, and both iteration-level settings over the request-level ones beside what was published."""
    measured, ratios = [], []
    for case, found in results.items():
        for name, setting in found.items():
            r = medians(setting)
            returned = r["returned"] if SETTINGS[name] == "request_level" else ""
            measured.append([case, name, *(r[m] for m in METRICS), returned, f"{r['num_steps']:g}"])
        for ours in ("iteration", "orca"):
            for base in ("padded", "shrinking"):
                ratios.append([case, ours, base, *compared(found[ours], found[base], case.startswith("equal_size"))])
    head = ("workload, at most", "setting", "output tok/s", "mean TTFT (s)", "mean E2E (s)", "returned (s)", "steps")
    first = ("setting", "over", "throughput (published 1.44)", "its rounds", "TTFT (0.62)", "E2E (0.69)", "E2E over returned", "")
    return table(head, measured) + "\n" + table(("workload, at most", *first), ratios) + noise(results)


def compared(ours: Any, base: Any, is_control: bool) -> list[Any]:
    """A row's ratios: medians over the rounds, of throughput its lowest and highest too; and the verdict."""
    throughputs = paired(ours, base, "throughput")
    over = {m: statistics.median(paired(ours, base, m)) for m in METRICS}
    returned = statistics.median(paired(ours, base, "e2e", "returned"))
    same = ", the same steps" if ours["steps_by_bucket"] == base["steps_by_bucket"] else ""
    verdict = control(over["throughput"]) + same if is_control else verdicts(over)
    rounds = f"{min(throughputs):.3g} to {max(throughputs):.3g}"
    return [over["throughput"], rounds, over["ttft"], over["e2e"], returned, verdict]


def noise(results: dict[str, dict[str, Any]]) -> str:
    """A line on settings whose steps are the same, bucket by bucket: what sets their throughputs apart is not scheduling."""
    pairs = [pair for found in results.values() for pair in combinations(found.values(), 2)]
    found = [paired(a, b, "throughput") for a, b in pairs if a["steps_by_bucket"] == b["steps_by_bucket"]]
    if not found:
        return ""
    apart = [abs(statistics.median(ratios) - 1) for ratios in found]
    rounds = [abs(ratio - 1) for ratios in found for ratio in ratios]
    return (
        f"\nNoise: of {len(found)} pairs of settings whose steps are the same, bucket by bucket, the throughput is "
        f"{100 * statistics.median(rounds):.1f}% apart in a round (median; at most {100 * max(rounds):.1f}%), the ratio that "
        f"counts {100 * statistics.median(apart):.1f}% off 1 (median; at most {100 * max(apart):.1f}%).\n"
    )


def verdicts(over: dict[str, float]) -> str:
    """Of each published ratio; the published E2E counts an answer as it comes."""
    return ", ".join(f"{m} {agreement(PUBLISHED[m], over[m])}" for m in METRICS)


def control(throughput: float) -> str:
    """Where nothing ends early, nobody is to gain."""
    return "control, 1 ± 0.03: " + ("agrees" if abs(throughput - 1) <= CONTROL else "contradicts")
