"""Iteration-level against request-level scheduling: the settings, one run's figures, and their tables. Knows no flags."""

from __future__ import annotations

from typing import Any

import numpy as np

from scripts.sarathi_report import agreement, table

WORKLOADS = ("short_long_mix", "equal_size")
SETTINGS = {"iteration": "sarathi", "orca": "orca", "shrinking": "request_level", "padded": "request_level"}
PUBLISHED = {"throughput": 1.44, "ttft": 0.62, "e2e": 0.69}
METRICS = ("throughput", "ttft", "e2e")


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
    """Markdown: what was measured, and iteration-level over request-level beside what was published."""
    measured, ratios = [], []
    for case, found in results.items():
        for name, r in found.items():
            measured.append([case, name, *(r[m] for m in METRICS), r["returned"] if SETTINGS[name] == "request_level" else ""])
        control = case.startswith("equal_size")
        for base in ("padded", "shrinking"):
            over = {m: found["iteration"][m] / found[base][m] for m in METRICS}
            over["returned"] = found["iteration"]["e2e"] / found[base]["returned"]
            # The published E2E counts an answer as it comes.
            verdicts = ", ".join(f"{m} {agreement(PUBLISHED[m], over[m])}" for m in METRICS)
            ratios.append([case, base, *over.values(), "control: 1" if control else verdicts])
    head = ("workload, at most", "setting", "output tok/s", "mean TTFT (s)", "mean E2E (s)", "returned (s)")
    first = ("iteration over", "throughput (published 1.44)", "TTFT (0.62)", "E2E (0.69)", "E2E over returned", "")
    return table(head, measured) + "\n" + table(("workload, at most", *first), ratios)
