"""Latencies of a served workload, from the times at which its tokens came: the same numbers for a real run and a simulated one.

Owns the definitions and vLLM's names for them: TTFT (arrival to first token), TPOT (mean time per output token after the first),
ITL (each gap between a request's tokens), E2EL (arrival to last token), goodput (requests a second that meet every objective).
Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.lazy_names import Late

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")  # the commands' --help reads METRICS


METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class ServedTimes:
    """When the tokens of a workload came.

    arrivals, first, last: f64[n] seconds on one clock, of each request's arrival, first and last token. num_prompt, num_output:
    i64[n] tokens. gaps: f64[m] seconds between neighbouring tokens of one request; gap_counts: i64[m] how often each occurred.
    scheduled: f64[n], when a step first held each request; None where nobody noted it. complete: False of a run that was broken
    off, whose delays and gaps are at most what they would have become (RequestRecords.times).
    """

    arrivals: np.ndarray
    first: np.ndarray
    last: np.ndarray
    num_prompt: np.ndarray
    num_output: np.ndarray
    gaps: np.ndarray
    gap_counts: np.ndarray
    scheduled: np.ndarray | None = None
    complete: bool = True

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.last.max() - self.arrivals.min())

    def seconds(self, metric: str) -> np.ndarray:
        """Each request's ttft, tpot (of those with more than one token) or e2el, in seconds."""
        if metric == "ttft":
            return self.first - self.arrivals
        if metric == "e2el":
            return self.last - self.arrivals
        several = self.num_output > 1
        return (self.last - self.first)[several] / (self.num_output[several] - 1)

    @property
    def scheduling_delays(self) -> np.ndarray:
        """Seconds from each request's arrival to the first step that held it."""
        assert self.scheduled is not None, "these times were taken without noting when requests were first scheduled"
        return self.scheduled - self.arrivals

    def gap_quantile(self, q: float) -> float:
        """The q-quantile (0 to 1) of the gaps between tokens, in seconds; 0 where no request had two."""
        return _weighted_quantile(self.gaps, self.gap_counts, q)

    def good(self, objectives: Mapping[str, float]) -> np.ndarray:
        """bool[n]: requests that meet every objective, given in milliseconds by metric: ttft, tpot, e2el."""
        good = np.ones(len(self.arrivals), bool)
        for metric, limit in objectives.items():
            if metric == "tpot":
                tpot = (self.last - self.first) / np.maximum(1, self.num_output - 1)
                good &= tpot * 1e3 <= limit
            else:
                good &= self.seconds(metric) * 1e3 <= limit
        return good

    def peak_concurrency(self) -> int:
        """Most requests that had arrived and not ended at one time."""
        times = np.concatenate([self.arrivals, self.last])
        steps = np.concatenate([np.ones(len(self.arrivals)), -np.ones(len(self.last))])
        order = np.lexsort((steps, times))  # at equal times those that leave come first
        return int(np.cumsum(steps[order]).max())

    def summary(
        self,
        *,
        metrics: Sequence[str] = METRICS,
        percentiles: Sequence[float] = (99,),
        objectives: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """vLLM's benchmark fields: totals, throughputs, goodput, and mean, median, std and percentiles in ms of each metric."""
        duration = self.duration
        total_input, total_output = int(self.num_prompt.sum()), int(self.num_output.sum())
        result: dict[str, Any] = {
            "duration": duration,
            "completed": len(self.arrivals),
            "total_input_tokens": total_input,
            "total_output_tokens": total_output,
            "request_throughput": len(self.arrivals) / duration,
            "request_goodput": float(self.good(objectives).sum() / duration) if objectives else None,
            "output_throughput": total_output / duration,
            "total_token_throughput": (total_input + total_output) / duration,
            "max_concurrent_requests": self.peak_concurrency(),
        }
        for metric in metrics:
            values, counts = (self.gaps, self.gap_counts) if metric == "itl" else (self.seconds(metric), None)
            result |= _spread(metric, values * 1e3, np.ones(len(values), int) if counts is None else counts, percentiles)
        return result


def _spread(metric: str, values: np.ndarray, counts: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    if not counts.sum():
        return {f"{name}_{metric}_ms": None for name in ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))}
    mean = float(np.average(values, weights=counts))
    fields = {
        "mean": mean,
        "median": _weighted_quantile(values, counts, 0.5),
        "std": float(np.sqrt(np.average((values - mean) ** 2, weights=counts))),
    }
    fields |= {f"p{p:g}": _weighted_quantile(values, counts, p / 100) for p in percentiles}
    return {f"{name}_{metric}_ms": value for name, value in fields.items()}


def _weighted_quantile(values: np.ndarray, counts: np.ndarray, q: float) -> float:
    """numpy's linear quantile of `values`, each repeated `counts` times."""
    if not counts.sum():
        return 0.0
    order = np.argsort(values, kind="stable")
    values, ends = values[order], np.cumsum(counts[order])
    at = q * (ends[-1] - 1)
    low, high = np.searchsorted(ends, [np.floor(at), np.ceil(at)], side="right")
    return float(values[low] + (values[high] - values[low]) * (at - np.floor(at)))


def parse_objectives(items: Sequence[str]) -> dict[str, float]:
    """Service-level objectives written as vLLM does, "ttft:200": milliseconds by metric. ValueError names a bad one."""
    objectives = {}
    for item in items:
        name, _, value = item.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in ("ttft", "tpot", "e2el") or not limit > 0:
            raise ValueError(f"goodput {item!r} must be ttft, tpot or e2el, a colon, and milliseconds above 0, such as tpot:50")
        objectives[name] = limit
    return objectives
